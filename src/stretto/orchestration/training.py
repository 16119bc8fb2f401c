"""Opening the trainer that a run names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stretto.config import RunConfig
from stretto.trainers import Trainer
from stretto.world import World


@contextmanager
def open_trainer(directory: Path, config: RunConfig, world: World) -> Iterator[Trainer]:
    """The trainer of `config` with the checkpoint in `directory`; leaving the context takes its process groups down.

    Raises ValueError when the trainer is not installed or its sizes do not fit the model or the world.
    """
    if config.trainer.backend == "fsdp":
        from stretto.trainers.fsdp import FSDPTrainer

        yield FSDPTrainer(directory, config, world)
        return
    from stretto.trainers.megatron import open_megatron

    with open_megatron(directory, config, world) as trainer:
        yield trainer
