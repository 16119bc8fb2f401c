"""The gradient of a batch does not depend on how it is cut (DESIGN, rule 4), nor on how it is computed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from trainer_samples import (
    Batching,
    budget_for,
    gradient,
    mixed_batch,
    new_trainer,
    recut,
    run_config,
    scale_weights,
    share,
    take_gradient,
    with_behaviour,
    worst,
)

from ranks import Ranks
from stretto.trainers.updates import plan_updates
from stretto.types import Batch
from stretto.world import World

EVERYTHING_ON: dict[str, Any] = {"kl_coef": 0.1, "entropy_coef": 0.02, "aggregation": "sequence_mean"}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"aggregation": "sequence_mean"},
    {"aggregation": "constant_length", "constant_length": 20},
    {"old_logprobs": "behaviour", "dual_clip": 1.5},
    {"mismatch": "mask", "mismatch_cap": 1.1},
    EVERYTHING_ON,
]
CUTS: list[tuple[Batching, int]] = [
    ("padded", 1),
    ("padded", 2),
    ("padded", 5),
    ("packed", 1),
    ("packed", 2),
    ("packed", 5),
]
FEWER_CUTS = [CUTS[2], CUTS[3], CUTS[4]]
TWO_RANK_CUTS: list[tuple[Batching, int]] = [("packed", 400), ("padded", 60)]
# Which samples each of two ranks has: interleaved, very uneven, one with none at all, one without an active sample.
SHARES = [
    ((0, 2, 4, 6, 8), (1, 3, 5, 7, 9)),
    ((0, 1, 2, 3, 4, 5, 6, 7, 8), (9,)),
    ((), tuple(range(10))),
    ((0, 1, 3, 4, 6, 7, 8, 9), (2, 5)),
]
VOCABULARY = 97


@pytest.mark.parametrize("algorithm", SETTINGS, ids=str)
def test_micro_batches_and_packing_do_not_change_the_gradient(tiny_model: Path, algorithm: dict[str, Any]) -> None:
    trainer = new_trainer(tiny_model, run_config(algorithm=algorithm))
    batch = with_behaviour(trainer, mixed_batch(VOCABULARY), noise=0.3)
    scale_weights(trainer)
    expected_loss, expected = gradient(trainer, batch)
    for batching, passes in CUTS:
        recut(trainer, batching, budget_for(batch, batching, passes))
        loss, found = gradient(trainer, batch)
        assert loss == pytest.approx(expected_loss, rel=1e-12)
        assert worst(found, expected) < 1e-10, (batching, passes)


@pytest.mark.parametrize("algorithm", [{}, EVERYTHING_ON], ids=str)
def test_in_float32_the_cuts_agree_to_rounding(tiny_model: Path, algorithm: dict[str, Any]) -> None:
    trainer = new_trainer(tiny_model, run_config({"dtype": "float32"}, algorithm))
    batch = with_behaviour(trainer, mixed_batch(VOCABULARY), noise=0.3)
    scale_weights(trainer)
    expected = gradient(trainer, batch)[1]
    for batching, passes in CUTS:
        recut(trainer, batching, budget_for(batch, batching, passes))
        assert worst(gradient(trainer, batch)[1], expected) < 1e-5, (batching, passes)


def test_a_real_model_has_one_gradient_however_its_batch_is_cut(smollm2_cut: Path, pair: Ranks, tmp_path: Path) -> None:
    trainer = new_trainer(smollm2_cut, run_config(algorithm=EVERYTHING_ON))
    batch = with_behaviour(trainer, mixed_batch(49152), noise=0.3)
    scale_weights(trainer)
    recut(trainer, "padded", budget_for(batch, "padded", 1))
    expected = gradient(trainer, batch)[1]
    for batching, passes in FEWER_CUTS:
        recut(trainer, batching, budget_for(batch, batching, passes))
        assert worst(gradient(trainer, batch)[1], expected) < 1e-10, (batching, passes)
    save_file(expected, tmp_path / "expected.safetensors")
    del trainer, expected
    differences, _ = pair.run(real_model_on_two_ranks, smollm2_cut, batch, tmp_path / "expected.safetensors")
    assert max(differences) < 1e-10, differences


def real_model_on_two_ranks(world: World, directory: Path, batch: Batch, expected: Path) -> list[float]:
    trainer = new_trainer(directory, run_config(algorithm=EVERYTHING_ON), world)
    scale_weights(trainer)
    differences = []
    for (batching, tokens), shares in zip(TWO_RANK_CUTS, SHARES, strict=False):
        recut(trainer, batching, tokens)
        found = gradient(trainer, share(batch, shares[world.rank]))[1]
        if world.first:
            differences.append(worst(found, load_file(expected)))
    return differences


def test_a_real_model_in_float32_agrees_to_rounding(smollm2_cut: Path) -> None:
    trainer = new_trainer(smollm2_cut, run_config({"dtype": "float32"}, EVERYTHING_ON))
    batch = with_behaviour(trainer, mixed_batch(49152), noise=0.3)
    scale_weights(trainer)
    recut(trainer, "padded", budget_for(batch, "padded", 1))
    expected = gradient(trainer, batch)[1]
    # Relative to the whole gradient: float32's own error in one parameter's is 2e-5 here (against float64).
    norm = torch.stack([tensor.norm() for tensor in expected.values()]).norm()
    for batching, passes in FEWER_CUTS:
        recut(trainer, batching, budget_for(batch, batching, passes))
        found = gradient(trainer, batch)[1]
        for name in expected:
            assert (found[name] - expected[name]).norm() < 1e-5 * norm, (batching, passes, name)


@pytest.mark.parametrize("algorithm", SETTINGS, ids=str)
def test_two_ranks_with_any_shares_have_the_gradient_of_one(
    tiny_model: Path, pair: Ranks, algorithm: dict[str, Any]
) -> None:
    trainer = new_trainer(tiny_model, run_config(algorithm=algorithm))
    batch = with_behaviour(trainer, mixed_batch(VOCABULARY), noise=0.3)
    scale_weights(trainer)
    expected_loss, expected = gradient(trainer, batch)
    for results in pair.run(tiny_model_on_two_ranks, tiny_model, algorithm, batch):
        for loss, found in results:
            assert loss == pytest.approx(expected_loss, rel=1e-12)
            assert worst(found, expected) < 1e-10


def tiny_model_on_two_ranks(
    world: World, directory: Path, algorithm: dict[str, Any], batch: Batch
) -> list[tuple[float, dict[str, torch.Tensor]]]:
    trainer = new_trainer(directory, run_config(algorithm=algorithm), world)
    scale_weights(trainer)
    results = []
    for shares in SHARES:
        for batching, tokens in TWO_RANK_CUTS:
            recut(trainer, batching, tokens)
            results.append(gradient(trainer, share(batch, shares[world.rank])))
    return results


@pytest.mark.parametrize("under_the_mask", [float("nan"), float("inf"), -3.0])
def test_what_lies_under_the_mask_changes_nothing(tiny_model: Path, under_the_mask: float) -> None:
    trainer = new_trainer(tiny_model, run_config(algorithm=EVERYTHING_ON))
    batch = with_behaviour(trainer, mixed_batch(VOCABULARY), noise=0.3)
    zeros, others = (
        Batch(
            [
                replace(
                    rollout,
                    logprobs_T=tuple(
                        value if keep else filling
                        for value, keep in zip(rollout.logprobs_T, rollout.loss_mask_T, strict=True)
                    ),
                )
                for rollout in batch.rollouts
            ],
            batch.advantages,
        )
        for filling in (0.0, under_the_mask)
    )
    expected_loss, expected = gradient(trainer, zeros)
    loss, found = gradient(trainer, others)
    assert loss == expected_loss
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_skipping_samples_without_advantage_keeps_the_gradient(tiny_model: Path) -> None:
    trainer = new_trainer(tiny_model, run_config())
    batch = with_behaviour(trainer, mixed_batch(VOCABULARY), noise=0.3)
    (update,) = plan_updates(batch, trainer._config, trainer._objective, trainer._world)
    assert update.active == [0, 1, 3, 4, 6, 7, 8, 9]
    skipped_loss, skipped = gradient(trainer, batch)
    loss, _ = trainer._accumulate(batch, replace(update, active=update.indices), None)
    assert skipped_loss == pytest.approx(loss, rel=1e-12)
    assert worst(skipped, take_gradient(trainer)) < 1e-12


def test_a_batch_without_advantages_has_a_zero_gradient_and_costs_no_backward(tiny_model: Path) -> None:
    trainer = new_trainer(tiny_model, run_config())
    batch = mixed_batch(VOCABULARY)
    with_graph = []
    trainer._policy.register_forward_hook(lambda _module, _input, output: with_graph.append(output[0].requires_grad))
    without = Batch(batch.rollouts, [0.0] * len(batch.rollouts))
    loss, found = gradient(trainer, without)
    assert (loss, with_graph) == (0.0, [False])
    assert all(not tensor.any() for tensor in found.values())
    gradient(trainer, batch)
    assert with_graph == [False, True]
    # The pass forward is for what every step reports.
    assert {"train/entropy", "mismatch/kl", "train/clip_fraction"} <= trainer.step(without).metrics.keys()


def test_zero_advantages_still_count_when_the_loss_has_other_terms(tiny_model: Path) -> None:
    trainer = new_trainer(tiny_model, run_config(algorithm=EVERYTHING_ON))
    scale_weights(trainer)
    batch = mixed_batch(VOCABULARY)
    found = gradient(trainer, Batch(batch.rollouts, [0.0] * len(batch.rollouts)))[1]
    assert all(tensor.any() for tensor in found.values())


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_logit_chunks_bound_the_logits_and_change_no_result(tiny_model: Path, chunk: int) -> None:
    whole_batch = new_trainer(tiny_model, run_config(algorithm=EVERYTHING_ON))
    chunked = new_trainer(tiny_model, run_config({"logit_chunk_tokens": chunk}, EVERYTHING_ON))
    batch = with_behaviour(whole_batch, mixed_batch(VOCABULARY), noise=0.3)
    rows: list[int] = []
    chunked._policy.model.lm_head.register_forward_hook(lambda _module, _input, output: rows.append(len(output)))
    for trainer in (whole_batch, chunked):
        scale_weights(trainer)
    flat = [[value for part in t.logprobs(batch.rollouts) for value in part] for t in (whole_batch, chunked)]
    assert flat[1] == pytest.approx(flat[0], rel=1e-12)
    expected_loss, expected = gradient(whole_batch, batch)
    loss, found = gradient(chunked, batch)
    assert loss == pytest.approx(expected_loss, rel=1e-12)  # the entropies are a part of it
    assert worst(found, expected) < 1e-10
    assert max(rows) == chunk


def test_activation_checkpointing_recomputes_layers_and_keeps_the_gradient(tiny_model: Path) -> None:
    plain, thrifty = (new_trainer(tiny_model, run_config({"activation_checkpointing": on})) for on in (False, True))
    calls = {"plain": 0, "thrifty": 0}
    for name, trainer in (("plain", plain), ("thrifty", thrifty)):
        count = lambda *_, name=name: calls.update({name: calls[name] + 1})  # noqa: E731
        trainer._policy.model.model.layers[1].mlp.register_forward_pre_hook(count)
    batch = mixed_batch(VOCABULARY)
    expected = gradient(plain, batch)[1]
    assert worst(gradient(thrifty, batch)[1], expected) < 1e-12
    assert calls == {"plain": 1, "thrifty": 2}
