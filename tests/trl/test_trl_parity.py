"""The gradient of one recorded batch is that of TRL's GRPOTrainer on the same tokens, advantages and log-probs."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from stretto.config import config_from_dict
from stretto.data.batching import slot_offsets
from stretto.trainers.fsdp import FSDPTrainer
from stretto.trainers.updates import plan_updates
from stretto.types import Batch, FinishReason, Rollout
from stretto.world import World

trl = pytest.importorskip("trl")

# TRL's name of each aggregation; its "bnpo" is "dapo" without gradient accumulation, computed another way.
LOSS_TYPES = {"grpo": "sequence_mean", "bnpo": "token_mean", "dapo": "token_mean", "dr_grpo": "constant_length"}
BETA = 0.2
TEMPERATURE = 0.9
MAX_NEW = 9


class Sides(NamedTuple):
    """Our trainer's and TRL's policy have the same weights, moved away from the reference model's."""

    make_ours: Callable[[str, float], FSDPTrainer]
    theirs: Any
    reference: Any
    batch: Batch


def recorded_batch(vocabulary: int) -> Batch:
    """Two groups of three, prompts and responses of many lengths, two of them with holes in the mask."""
    draw = random.Random(5)
    rollouts = []
    for group, prompt_length in enumerate((4, 9)):
        prompt = tuple(draw.randrange(2, vocabulary) for _ in range(prompt_length))
        for length in (3, MAX_NEW, 1 + 4 * group):
            holes = {1, 4} if length == MAX_NEW else set()
            rollouts.append(
                Rollout(
                    prompt_ids=prompt,
                    response_ids=tuple(draw.randrange(2, vocabulary) for _ in range(length)),
                    logprobs_T=(0.0,) * length,
                    loss_mask_T=tuple(int(t not in holes) for t in range(length)),
                    temperature=TEMPERATURE,
                    finish_reason=FinishReason.STOP,
                    version_spans=(),
                    group_id=group,
                    seed=len(rollouts),
                    source_row=group,
                )
            )
    return Batch(rollouts, (1.2, -0.7, -0.5, 0.4, 0.8, -1.2))


def sides_of(directory: Path, vocabulary: int, scratch: Path) -> Sides:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    arguments = trl.GRPOConfig(
        output_dir=str(scratch),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=6,
        num_generations=3,
        max_completion_length=MAX_NEW,
        temperature=TEMPERATURE,
        epsilon=0.2,
        epsilon_high=0.3,
        use_bias_correction_kl=False,  # TRL's default multiplies the KL by the ratio; ours is the plain k3
        report_to=[],
    )
    theirs = trl.GRPOTrainer(
        model=load(),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "a"}] * 6),
        processing_class=AutoTokenizer.from_pretrained(directory),
    )
    theirs.current_gradient_accumulation_steps = 1  # its training loop sets it
    move(theirs.model.parameters())

    def make_ours(aggregation: str, beta: float) -> FSDPTrainer:
        ours = FSDPTrainer(directory, our_config(aggregation, beta), World(0, 1, torch.device("cpu")))
        move(ours._policy.parameters())
        return ours

    return Sides(make_ours, theirs, load(), recorded_batch(vocabulary))


def our_config(aggregation: str, beta: float):
    kl = {"kl_coef": beta, "kl_estimator": "k3"} if beta else {}
    return config_from_dict(
        {
            "model": {"path": "smollm2"},
            "data": {"source": "unused.jsonl"},
            "reward": {"functions": ["math_verify"]},
            "rollout": {"max_new_tokens": MAX_NEW},
            "trainer": {"dtype": "float32", "updates_per_batch": 2},
            "algorithm": {"aggregation": aggregation, "mismatch": "off", "clip_high": 0.3} | kl,
        }
    )


@torch.no_grad()
def move(parameters) -> None:
    for parameter in parameters:
        parameter.mul_(1.02)


