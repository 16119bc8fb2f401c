"""A saved Megatron run goes on as if it had never stopped, on the same ranks bit by bit, also on fewer of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_helpers import BATCH, DENSE, EXPERTS, SHARED, Setup, halves, same, snapshot
from torch import Tensor

from ranks import Ranks
from stretto.types import Batch
from stretto.world import World

SETTINGS = {"schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.1, "lr": 2e-3}
CASES: list[tuple[str, dict[str, Any]]] = [
    (DENSE, SHARED),
    (DENSE, {"pp": 2, "vpp": 2}),
    (DENSE, {"pp": 2, "dtype": "bfloat16"}),
    (DENSE, {}),
    (EXPERTS, SHARED),
    (EXPERTS, {"ep": 2}),
    (EXPERTS, {"pp": 2, "pp_layers": (1, 3)}),
]
Outcome = tuple[list[dict[str, float]], dict[str, Tensor]]


def state_directory(path: Path) -> Path:
    directory = path / "state"
    directory.mkdir()
    return directory


def go_on(trainer: Any, shares: Sequence[Batch], rank: int) -> Outcome:
    """Two more steps."""
    metrics = [dict(trainer.step(shares[rank]).metrics) for _ in range(2)]
    return metrics, snapshot(trainer)


def save_and_go_on(world: World, setup: Setup, shares: Sequence[Batch], directory: Path) -> Outcome:
    with setup.trainer(world) as trainer:
        for _ in range(2):
            trainer.step(shares[world.rank])
        trainer.save(directory)
        return go_on(trainer, shares, world.rank)


def straight(world: World, setup: Setup, shares: Sequence[Batch]) -> Outcome:
    with setup.trainer(world) as trainer:
        for _ in range(2):
            trainer.step(shares[world.rank])
        return go_on(trainer, shares, world.rank)


def load_and_go_on(world: World, setup: Setup, shares: Sequence[Batch], directory: Path) -> Outcome:
    with setup.trainer(world) as trainer:
        torch.manual_seed(1234)
        trainer.load(directory)
        return go_on(trainer, shares, world.rank)


@pytest.mark.parametrize(("kind", "sizes"), CASES, ids=str)
def test_a_loaded_run_goes_on_bitwise(
    pair: Ranks, models: dict[str, Path], tmp_path: Path, kind: str, sizes: dict[str, Any]
) -> None:
    setup, shares = Setup(models[kind], SETTINGS | sizes), halves(BATCH)
    directory = state_directory(tmp_path)
    expected = pair.run(straight, setup, shares)
    saved = pair.run(save_and_go_on, setup, shares, directory)
    loaded = pair.run(load_and_go_on, setup, shares, directory)
    for one, by_saver, by_loader in zip(expected, saved, loaded, strict=True):
        assert by_saver[0] == one[0]
        assert by_loader[0] == one[0]
        assert same(by_loader[1], by_saver[1])


@pytest.mark.parametrize(("kind", "sizes"), [(DENSE, {"tp": 2}), (DENSE, {"pp": 2}), (EXPERTS, {"ep": 2})], ids=str)
def test_one_rank_goes_on_with_what_two_saved(
    alone: Ranks, pair: Ranks, models: dict[str, Path], tmp_path: Path, kind: str, sizes: dict[str, Any]
) -> None:
    directory = state_directory(tmp_path)
    (expected, _), _ = pair.run(save_and_go_on, Setup(models[kind], SETTINGS | sizes), halves(BATCH), directory)
    ((found, _),) = alone.run(load_and_go_on, Setup(models[kind], SETTINGS), [BATCH], directory)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)


def test_saving_before_the_first_step_changes_nothing(pair: Ranks, models: dict[str, Path], tmp_path: Path) -> None:
    directory = state_directory(tmp_path)
    setup, shares = Setup(models[DENSE], SETTINGS | {"tp": 2}), halves(BATCH)
    for fresh, saver, loader in pair.run(three_starts, setup, shares, directory):
        assert fresh == saver == loader


def three_starts(world: World, setup: Setup, shares: Sequence[Batch], directory: Path) -> list[list[dict[str, float]]]:
    found = []
    for what in ("nothing", "save", "load"):
        with setup.trainer(world) as trainer:
            if what != "nothing":
                getattr(trainer, what)(directory)
            found.append(go_on(trainer, shares, world.rank)[0])
    return found


def test_a_broken_checkpoint_is_refused_with_what_to_do(alone: Ranks, models: dict[str, Path], tmp_path: Path) -> None:
    (message,) = alone.run(refused_load, Setup(models[DENSE]), tmp_path)
    assert "remove that directory to resume from an earlier one" in message


def refused_load(world: World, setup: Setup, directory: Path) -> str:
    with setup.trainer(world) as trainer:
        try:
            trainer.load(directory)
        except ValueError as error:
            return str(error)
    return "not refused"


def test_generators_are_restored(pair: Ranks, models: dict[str, Path], tmp_path: Path) -> None:
    for drawn, again in pair.run(draws, Setup(models[DENSE], {"tp": 2}), state_directory(tmp_path)):
        assert torch.equal(drawn, again)


def draws(world: World, setup: Setup, directory: Path) -> tuple[Tensor, Tensor]:
    with setup.trainer(world) as trainer:
        torch.manual_seed(world.rank)
        trainer.save(directory)
        drawn = torch.rand(4)
        trainer.load(directory)
        return drawn, torch.rand(4)
