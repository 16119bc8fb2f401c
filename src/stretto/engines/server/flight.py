"""One generation: its samples on their way through the server, in the client's thread."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from queue import SimpleQueue

from stretto.engines.base import EngineError
from stretto.engines.inbox import Inbox
from stretto.engines.server.client import Client
from stretto.engines.server.dialect import Answer, Dialect, Part
from stretto.engines.server.gate import RequestControl
from stretto.engines.server.sample import Sample
from stretto.engines.stopping import StopRule
from stretto.types import Completion, FinishReason, Request

_ABORT_AGAIN_S = 0.05


class Flights:
    """Every request that the server has of us. All but `changed` runs in the client's thread.

    A request that has to end (its gate shut, it was aborted, its generation was given up) is aborted at the server
    again and again until its answer is here: an abort that overtakes its request does nothing.
    """

    def __init__(self, dialect: Dialect, rule: StopRule):
        self._dialect, self._rule = dialect, rule
        self._ids: dict[str, tuple[Flight, int]] = {}
        self._asked: set[str] = set()
        self._numbers = itertools.count()
        self._prefix = uuid.uuid4().hex[:12]
        self._change = asyncio.Event()
        self.flying: set[Flight] = set()

    def start(self, client: Client, control: RequestControl) -> None:
        """Begin to look after aborts."""
        self.client, self.control = client, control
        client.submit(self._reap())

    def changed(self) -> None:
        """Gates or aborts are new; called from any thread."""
        if not self.client.loop.is_closed():
            self.client.loop.call_soon_threadsafe(self._wake)

    async def finish(self, sample: Sample, flight: Flight) -> Completion:
        """Generate the sample to its end, across as many pauses and publications as there are."""
        while True:
            change = self._change
            if flight.over or self.control.is_aborted(sample.request.id):
                return sample.completion(FinishReason.ABORT)
            version = self.control.begin_request(sample.request.id)
            if version is None:
                await change.wait()
                continue
            # Of one width: SGLang aborts every request whose id begins with the given one.
            part = sample.part(f"{self._prefix}-{next(self._numbers):012d}")
            self._ids[part.id] = (flight, sample.request.id)
            try:
                reason = sample.add(part, await self._generate(part), version, self._rule)
            finally:
                asked = part.id in self._asked
                self._asked.discard(part.id)
                del self._ids[part.id]
                self.control.end_request()
            if reason is not FinishReason.ABORT:
                return sample.completion(reason)
            if not asked:
                raise EngineError(f"{self._dialect.name} aborted request {sample.request.id}, which nobody asked for")

    async def _generate(self, part: Part) -> Answer:
        return self._dialect.answer(await self.client.request(self._dialect.generate(part), None))

    def _wake(self) -> None:
        self._change.set()
        self._change = asyncio.Event()
        for flight in self.flying:
            flight.wake()

    def _doomed(self) -> list[str]:
        shut = self.control.shut is not None
        return [
            id
            for id, (flight, request_id) in self._ids.items()
            if shut or flight.over or self.control.is_aborted(request_id)
        ]

    async def _reap(self) -> None:
        while True:
            change = self._change
            doomed = self._doomed()
            if not doomed:
                await change.wait()
                continue
            self._asked.update(doomed)
            try:
                for call in self._dialect.abort(doomed):
                    await self.client.request(call, 10.0)
            except EngineError:
                pass  # the requests themselves find out what is wrong with the server
            await asyncio.sleep(_ABORT_AGAIN_S)


class Flight:
    """The samples of one generation, at most `width` of them at the server at the same time.

    `samples_of` makes those of a request that came through `inbox`.
    """

    def __init__(self, flights: Flights, inbox: Inbox, samples_of: Callable[[Request], Iterable[Sample]], width: int):
        self._flights, self._inbox, self._samples_of, self._width = flights, inbox, samples_of, width
        self._waiting: deque[Sample] = deque()
        self._running: set[asyncio.Task[Completion]] = set()
        self._progress = asyncio.Event()
        self.landed: SimpleQueue[Completion | BaseException | None] = SimpleQueue()
        """What ended; None after the last."""
        self.over = False

    def wake(self) -> None:
        """Look again at what waits."""
        self._progress.set()

    @property
    def unfinished(self) -> int:
        """Samples that were asked for and did not land."""
        return len(self._waiting) + len(self._running)

    async def fly(self) -> None:
        """Put every completion into `landed`, or a failure in the place of the rest. Returns when nothing runs."""
        self._flights.flying.add(self)
        while True:
            self._progress.clear()
            self._launch()
            if not self._running and (self._ends or self._inbox.ended):
                break
            await self._progress.wait()
        self._flights.flying.discard(self)
        self.landed.put(None)

    @property
    def _ends(self) -> bool:
        return self.over or self._flights.control.closed

    def _launch(self) -> None:
        self._waiting += [sample for request in self._inbox.take() for sample in self._samples_of(request)]
        if self.over:
            self._waiting.clear()
        aborted = self._flights.control.is_aborted
        for sample in [one for one in self._waiting if aborted(one.request.id)]:
            self._waiting.remove(sample)
            self.landed.put(sample.completion(FinishReason.ABORT))
        while self._waiting and len(self._running) < self._width:
            sample = self._waiting.popleft()
            task = asyncio.create_task(self._flights.finish(sample, self))
            self._running.add(task)
            task.add_done_callback(lambda task, sample=sample: self._land(task, sample))

    def _land(self, task: asyncio.Task[Completion], sample: Sample) -> None:
        self._running.discard(task)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            self.landed.put(task.result())
        elif self._flights.control.closed:
            self.landed.put(sample.completion(FinishReason.ABORT))  # what it had at the server is lost
        else:
            self.landed.put(error)
            self.over = True
        self.wake()
