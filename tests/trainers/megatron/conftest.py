"""Checkpoints and processes that the Megatron tests share; `pair` is one directory up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from megatron_helpers import write_models
from trainer_ranks import Ranks


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints by kind."""
    return write_models(tmp_path_factory.mktemp("megatron-models"))


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """A process of its own: Megatron's stand-ins for CUDA stay out of this one."""
    yield from _started(1, tmp_path_factory)


@pytest.fixture(scope="session")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Four ranks of one gloo group."""
    yield from _started(4, tmp_path_factory)


def _started(size: int, directories: pytest.TempPathFactory) -> Iterator[Ranks]:
    made = Ranks(size, directories.mktemp(f"ranks-{size}"))
    yield made
    made.close()
