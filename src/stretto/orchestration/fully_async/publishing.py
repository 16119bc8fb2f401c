"""Publications that go on while the trainer does, and engines that come and go meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import perf_counter

from stretto.config import RunConfig
from stretto.errors import RunError
from stretto.orchestration.fully_async.fleet import Fleet, Replica
from stretto.orchestration.fully_async.growing import Feeder, Grower
from stretto.orchestration.fully_async.trainers import TrainerGroup
from stretto.orchestration.ray.cluster import asked
from stretto.types import Version

_CLEAR_S = 30.0


class Herald:
    """Brings versions into the fleet, one after the other, and replaces the engines that are gone.

    The snapshot at the trainer is always of `version`; a new engine gets that one, and serves nothing before.
    """

    def __init__(
        self,
        config: RunConfig,
        fleet: Fleet,
        trainers: TrainerGroup,
        grower: Grower,
        feeder: Feeder,
        note: Callable[[str], None],
    ):
        self._config, self._fleet, self._trainers = config, fleet, trainers
        self._grower, self._feeder, self._note = grower, feeder, note
        self._lock = asyncio.Lock()
        self._repairing: asyncio.Task[None] | None = None
        self._under_way: asyncio.Task[None] | None = None
        self._gone: list[Replica] = []
        self.version: Version | None = None
        self.bytes = 0
        """Moved by the last publication."""
        self.seconds = 0.0
        """That it took."""
        self.replaced = 0
        """Engines that had to be replaced."""

    async def start(self, version: Version) -> None:
        """Start the fleet and publish the first version. RunError when an engine does not take it."""
        self.version = version
        if failed := await self._welcome():
            raise RunError("; ".join(failed))

    async def restart(self, version: Version) -> None:
        """The trainer began anew: make its sessions with the engines and publish what it has.

        What was under way ends first.
        """
        await self.close()
        self.version, self._under_way = version, None
        self._gone.clear()
        async with self._lock:
            for one in list(self._fleet.replicas):
                one.version = None
                try:
                    await asked(one.handle.clear.remote(_CLEAR_S), _CLEAR_S + 5.0, f"{one.name} to end what it has")
                except Exception as error:
                    self._note(f"{one.name}: {error}")
                    self.lost(one)
                else:
                    await self._trainers.connect(one)
            await self._publish(list(self._fleet.replicas))

    async def settled(self) -> None:
        """Wait until no publication is under way. Raises what went wrong with it."""
        if self._under_way is not None:
            await self._under_way

    def publish(self, version: Version) -> None:
        """Begin to bring the trainer's new snapshot into the fleet; the one before has settled."""
        assert self._under_way is None or self._under_way.done()
        self.version = version
        self._under_way = asyncio.create_task(self._bring())

    def lost(self, replica: Replica) -> None:
        """An engine is gone: replace it."""
        if not self._fleet.lose(replica):
            return
        self._gone.append(replica)
        self.replaced += 1
        self._note(f"{replica.name} is gone and is replaced")
        if self._repairing is None or self._repairing.done():
            self._repairing = asyncio.create_task(self._repair())

    async def watch(self) -> None:
        """Look for engines that show no sign of life, until cancelled. Raises what a repair raised."""
        while True:
            await asyncio.sleep(min(2.0, self._config.placement.lease_s / 2))
            for one in await self._fleet.silent():
                self.lost(one)
            if self._repairing is not None and self._repairing.done():
                self._repairing.result()

    async def close(self) -> None:
        """Give up what is under way."""
        tasks = [task for task in (self._repairing, self._under_way) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _bring(self) -> None:
        if self._config.mode.update == "wait":
            self._feeder.held = True
            await self._feeder.drained()
        async with self._lock:
            begin = perf_counter()
            await self._publish(list(self._fleet.replicas))
            self.seconds = perf_counter() - begin
        self._feeder.held = False
        await self._grower.notify()

    async def _publish(self, replicas: Sequence[Replica]) -> list[str]:
        """Into these engines; those that fail are lost. Returns what went wrong."""
        assert self.version is not None
        version = self.version
        found = await self._trainers.publish(version, replicas)
        problems = []
        self.bytes = 0
        for one in replicas:
            said = found[one.name]
            if isinstance(said, str):
                problems.append(f"{one.name} did not take {version}: {said}")
                self._note(problems[-1])
                self.lost(one)
            elif not one.lost:
                one.version = version
                self.bytes += said
        return problems

    async def _repair(self) -> None:
        while self._fleet.missing:
            await self._welcome()
            await self._grower.notify()

    async def _welcome(self) -> list[str]:
        """Start the engines that are missing and give them the newest version. Returns what went wrong."""
        new = await self._fleet.start()
        async with self._lock:
            while self._gone:
                await self._trainers.disconnect(self._gone.pop())
            for one in new:
                await self._trainers.connect(one)
            self._fleet.add(new)
            return await self._publish(new)
