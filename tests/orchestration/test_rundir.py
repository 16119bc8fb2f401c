"""The run directory: one holder at a time, and no two starts with the same incarnation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stretto.orchestration.rundir import claim, next_incarnation
from stretto.world import World

ALONE = World(0, 1, torch.device("cpu"))


def test_every_start_has_an_incarnation_of_its_own(tmp_path: Path) -> None:
    assert [next_incarnation(tmp_path, ALONE) for _ in range(3)] == [1, 2, 3]


def test_a_directory_in_use_is_refused_until_it_is_let_go(tmp_path: Path) -> None:
    with claim(tmp_path, ALONE), pytest.raises(ValueError, match="in use by another process"), claim(tmp_path, ALONE):
        pass
    with claim(tmp_path, ALONE):
        pass
