"""Megatron-Core against transformers with the same checkpoint, and against the FSDP2 trainer on the same rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_helpers import BATCH, DENSE, EXPERTS, PP2, TP2, VOCABULARY, Setup, gradient_by_name, mine
from torch import Tensor
from trainer_ranks import Ranks
from trainer_samples import worst

from stretto.sync.execute import Execution
from stretto.sync.layouts import checkpoint_layout
from stretto.sync.plan import Plan
from stretto.types import Batch
from stretto.world import World

CUTS: list[tuple[int, str, dict[str, Any]]] = [
    (1, DENSE, {}),
    (1, EXPERTS, {}),
    (2, DENSE, TP2),
    (2, DENSE, TP2 | {"sequence_parallel": True}),
    (2, DENSE, PP2),
    (2, EXPERTS, {"ep": 2}),
    (4, DENSE, {"tp": 2, "pp": 2}),
]


def transformers_model(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")


def rows() -> list[list[int]]:
    """Token ids of a few samples; the lengths differ."""
    return [[*one.prompt_ids, *one.response_ids] for one in BATCH.rollouts[:6]]


def transformers_logits(directory: Path) -> list[Tensor]:
    model = transformers_model(directory)
    with torch.no_grad():
        return [model(torch.tensor([ids])).logits[0] for ids in rows()]


def transformers_gradient(directory: Path, batch: Batch) -> dict[str, Tensor]:
    """The gradient of the trainers' loss by checkpoint name: a loop over samples with all logits and torch's autograd."""
    model = transformers_model(directory)
    tokens = sum(one.loss_tokens for one in batch.rollouts)
    for one, advantage in zip(batch.rollouts, batch.advantages, strict=True):
        logits_TV = model(torch.tensor([[*one.prompt_ids, *one.response_ids]])).logits[0] / one.temperature
        logprobs_TV = logits_TV[len(one.prompt_ids) - 1 : -1].log_softmax(-1)
        kept = torch.tensor(one.loss_mask_T, dtype=torch.bool)
        current = logprobs_TV.gather(-1, torch.tensor(one.response_ids)[:, None])[kept, 0]
        (-(current * advantage).sum() / tokens).backward()
    tied = set(model.all_tied_weights_keys or {})
    return {n: p.grad for n, p in model.named_parameters() if n not in tied}


def logits(world: World, setup: Setup) -> list[Tensor] | None:
    """The trainer's logits over the true vocabulary, a row a sample, on the ranks of the last stage."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    with setup.trainer(world) as trainer:
        found = []
        for ids in rows():
            hidden_or_logits = pipeline(trainer, torch.tensor([pad_even(ids)]))
            if parallel_state.is_pipeline_last_stage():
                whole = gather_from_tensor_model_parallel_region(hidden_or_logits)
                found.append(whole[0, : len(ids), :VOCABULARY].detach())
        return found or None


def pad_even(ids: list[int]) -> list[int]:
    """Sequence parallelism needs an even length; what is behind a token does not change it."""
    return ids + [0] * (len(ids) % 2)


def pipeline(trainer: Any, ids_BL: Tensor) -> Tensor:
    """One forward pass through the stages by hand: what a stage gives goes to the next."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    (model,) = trainer._models
    if not parallel_state.is_pipeline_first_stage():
        length = ids_BL.shape[1] // (model.config.tensor_model_parallel_size if model.config.sequence_parallel else 1)
        received = torch.empty(length, 1, model.config.hidden_size)
        dist.recv(received, parallel_state.get_pipeline_model_parallel_prev_rank())
        model.set_input_tensor(received)
    with torch.no_grad():
        out = model(ids_BL, torch.arange(ids_BL.shape[1])[None], None)
    if not parallel_state.is_pipeline_last_stage():
        dist.send(out.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank())
    return out


def checkpoint_gradient(world: World, setup: Setup, batch: Batch) -> dict[str, Tensor] | None:
    """The trainer's gradient as tensors of the checkpoint, on the first rank: it has the weights' own layout."""
    with setup.trainer(world) as trainer:
        shares = trainer._groups.over_replica(mine(world, batch))
        together = Batch([r for s in shares for r in s.rollouts], [a for s in shares for a in s.advantages])
        found = gradient_by_name(trainer, together)
        layout = trainer.layout()
        target = checkpoint_layout(layout.atoms, "float32")
        whole = {name: torch.full(shape, torch.nan) for name, (shape, _) in target.local(0).items()}
        Execution(
            Plan.of(layout, target, [0]),
            world.rank,
            lambda: {world.rank: found},
            lambda: {0: whole} if world.first else {},
            device=world.device,
        ).run()
        return whole if world.first else None


def ranks_of(request: pytest.FixtureRequest, size: int) -> Ranks:
    return request.getfixturevalue({1: "alone", 2: "pair", 4: "four"}[size])


@pytest.mark.parametrize(("size", "kind", "sizes"), CUTS, ids=str)
def test_logits_are_those_of_transformers(
    request: pytest.FixtureRequest, models: dict[str, Path], size: int, kind: str, sizes: dict[str, Any]
) -> None:
    expected = transformers_logits(models[kind])
    answers = [one for one in ranks_of(request, size).run(logits, Setup(models[kind], sizes)) if one is not None]
    assert answers
    for found in answers:
        for ours, theirs in zip(found, expected, strict=True):
            assert float((ours - theirs).norm() / theirs.norm()) < 1e-5


@pytest.mark.parametrize(("size", "kind", "sizes"), CUTS, ids=str)
def test_gradients_are_those_of_transformers(
    request: pytest.FixtureRequest, models: dict[str, Path], size: int, kind: str, sizes: dict[str, Any]
) -> None:
    batch = without_behaviour(BATCH)
    found = ranks_of(request, size).run(
        checkpoint_gradient, Setup(models[kind], sizes, {"old_logprobs": "trainer", "mismatch": "off"}), batch
    )[0]
    assert worst(found, transformers_gradient(models[kind], batch)) < 1e-5


def without_behaviour(batch: Batch) -> Batch:
    """The engine's log-probs take no part when mismatch is off."""
    return batch


def loaded_equals_file(world: World, setup: Setup) -> list[str]:
    """Names of this rank's tensors that are not, bit by bit, those which the plan cuts from the checkpoint."""
    from stretto.sync.files import CheckpointFiles, load

    with setup.trainer(world) as trainer:
        layout, found = trainer.layout(), trainer.weights()
        expected = {
            name: torch.zeros(shape, dtype=getattr(torch, dtype))
            for name, (shape, dtype) in layout.local(world.rank).items()
        }
        with CheckpointFiles(setup.directory) as files:
            load(files, checkpoint_layout(layout.atoms, "float32"), layout, world.rank, expected)
        return [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])]


def fsdp_losses(directory: Path, batches: list[Batch]) -> list[float]:
    from stretto.trainers.fsdp import FSDPTrainer

    trainer = FSDPTrainer(directory, Setup(directory).plain("fsdp"), World(0, 1, torch.device("cpu")))
    return [trainer.step(batch).metrics["train/loss"] for batch in batches]


def megatron_losses(world: World, setup: Setup, batches: list[Batch]) -> list[float]:
    with setup.trainer(world) as trainer:
        return [trainer.step(mine(world, batch)).metrics["train/loss"] for batch in batches]
