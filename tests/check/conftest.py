"""Groups of processes in which checks run: what a rank needs to import costs more than a check of a tiny model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

for helpers in ("models", "trainers"):
    sys.path.insert(0, str(Path(__file__).parents[1] / helpers))

from trainer_ranks import Ranks  # noqa: E402  # found by the path above


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """One process: Megatron's stand-ins for CUDA stay out of this one."""
    yield from _ranks(1, tmp_path_factory)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two ranks of one gloo group."""
    yield from _ranks(2, tmp_path_factory)


def _ranks(size: int, directories: pytest.TempPathFactory) -> Iterator[Ranks]:
    made = Ranks(size, directories.mktemp(f"check-ranks-{size}"))
    yield made
    made.close()
