"""All ranks of the trainer, spoken to together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stretto.config import RunConfig
from stretto.errors import RunError
from stretto.orchestration.fully_async.fleet import Replica
from stretto.orchestration.ray.cluster import Cluster, all_asked, asked
from stretto.orchestration.ray.trainer_rank import Share
from stretto.trainers import StepReport
from stretto.types import Version


class TrainerLost(RunError):
    """A rank is gone, hangs or failed: the group has to begin anew."""


class TrainerGroup:
    """The ranks. A call returns what each of them said. Raises TrainerLost when one fails."""

    def __init__(self, config: RunConfig, cluster: Cluster):
        self._config, self._cluster = config, cluster
        self._ranks: list[Any] = []
        self._step_s = config.rollout.timeout_s
        self._switch_s = config.sync.timeout_s

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._config.placement.trainers

    async def open(self, state: Path | None) -> None:
        """Start the ranks, anew if there are some; have them meet and read the model, and a checkpoint's `state`.

        Raises ValueError for what does not fit.
        """
        for rank in self._ranks:
            self._cluster.kill(rank)
        self._ranks = self._cluster.start_trainers(self._config, self._cluster.partition)
        limit = self._config.engine.start_timeout_s
        place = await asked(self._ranks[0].place.remote(), limit, "the trainer's first process to start")
        await self._all("join", limit, place, None if state is None else str(state))
        await self._all("snapshot", limit)

    async def step(self, shares: Sequence[Share]) -> list[StepReport]:
        """One batch; a share for each rank."""
        return await self._each("step", self._step_s, [(share,) for share in shares])

    async def snapshot(self) -> None:
        """Copy the weights for the next publication; none may be under way."""
        await self._all("snapshot", self._switch_s)

    async def connect(self, replica: Replica) -> None:
        """Meet an engine. Raises RuntimeError when it does not come."""
        await self._all("connect", 2 * self._switch_s, replica.name, replica.handle, group="publish")

    async def disconnect(self, replica: Replica) -> None:
        """Have nothing to do with an engine any more."""
        await self._all("disconnect", self._switch_s, replica.name, group="publish")

    async def publish(self, version: Version, replicas: Sequence[Replica]) -> Mapping[str, int | str]:
        """Bring the snapshot into the engines: bytes that moved, or what went wrong, by an engine's name."""
        names = [one.name for one in replicas]
        limit = (2 + len(names)) * self._switch_s
        said = await self._all("publish", limit, version, names, group="publish")
        return said[0]

    async def save(self, directory: Path) -> None:
        """Write all that is needed to continue."""
        await self._all("save", self._step_s, str(directory))

    async def export(self, directory: Path) -> None:
        """Write a Hugging Face checkpoint."""
        await self._all("export", self._step_s, str(directory))

    async def peak_memory(self) -> float:
        """Bytes, of the rank that had most."""
        return (await self._all("peak_memory", self._switch_s))[0]

    async def _all(self, method: str, timeout_s: float, *arguments: Any, group: str | None = None) -> list[Any]:
        return await self._each(method, timeout_s, [arguments] * self.size, group)

    async def _each(
        self, method: str, timeout_s: float, arguments: Sequence[Sequence[Any]], group: str | None = None
    ) -> list[Any]:
        options = {"concurrency_group": group} if group else {}
        references = [
            getattr(rank, method).options(**options).remote(*words)
            for rank, words in zip(self._ranks, arguments, strict=True)
        ]
        return await all_asked(references, timeout_s, f"{method} of trainer rank", TrainerLost)
