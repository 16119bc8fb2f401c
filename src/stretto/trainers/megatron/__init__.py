"""Training on Megatron-Core: tensor, pipeline and expert parallel models, built from a Hugging Face config alone."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.config.run import RunConfig
from stretto.world import World

if TYPE_CHECKING:
    from stretto.trainers.base import Trainer


def require_megatron() -> None:
    """Raise ValueError that names the extra when Megatron-Core is not installed."""
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        raise ValueError("the megatron trainer needs Megatron-Core: pip install 'stretto[megatron]'")


@contextmanager
def open_megatron(directory: Path, config: RunConfig, world: World) -> Iterator[Trainer]:
    """The Megatron trainer of a run; leaving the context takes Megatron's process groups down.

    Raises ValueError when Megatron-Core is not installed, or the sizes fit neither the world nor the model.
    """
    require_megatron()
    from stretto.trainers.megatron import cpu

    cpu.enable()
    from stretto.trainers.megatron import parallel
    from stretto.trainers.megatron.trainer import MegatronTrainer

    try:
        yield MegatronTrainer(directory, config, world)
    finally:
        parallel.stop()
