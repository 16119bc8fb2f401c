"""The replicas of the rollout engine, as the controller knows them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stretto.errors import RunError
from stretto.orchestration.ray.cluster import Cluster, asked
from stretto.types import Version

_LOAD_S = 300.0
"""Seconds beside engine.start_timeout_s: a process begins, and imports its libraries."""


@dataclass(eq=False)
class Replica:
    """One replica; `version` is what it serves, None until it has weights."""

    slot: int
    name: str
    handle: Any
    version: Version | None = None
    groups: set[int] = field(default_factory=set)
    lost: bool = False


class Fleet:
    """Starts replicas, says which one takes the next group, and notices which ones are gone."""

    def __init__(self, cluster: Cluster, arguments: Sequence[Any], size: int, start_timeout_s: float, lease_s: float):
        self._cluster, self._arguments, self._size = cluster, arguments, size
        self._start_timeout_s, self._lease_s = start_timeout_s, lease_s
        self._started = 0
        self.replicas: list[Replica] = []

    @property
    def missing(self) -> bool:
        """Whether there are fewer than there should be."""
        return len(self.replicas) < self._size

    async def start(self) -> list[Replica]:
        """Start what is missing; the new ones are not of the fleet yet. RunError when one does not start."""
        free = sorted(set(range(self._size)) - {one.slot for one in self.replicas})
        new = []
        for slot in free:
            self._started += 1
            name = f"engine {slot} ({self._started})" if self._started > self._size else f"engine {slot}"
            new.append(Replica(slot, name, self._cluster.start_engine(slot, *self._arguments)))
        limit = self._start_timeout_s + _LOAD_S
        for one in new:
            try:
                await asked(one.handle.ready.remote(), limit, f"{one.name} to start")
            except Exception as error:
                raise RunError(f"{one.name} did not start: {error}") from error
        return new

    def add(self, new: Sequence[Replica]) -> None:
        """The trainer knows them: they get what is published from now on."""
        self.replicas += new

    def pick(self, least: int) -> Replica | None:
        """The one with the least to do among those that serve version number `least` or a newer one."""
        able = [one for one in self.replicas if one.version is not None and one.version.number >= least]
        return min(able, key=lambda one: len(one.groups), default=None)

    @property
    def newest(self) -> int:
        """The newest version number that any replica serves; -1 when none serves."""
        return max((one.version.number for one in self.replicas if one.version), default=-1)

    def lose(self, replica: Replica) -> bool:
        """It is gone: nothing is sent to it any more, and what is left of it is killed. False when that was known."""
        if replica.lost:
            return False
        replica.lost, replica.version = True, None
        self.replicas.remove(replica)
        self._cluster.kill(replica.handle)
        return True

    async def silent(self) -> list[Replica]:
        """Those that show no sign of life within the lease."""

        async def pulse(one: Replica) -> bool:
            try:
                await asked(one.handle.pulse.remote(), self._lease_s, f"a sign of life of {one.name}")
            except Exception:
                return False
            return True

        known = list(self.replicas)
        alive = await asyncio.gather(*map(pulse, known))
        return [one for one, lives in zip(known, alive, strict=True) if not lives]
