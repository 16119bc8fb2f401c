"""Optimizer steps on Megatron-Core: on one rank and on two, good and bad ones, however the batch is cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_helpers import (
    BATCH,
    DENSE,
    EVERYTHING_ON,
    EXPERTS,
    PP2,
    SHARED,
    TP2,
    VOCABULARY,
    Setup,
    gradient,
    halves,
    parameters_of,
    same,
    snapshot,
    whole_gradient,
    with_behaviour,
)
from torch import Tensor
from trainer_samples import share, worst

from ranks import Ranks
from stretto.types import Batch
from stretto.world import World


def plain_gradient(world: World, setup: Setup) -> tuple[list[float], list[float], dict[str, Tensor], dict[str, Tensor]]:
    """The trainer's log-probs and gradient, and those of a loop over samples with all logits and torch's autograd."""
    with setup.trainer(world) as trainer:
        found = [value for part in trainer.logprobs(BATCH.rollouts) for value in part]
        batch = with_behaviour(trainer.logprobs(BATCH.rollouts))
        _, gradients = gradient(trainer, batch)
        (model,) = trainer._models
        tokens = sum(one.loss_tokens for one in batch.rollouts)
        expected, loss = [], torch.zeros(())
        for one, advantage in zip(batch.rollouts, batch.advantages, strict=True):
            ids = torch.tensor([[*one.prompt_ids, *one.response_ids]])
            logits_TV = model(ids, torch.arange(ids.shape[1])[None], None)[0, :, :VOCABULARY] / one.temperature
            logprobs_TV = logits_TV[len(one.prompt_ids) - 1 : -1].log_softmax(-1)
            kept = torch.tensor(one.loss_mask_T, dtype=torch.bool)
            current = logprobs_TV.gather(-1, torch.tensor(one.response_ids)[:, None])[kept, 0]
            weight = (current.detach() - torch.tensor(one.logprobs_T)[kept]).exp().clamp(max=2)
            loss = loss - (current * advantage * weight).sum() / tokens
            expected += current.tolist()
        loss.backward()
        plain = {name: parameter.main_grad.clone() for _, name, parameter in parameters_of(trainer)}
        return found, expected, gradients, plain


@pytest.mark.parametrize("kind", [DENSE, EXPERTS])
def test_one_rank_is_a_plain_loop_over_samples(alone: Ranks, models: dict[str, Path], kind: str) -> None:
    setup = Setup(models[kind])
    ((found, expected, gradients, plain),) = alone.run(plain_gradient, setup)
    assert found == pytest.approx(expected, abs=2e-5)
    assert worst(gradients, plain) < 1e-5


def run_steps(world: World, setup: Setup, batches: Sequence[Sequence[Batch]]) -> dict[str, Any]:
    """Steps on batches given as one share a rank."""
    with setup.trainer(world) as trainer:
        reports, weights = [], [snapshot(trainer)]
        for shares in batches:
            reports.append(trainer.step(shares[world.rank]))
            weights.append(snapshot(trainer))
        return {"reports": reports, "weights": weights, "names": list(trainer.weights())}


@pytest.mark.parametrize(
    "settings", [{"micro_batch_tokens": 1}, {"micro_batch_tokens": 400}, {"logit_chunk_tokens": 3}]
)
def test_how_the_batch_is_cut_changes_nothing(alone: Ranks, models: dict[str, Path], settings: dict[str, int]) -> None:
    ((batch, loss, expected, _),) = alone.run(whole_gradient, Setup(models[DENSE], algorithm=EVERYTHING_ON))
    setup = Setup(models[DENSE], settings, EVERYTHING_ON)
    ((found_loss, found),) = alone.run(gradient_of, setup, batch)
    assert found_loss == pytest.approx(loss, rel=1e-5)
    assert worst(found, expected) < 1e-5


def gradient_of(world: World, setup: Setup, batch: Batch) -> tuple[float, dict[str, Tensor]]:
    with setup.trainer(world) as trainer:
        return gradient(trainer, batch)


@pytest.mark.parametrize("sizes", [TP2, PP2, {}], ids=str)
def test_each_rank_gets_the_log_probs_of_its_own_samples(
    alone: Ranks, pair: Ranks, models: dict[str, Path], sizes: dict[str, Any]
) -> None:
    (expected,) = alone.run(logprobs_of, Setup(models[DENSE]), [BATCH])
    shares = [share(BATCH, [9, 3, 7]), share(BATCH, [])]
    first, second = pair.run(logprobs_of, Setup(models[DENSE], sizes), shares)
    assert second == []
    for found, index in zip(first, (9, 3, 7), strict=True):
        assert found == pytest.approx(expected[index], abs=1e-5)


def logprobs_of(world: World, setup: Setup, shares: Sequence[Batch]) -> list[tuple[float, ...]]:
    with setup.trainer(world) as trainer:
        return trainer.logprobs(shares[world.rank].rollouts)


@pytest.mark.parametrize("sizes", [TP2, {"pp": 2, "vpp": 2}], ids=str)
def test_a_batch_without_advantages_moves_the_weights_by_momentum_alone(
    alone: Ranks, pair: Ranks, models: dict[str, Path], sizes: dict[str, Any]
) -> None:
    zero = Batch(BATCH.rollouts, [0.0] * len(BATCH.rollouts))
    (expected,) = alone.run(run_steps, Setup(models[DENSE]), [[BATCH], [zero]])
    for found in pair.run(run_steps, Setup(models[DENSE], sizes), [halves(BATCH), halves(zero)]):
        report = found["reports"][1]
        assert (report.metrics["train/loss"], report.metrics["train/grad_norm"], report.updates) == (0.0, 0.0, 1)
        assert report.metrics.keys() == expected["reports"][1].metrics.keys()
        assert report.metrics == pytest.approx(dict(expected["reports"][1].metrics), rel=1e-3, abs=1e-5)
        assert not any(torch.equal(found["weights"][1][n], found["weights"][2][n]) for n in found["names"])


@pytest.mark.parametrize("sizes", [TP2, PP2, {}], ids=str)
def test_a_bad_step_is_skipped_by_all_ranks_and_leaves_no_trace(
    pair: Ranks, models: dict[str, Path], sizes: dict[str, Any]
) -> None:
    first = replace(BATCH.rollouts[0], logprobs_T=(math.nan,) * 4)
    bad = Batch([first, *BATCH.rollouts[1:]], BATCH.advantages)
    setup = Setup(models[DENSE], sizes)
    clean = pair.run(run_steps, setup, [halves(BATCH), halves(BATCH)])
    for rank, found in enumerate(pair.run(run_steps, setup, [halves(BATCH), halves(bad), halves(BATCH)])):
        report = found["reports"][1]
        assert (report.updates, report.bad_updates) == (0, 1)
        assert report.skipped_groups == {one.group_id for one in halves(bad)[rank].rollouts}
        assert same(found["weights"][1], found["weights"][2])
        assert same(found["weights"][3], clean[rank]["weights"][2])
        assert found["reports"][2].metrics == clean[rank]["reports"][1].metrics


@pytest.mark.parametrize("sizes", [SHARED, PP2], ids=str)
def test_several_updates_a_batch_train_as_on_one_rank(
    alone: Ranks, pair: Ranks, models: dict[str, Path], sizes: dict[str, Any]
) -> None:
    several = {"updates_per_batch": 2, "weight_decay": 0.1}
    (expected,) = alone.run(run_steps, Setup(models[DENSE], several), [[BATCH]] * 2)
    for found in pair.run(run_steps, Setup(models[DENSE], sizes | several), [halves(BATCH)] * 2):
        for one, other in zip(found["reports"], expected["reports"], strict=True):
            assert one.updates == 2
            assert one.metrics["train/ratio_max_deviation"] > 0
            assert one.metrics == pytest.approx(dict(other.metrics), rel=1e-3, abs=1e-5)


def test_what_ranks_share_stays_the_same_on_all_of_them(pair: Ranks, models: dict[str, Path]) -> None:
    split, staged = Setup(models[EXPERTS], SHARED | {"ep": 2}), Setup(models[DENSE], PP2)
    one, other = (found["weights"][-1] for found in pair.run(run_steps, split, [halves(BATCH)] * 3))
    shared = [name for name in one if "norm" in name or "router" in name]
    assert len(shared) == 4 * 4 + 1 + 3
    assert all(torch.equal(one[name], other[name]) for name in shared)
    first, last = (found["weights"][-1] for found in pair.run(run_steps, staged, [halves(BATCH)] * 3))
    assert torch.equal(first["embedding.word_embeddings.weight"], last["output_layer.weight"])


def test_weight_decay_shrinks_matrices_alone(alone: Ranks, models: dict[str, Path]) -> None:
    zero = Batch(BATCH.rollouts, [0.0] * len(BATCH.rollouts))
    (found,) = alone.run(run_steps, Setup(models[EXPERTS], {"lr": 0.1, "weight_decay": 0.5}), [[zero]])
    before, after = found["weights"]
    for name, tensor in after.items():
        expected = before[name] * (1 - 0.1 * 0.5) if tensor.ndim > 1 else before[name]
        torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=0)


def test_bfloat16_trains_float32_masters(alone: Ranks, models: dict[str, Path]) -> None:
    (exact,) = alone.run(run_steps, Setup(models[DENSE]), [[BATCH]] * 3)
    (mixed,) = alone.run(run_steps, Setup(models[DENSE], {"dtype": "bfloat16"}), [[BATCH]] * 3)
    assert {tensor.dtype for tensor in mixed["weights"][-1].values()} == {torch.bfloat16}
    for one, other in zip(mixed["reports"], exact["reports"], strict=True):
        assert one.metrics["train/loss"] == pytest.approx(other.metrics["train/loss"], abs=0.05)
    (masters,) = alone.run(masters_after_a_step, Setup(models[DENSE], {"dtype": "bfloat16", "lr": 1e-4}))
    assert {tensor.dtype for tensor in masters} == {torch.float32}
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in masters)


def masters_after_a_step(world: World, setup: Setup) -> list[Tensor]:
    with setup.trainer(world) as trainer:
        trainer.step(BATCH)
        trainer.offload()
        trainer.onload()
        return [one.clone() for group in trainer._optimizer.megatron.param_groups for one in group["params"]]
