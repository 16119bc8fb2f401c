"""One process of the trainer, and its side of publications that go on while it trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from stretto.config import RunConfig
from stretto.orchestration import measure
from stretto.orchestration.dtypes import engine_dtype
from stretto.orchestration.model import Model
from stretto.orchestration.ray.bus import SampleBus
from stretto.orchestration.ray.meeting import Meeting, Place, take_part
from stretto.orchestration.ray.outlet import Outlet
from stretto.orchestration.ray.part import Part
from stretto.orchestration.training import open_trainer
from stretto.trainers import StepReport
from stretto.types import Batch, Version
from stretto.world import World, join_world, leave_world


class Share(NamedTuple):
    """What one rank trains on: the samples' keys and an advantage for each."""

    keys: Sequence[str]
    advantages: Sequence[float]


class TrainerRank(Part):
    """An actor with two threads: one that trains, one that publishes the snapshot that it took."""

    def __init__(self, config: RunConfig, partition: str, rank: int, size: int):
        self._config, self._bus = config, SampleBus(partition)
        self._stack = ExitStack()
        self._rank, self._size = rank, size
        self._meeting: Meeting | None = None

    def place(self) -> Place:
        """Where the ranks meet; of the first one."""
        self._meeting = Meeting(self._config.engine.start_timeout_s)
        return self._meeting.place

    def join(self, place: Place, state: str | None) -> None:
        """Meet the others and open the trainer, with the state of a checkpoint where there is one.

        Raises ValueError when the trainer's sizes do not fit.
        """
        take_part(place, self._rank, self._size)
        world = join_world(self._config.rollout.timeout_s)
        self._stack.callback(leave_world)
        self._world = world
        model = Model.load(self._config)
        self._trainer = self._stack.enter_context(open_trainer(model.directory, self._config, world))
        if state is not None:
            self._trainer.load(Path(state))
        timeout = timedelta(seconds=self._config.sync.timeout_s)
        group = dist.new_group(backend="gloo", timeout=timeout) if world.size > 1 else None
        publishing = World(world.rank, world.size, world.device, group)
        self._outlet = Outlet(self._config, model, publishing, self._trainer)
        self._stack.callback(self._outlet.close)

    def step(self, share: Share) -> StepReport:
        """One batch, of which this rank takes its share."""
        rollouts = self._bus.get(share.keys) if share.keys else []
        return self._trainer.step(Batch(rollouts, share.advantages))

    def snapshot(self) -> None:
        """Copy the weights as they are, for the next publications."""
        self._outlet.snapshot()

    def connect(self, name: str, replica: Any) -> None:
        """Meet an engine. Raises RuntimeError, on every rank, when it does not come."""
        self._outlet.connect(name, replica)

    def disconnect(self, name: str) -> None:
        """Have nothing to do with an engine any more."""
        self._outlet.disconnect(name)

    def publish(self, version: Version, names: Sequence[str]) -> Mapping[str, int | str]:
        """Bring the snapshot into each engine: bytes that moved, or what went wrong, by its name."""
        return self._outlet.publish(version, names)

    def save(self, directory: str) -> None:
        """Write all that is needed to continue, into an existing directory."""
        self._trainer.save(Path(directory))

    def export(self, directory: str) -> None:
        """Write a Hugging Face checkpoint, into an existing directory."""
        self._trainer.export(Path(directory), engine_dtype(self._config, self._world))

    def peak_memory(self) -> float:
        """Bytes, over all ranks."""
        return measure.peak_memory(self._world)