@pytest.fixture(scope="module")
def tiny(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Sides:
    return sides_of(tiny_model, 97, tmp_path_factory.mktemp("trl"))


@pytest.fixture(scope="module")
def real(smollm2_cut: Path, tmp_path_factory: pytest.TempPathFactory) -> Sides:
    return sides_of(smollm2_cut, 49152, tmp_path_factory.mktemp("trl"))


@pytest.mark.parametrize("clip", [False, True], ids=["ratio_one", "clip_active"])
@pytest.mark.parametrize("beta", [0.0, BETA])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_gradient_is_trls(tiny: Sides, loss_type: str, beta: float, clip: bool) -> None:
    compare(tiny, loss_type, beta, clip)


@pytest.mark.parametrize(
    ("loss_type", "beta", "clip"),
    [("grpo", BETA, False), ("bnpo", 0.0, True), ("dapo", 0.0, False), ("dr_grpo", BETA, True)],
)
def test_gradient_of_a_real_model_is_trls(real: Sides, loss_type: str, beta: float, clip: bool) -> None:
    compare(real, loss_type, beta, clip)


def compare(sides: Sides, loss_type: str, beta: float, clip: bool) -> None:
    batch = sides.batch
    ours = sides.make_ours(LOSS_TYPES[loss_type], beta)
    old = old_logprobs(ours, batch) if clip else None
    # The batch as one update: the clip, a key of runs with several, acts on the old log-probs that it is given.
    settings = ours._config.trainer.model_copy(update={"updates_per_batch": 1})
    config = ours._config.model_copy(update={"trainer": settings})
    (update,) = plan_updates(batch, config, ours._objective, ours._world)
    loss, stats = ours._accumulate(batch, update, old)
    clipped = float(stats.sums["train/clip_fraction"])
    assert clipped > 0 if clip else clipped == 0
    found = {name.removeprefix("model."): p.grad for name, p in ours._policy.named_parameters()}

    their_loss, expected = trl_gradient(sides, loss_type, beta, old)
    assert loss == pytest.approx(their_loss, rel=1e-4, abs=1e-5)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        mine = found[name]
        assert mine is not None, name
        assert (mine - tensor).norm() < 1e-4 * tensor.norm(), name


def old_logprobs(ours: FSDPTrainer, batch: Batch) -> Tensor:
    """Flat old log-probs, far enough from the current ones that some ratios leave the clip range on either side."""
    current = torch.tensor([value for part in ours.logprobs(batch.rollouts) for value in part], dtype=torch.float64)
    shift = torch.tensor([0.0, 0.5, -0.5, 0.1, -0.1, 0.25]).repeat(len(current))[: len(current)]
    return current + shift


def trl_gradient(sides: Sides, loss_type: str, beta: float, old: Tensor | None) -> tuple[float, dict[str, Tensor]]:
    theirs = sides.theirs
    theirs.loss_type, theirs.beta = loss_type, beta
    inputs = trl_inputs(sides.batch, old)
    if beta:
        inputs["ref_per_token_logps"] = reference_logprobs(sides)
    theirs.model.train()
    theirs.model.zero_grad()
    loss = theirs.compute_loss(theirs.model, inputs)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in theirs.model.named_parameters()}


def trl_inputs(batch: Batch, old: Tensor | None) -> dict[str, Any]:
    """TRL pads prompts on the left and completions on the right; its tool mask is our loss mask."""
    prompts = [one.prompt_ids for one in batch.rollouts]
    width = max(map(len, prompts))
    inputs: dict[str, Any] = {
        "prompt_ids": torch.tensor([[0] * (width - len(ids)) + list(ids) for ids in prompts]),
        "prompt_mask": torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]),
        "completion_ids": padded([one.response_ids for one in batch.rollouts]),
        "completion_mask": padded([[1] * len(one.response_ids) for one in batch.rollouts]),
        "tool_mask": padded([one.loss_mask_T for one in batch.rollouts]),
        "advantages": torch.tensor(batch.advantages),
        "num_items_in_batch": torch.tensor(sum(one.loss_tokens for one in batch.rollouts)),
    }
    if old is not None:
        offsets = slot_offsets(batch.rollouts)
        rows = []
        for one, start in zip(batch.rollouts, offsets, strict=False):
            values = iter(old[start:].tolist())
            rows.append([next(values) if keep else -5.0 for keep in one.loss_mask_T])
        inputs["old_per_token_logps"] = padded(rows)
    return inputs


def padded(rows) -> Tensor:
    return torch.tensor([list(row) + [0] * (MAX_NEW - len(row)) for row in rows])


def reference_logprobs(sides: Sides) -> Tensor:
    """Log-probs of the reference model from all logits of each sample alone, `[B, T]`."""
    rows = []
    for one in sides.batch.rollouts:
        with torch.no_grad():
            logits_TV = sides.reference(torch.tensor([[*one.prompt_ids, *one.response_ids]])).logits[0] / TEMPERATURE
        first = len(one.prompt_ids) - 1
        logprobs_TV = logits_TV[first : first + len(one.response_ids)].log_softmax(-1)
        rows.append(logprobs_TV.gather(-1, torch.tensor(one.response_ids)[:, None])[:, 0].tolist())
    return padded(rows)
