"""Whole optimizer steps against a plain loop: a Hugging Face model, all logits, unfused AdamW, one sample at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trainer_samples import mixed_batch, new_trainer, run_config, share, values, with_behaviour, worst
from transformers import AutoModelForCausalLM

from ranks import Ranks
from stretto.types import Batch, Rollout
from stretto.world import World

STEPS = 5
WARMUP = 2
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "lr": 2e-3,
    "schedule": "linear",
    "warmup_steps": WARMUP,
    "weight_decay": 0.1,
    "clip_grad": 0.5,
}


class PlainLoop:
    """PPO-clip with truncated importance weights and a token mean, written out."""

    def __init__(self, directory: Path, total_updates: int) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, foreach=False, fused=False)
        self.total, self.done = total_updates, 0

    def logprobs(self, one: Rollout) -> Tensor:
        """Of all response tokens."""
        logits_TV = self.model(torch.tensor([[*one.prompt_ids, *one.response_ids]])).logits[0] / one.temperature
        first = len(one.prompt_ids) - 1
        logprobs_TV = logits_TV[first : first + len(one.response_ids)].log_softmax(-1)
        return logprobs_TV.gather(-1, torch.tensor(one.response_ids)[:, None])[:, 0]

    def step(self, batch: Batch, updates: Sequence[Sequence[int]]) -> list[float]:
        """One batch in optimizer steps of those samples; returns their losses."""
        with torch.no_grad():
            old = [self.logprobs(one) for one in batch.rollouts]
        return [self._update(batch, indices, old) for indices in updates]

    def _update(self, batch: Batch, indices: Sequence[int], old: Sequence[Tensor]) -> float:
        tokens = sum(batch.rollouts[i].loss_tokens for i in indices)
        loss = torch.zeros(())
        for i in indices:
            one, advantage = batch.rollouts[i], batch.advantages[i]
            kept = torch.tensor(one.loss_mask_T, dtype=torch.bool)
            current, before, behaviour = self.logprobs(one)[kept], old[i][kept], torch.tensor(one.logprobs_T)[kept]
            ratio = (current - before).exp()
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            loss = loss - (surrogate * (before - behaviour).exp().clamp(max=2.0)).sum() / tokens
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5, foreach=False)
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate()
        self.optimizer.step()
        self.done += 1
        return loss.item()

    def _rate(self) -> float:
        if self.done < WARMUP:
            return 2e-3 * (self.done + 1) / WARMUP
        return 2e-3 * (1 - (self.done - WARMUP) / (self.total - WARMUP))

    def values(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters()}


def recorded(directory: Path) -> Batch:
    return with_behaviour(new_trainer(directory, run_config()), mixed_batch(97), noise=0.3)


@pytest.mark.parametrize("parts", [1, 2])
def test_training_is_the_plain_loop(tiny_model: Path, parts: int) -> None:
    batch = recorded(tiny_model)
    trainer = new_trainer(tiny_model, run_config(SETTINGS | {"updates_per_batch": parts}, steps=STEPS))
    plain = PlainLoop(tiny_model, STEPS * parts)
    updates = [range(10)] if parts == 1 else [range(5), range(5, 10)]
    deviations = []
    for _ in range(STEPS):
        report = trainer.step(batch)
        losses = plain.step(batch, updates)
        assert report.updates == parts
        assert report.metrics["train/loss"] == pytest.approx(sum(losses) / parts, abs=1e-6)
        deviations.append(report.metrics["train/ratio_max_deviation"])
    assert worst(values(trainer), plain.values()) < 1e-5
    # Two updates: the second one's ratio is to the policy before the first one.
    assert all(value == 0 for value in deviations) if parts == 1 else min(deviations) > 1e-3


# The groups are (0 1 2)(3 4)(5 6 7)(8 9): in turn, as the prompts of a run go to the ranks, and very unevenly.
IN_TURN = ((0, 1, 2, 5, 6, 7), (3, 4, 8, 9))
UNEVEN = ((0, 1, 2, 3, 4, 5, 6, 7), (8, 9))


@pytest.mark.parametrize(("parts", "shares"), [(1, IN_TURN), (2, IN_TURN), (2, UNEVEN)])
def test_two_ranks_train_as_one(tiny_model: Path, pair: Ranks, parts: int, shares: Sequence[Sequence[int]]) -> None:
    batch = recorded(tiny_model)
    trainer = new_trainer(tiny_model, run_config(SETTINGS | {"updates_per_batch": parts}, steps=STEPS))
    expected = [trainer.step(batch).metrics for _ in range(STEPS)]
    for found, weights in pair.run(train_on_two_ranks, tiny_model, parts, batch, shares):
        for one, other in zip(found, expected, strict=True):
            assert one.keys() == other.keys()
            assert one == pytest.approx(dict(other), rel=1e-4, abs=1e-6)
        assert worst(weights, values(trainer)) < 1e-5


def train_on_two_ranks(
    world: World, directory: Path, parts: int, batch: Batch, shares: Sequence[Sequence[int]]
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    trainer = new_trainer(directory, run_config(SETTINGS | {"updates_per_batch": parts}, steps=STEPS), world)
    mine = share(batch, shares[world.rank])
    metrics = [dict(trainer.step(mine).metrics) for _ in range(STEPS)]
    return metrics, values(trainer)


@pytest.mark.parametrize("parts", [1, 2])
def test_two_ranks_without_any_advantage_step_as_one(tiny_model: Path, pair: Ranks, parts: int) -> None:
    """The momentum of earlier steps moves every weight, also those of the root of the sharding."""
    batch = recorded(tiny_model)
    trainer = new_trainer(tiny_model, run_config(SETTINGS | {"updates_per_batch": parts}, steps=STEPS))
    trainer.step(batch)
    trainer.step(Batch(batch.rollouts, [0.0] * 10))
    for weights in pair.run(zero_step_on_two_ranks, tiny_model, parts, batch):
        assert worst(weights, values(trainer)) < 1e-5


def zero_step_on_two_ranks(world: World, directory: Path, parts: int, batch: Batch) -> dict[str, Tensor]:
    trainer = new_trainer(directory, run_config(SETTINGS | {"updates_per_batch": parts}, steps=STEPS), world)
    mine = share(batch, IN_TURN[world.rank])
    trainer.step(mine)
    trainer.step(Batch(mine.rollouts, [0.0] * len(mine.rollouts)))
    return values(trainer)


def test_weight_decay_shrinks_matrices_alone(tiny_model: Path) -> None:
    trainer = new_trainer(tiny_model, run_config({"dtype": "float32", "lr": 0.1, "weight_decay": 0.5}))
    before = values(trainer)
    batch = mixed_batch(97)
    trainer.step(Batch(batch.rollouts, [0.0] * 10))
    for name, tensor in values(trainer).items():
        expected = before[name] * (1 - 0.1 * 0.5) if tensor.ndim > 1 else before[name]
        torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=0)
