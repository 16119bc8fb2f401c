"""A small awkward batch, trainers for it, and their gradients."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from stretto.config import RunConfig, config_from_dict
from stretto.data.batching import cut
from stretto.trainers.fsdp import FSDPTrainer
from stretto.trainers.updates import plan_updates
from stretto.types import Batch, FinishReason, Rollout
from stretto.world import World, whole

Batching = Literal["packed", "padded"]
ALONE = World(0, 1, torch.device("cpu"))

# Response lengths of each group, and what its tokens were sampled at; the prompts have 3, 11, 6 and 1 tokens.
_GROUPS = ((3, (4, 7, 1), 1.0), (11, (2, 5), 0.7), (6, (3, 3, 6), 1.3), (1, (9, 2), 1.0))
_ADVANTAGES = (1.3, -0.4, 0.0, 0.7, -2.0, 0.0, 0.9, 1.0, -1.1, 0.5)
_HOLES = {1: (2, 3), 4: (0,), 7: (0, 1, 2, 3, 4, 5), 8: (4, 8)}


def run_config(
    trainer: Mapping[str, Any] | None = None, algorithm: Mapping[str, Any] | None = None, **top: Any
) -> RunConfig:
    """A run of two-process size whose prompts and rewards are never looked at."""
    return config_from_dict(
        {
            "model": {"path": "smollm2"},
            "data": {"source": "unused.jsonl"},
            "reward": {"functions": ["math_verify"]},
            "rollout": {"max_new_tokens": 16},
            "trainer": {"dtype": "float64"} | dict(trainer or {}),
            "algorithm": dict(algorithm or {}),
        }
        | top
    )


def mixed_batch(vocabulary: int) -> Batch:
    """Ten samples of four groups: prompts and responses of many lengths, holes in the mask, one sample without loss
    tokens, zero advantages, three temperatures. Behaviour log-probs are 0, and NaN under the mask.
    """
    draw = random.Random(7)
    rollouts: list[Rollout] = []
    for group, (prompt_length, lengths, temperature) in enumerate(_GROUPS):
        prompt = tuple(draw.randrange(2, vocabulary) for _ in range(prompt_length))
        for length in lengths:
            holes = _HOLES.get(len(rollouts), ())
            rollouts.append(
                Rollout(
                    prompt_ids=prompt,
                    response_ids=tuple(draw.randrange(2, vocabulary) for _ in range(length)),
                    logprobs_T=tuple(float("nan") if t in holes else 0.0 for t in range(length)),
                    loss_mask_T=tuple(int(t not in holes) for t in range(length)),
                    temperature=temperature,
                    finish_reason=FinishReason.STOP,
                    version_spans=(),
                    group_id=group,
                    seed=len(rollouts),
                    source_row=group,
                )
            )
    return Batch(rollouts, _ADVANTAGES)


def with_behaviour(trainer: FSDPTrainer, batch: Batch, noise: float) -> Batch:
    """The batch with behaviour log-probs near the trainer's own (NaN stays under the mask)."""
    draw = random.Random(11)
    rollouts = []
    for rollout, kept in zip(batch.rollouts, trainer.logprobs(batch.rollouts), strict=True):
        values = iter(kept)
        logprobs = tuple(next(values) + draw.gauss(0, noise) if keep else float("nan") for keep in rollout.loss_mask_T)
        rollouts.append(replace(rollout, logprobs_T=logprobs))
    return Batch(rollouts, batch.advantages)


def share(batch: Batch, indices: Sequence[int]) -> Batch:
    """Only those samples."""
    return Batch([batch.rollouts[i] for i in indices], [batch.advantages[i] for i in indices])


def scale_weights(trainer: FSDPTrainer, factor: float = 1.02) -> None:
    """Move the policy away from the checkpoint, so that it differs from the reference model (works on shards too)."""
    with torch.no_grad():
        for parameter in trainer._policy.parameters():
            parameter.mul_(factor)


def recut(trainer: FSDPTrainer, batching: Batching, micro_batch_tokens: int) -> None:
    """Let the trainer cut its batches another way: loading a model anew for each way would take most of the time."""
    trainer._settings = trainer._settings.model_copy(
        update={"batching": batching, "micro_batch_tokens": micro_batch_tokens}
    )


def budget_for(batch: Batch, batching: Batching, passes: int) -> int:
    """The largest micro_batch_tokens that cuts the batch into `passes` micro-batches."""
    everything = range(len(batch.rollouts))
    for budget in range(400, 0, -1):
        if len(cut(batch.rollouts, everything, batching=batching, micro_batch_tokens=budget)) == passes:
            return budget
    raise AssertionError(f"no budget cuts the batch into {passes} micro-batches")


def gradient(trainer: FSDPTrainer, batch: Batch, old: Tensor | None = None) -> tuple[float, dict[str, Tensor]]:
    """Loss and whole gradient of the batch as one update, before clipping; collective."""
    (update,) = plan_updates(batch, trainer._config, trainer._objective, trainer._world)
    loss, _ = trainer._accumulate(batch, update, old)
    return loss, take_gradient(trainer)


def take_gradient(trainer: FSDPTrainer) -> dict[str, Tensor]:
    """The accumulated gradient by parameter name, which is then cleared; collective."""
    found = {}
    for name, parameter in trainer._policy.named_parameters():
        assert parameter.grad is not None, name
        found[name] = whole(parameter.grad).clone()
    trainer._optimizer.zero_grad(set_to_none=True)
    return found


def values(trainer: FSDPTrainer) -> dict[str, Tensor]:
    """Copies of the whole weights by checkpoint name; collective."""
    return {name: whole(tensor.detach()).clone() for name, tensor in trainer.weights().items()}


def worst(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest relative difference (of norms) of any parameter."""
    assert found.keys() == expected.keys()
    return max(float((found[n] - expected[n]).norm() / expected[n].norm()) for n in expected)


def new_trainer(directory: Path, config: RunConfig, world: World = ALONE) -> FSDPTrainer:
    """A trainer of that checkpoint; in float64 its model really computes in it.

    Transformers' norms go through float32 whatever the model's dtype. The sum of rounded gradients is not the rounded
    sum, so that a shared prompt alone would limit the agreement to 1e-7.
    """
    trainer = FSDPTrainer(directory, config, world)
    if config.trainer.dtype == "float64":
        for policy in filter(None, (trainer._policy, trainer._reference)):
            for module in policy.modules():
                if isinstance(module, LlamaRMSNorm):
                    setattr(module, "forward", partial(_exact_norm, module))  # noqa: B010  # only this one, not its class
    return trainer


def _exact_norm(norm: Any, hidden: Tensor) -> Tensor:
    return norm.weight * hidden * (hidden.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
