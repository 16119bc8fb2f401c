"""Training on Megatron-Core: tensor, pipeline and expert parallel models, built from a Hugging Face config alone."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.config.run import RunConfig
from stretto.world import World

if TYPE_CHECKING:
    from stretto.trainers.base import Trainer
    from stretto.trainers.megatron.trainer import MegatronTrainer


def require_megatron() -> None:
    """Raise ValueError that names the extra when Megatron-Core is not installed."""
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        raise ValueError("the megatron trainer needs Megatron-Core: pip install 'stretto[megatron]'")


@contextmanager
def open_megatron(directory: Path, config: RunConfig, world: World) -> Iterator[Trainer]:
    """The Megatron trainer of a run; leaving the context takes Megatron's process groups down.

    Raises ValueError when Megatron-Core (or, for bridge names, Megatron-Bridge) is not installed, or the sizes fit
    neither the world nor the model.
    """
    require_megatron()
    with _quiet_imports():
        from stretto.trainers.megatron import cpu

        cpu.enable()
        from stretto.trainers.megatron import parallel

        trainer_class = _trainer_class(config)
    try:
        yield trainer_class(directory, config, world)
    finally:
        parallel.stop()


@contextmanager
def _quiet_imports() -> Iterator[None]:
    """Megatron warns of what is deprecated in itself, and in a dozen places that Transformer Engine is missing.

    It also switches all warnings on, so that a filter would not hold: they are recorded and forgotten.
    """
    with warnings.catch_warnings(record=True):
        yield


def _trainer_class(config: RunConfig) -> type[MegatronTrainer]:
    if config.trainer.names == "bridge":
        from stretto.trainers.megatron.bridge import BridgeTrainer

        return BridgeTrainer
    from stretto.trainers.megatron.trainer import MegatronTrainer

    return MegatronTrainer
