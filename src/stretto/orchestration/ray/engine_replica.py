"""A replica of the rollout engine, in a process of its own."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from stretto.config import RunConfig
from stretto.engines import EngineError, RolloutEngine
from stretto.engines.embedded import EmbeddedEngine
from stretto.engines.inbox import Bounds, Inbox
from stretto.models import checkpoint as models
from stretto.orchestration.dtypes import engine_dtype
from stretto.orchestration.engines import open_engine, open_server, server_layout
from stretto.orchestration.model import Model
from stretto.orchestration.ray.bus import SampleBus, key_of
from stretto.orchestration.ray.part import Part
from stretto.types import Completion, FinishReason, Request, Rollout, Version, VersionSpan
from stretto.world import World

_CLEAR_POLL_S = 0.02


@dataclass(frozen=True)
class Generated:
    """What the controller needs to know of a sample whose tokens are on the bus."""

    index: int
    tokens: int
    finish_reason: FinishReason
    spans: tuple[VersionSpan, ...]


class EngineReplica(Part):
    """Serves requests all the time, as an asynchronous actor. It has no weights until a version commits.

    `bounds` hold for every request of the run.
    """

    def __init__(self, config: RunConfig, partition: str, bounds: Bounds):
        self._config, self._bounds, self._bus = config, bounds, SampleBus(partition)
        self._stack = ExitStack()
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self._engine = _open(config, World(0, 1, device), self._stack)
        self._inbox: Inbox | None = None
        self._waiting: dict[int, _Pending] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    async def ready(self) -> Version:
        """The version that it serves."""
        self._loop = asyncio.get_running_loop()
        return self._engine.version

    async def pulse(self) -> int:
        """How many requests are under way."""
        return len(self._waiting)

    async def generate(self, request: Request, group_id: int, source_row: int) -> list[Generated]:
        """Put the samples of a group on the bus; those that were aborted are told of, and have no tokens there.

        `request` has an id of its own, which no other that this replica ever gets has.

        Raises EngineError when the engine stops serving meanwhile.
        """
        if self._inbox is None:
            raise EngineError("the engine has no weights yet")
        pending = self._waiting[request.id] = _Pending(len(request.seeds), asyncio.get_running_loop().create_future())
        try:
            self._inbox.put(request)
            completions = await pending.future
            completions.sort(key=lambda one: one.index)
            await asyncio.to_thread(self._put, request, completions, group_id, source_row)
        finally:
            self._waiting.pop(request.id, None)
        return [
            Generated(one.index, len(one.response_ids), one.finish_reason, one.version_spans) for one in completions
        ]

    async def clear(self, timeout_s: float) -> None:
        """End every request, and return when nothing of them is put on the bus any more.

        Raises TimeoutError when that takes too long.
        """
        self._engine.abort(list(self._waiting))
        async with asyncio.timeout(timeout_s):
            while self._waiting:
                await asyncio.sleep(_CLEAR_POLL_S)

    async def enter(self, payload: str, timeout_s: float) -> None:
        """See :class:`~stretto.sync.receivers.Enterable`."""
        engine: Any = self._engine
        await asyncio.to_thread(engine.enter, payload, timeout_s)

    async def prepare(self, version: Version, timeout_s: float) -> None:
        """See the engine's contract."""
        await asyncio.to_thread(self._engine.prepare, version, timeout_s)

    async def commit(self, version: Version) -> None:
        """See the engine's contract; from the first version on it serves."""
        await asyncio.to_thread(self._engine.commit, version)
        if self._inbox is None:
            self._serve()

    async def cancel(self, version: Version) -> None:
        """See the engine's contract."""
        await asyncio.to_thread(self._engine.cancel, version)

    async def fail(self, version: Version) -> None:
        """See the engine's contract."""
        await asyncio.to_thread(self._engine.fail, version)

    async def close(self) -> None:
        """End what is generated and let go of everything."""
        await asyncio.to_thread(self._stack.close)

    def _serve(self) -> None:
        self._inbox = Inbox()
        stream = self._engine.serve(self._inbox, self._bounds)
        threading.Thread(target=self._listen, args=(stream,), name="serving", daemon=True).start()

    def _listen(self, stream: Any) -> None:
        assert self._loop is not None
        try:
            for completion in stream:
                self._loop.call_soon_threadsafe(self._landed, completion)
            error: Exception = EngineError("the engine was closed")
        except Exception as failure:
            error = failure
        self._loop.call_soon_threadsafe(self._ended, error)

    def _landed(self, completion: Completion) -> None:
        pending = self._waiting.get(completion.request_id)
        if pending is not None:
            pending.add(completion)

    def _ended(self, error: Exception) -> None:
        self._inbox = None
        for pending in self._waiting.values():
            if not pending.future.done():
                pending.future.set_exception(EngineError(f"{type(error).__name__}: {error}"))

    def _put(self, request: Request, completions: list[Completion], group_id: int, source_row: int) -> None:
        whole = [one for one in completions if one.finish_reason is not FinishReason.ABORT]
        if not whole:
            return
        temperature = request.sampling.temperature or 1.0
        self._bus.put(
            [key_of(group_id, one.index) for one in whole],
            [
                Rollout.of(one, request.prompt_ids, temperature=temperature, group_id=group_id, source_row=source_row)
                for one in whole
            ],
        )


class _Pending:
    """A request whose samples have not all ended."""

    def __init__(self, samples: int, future: asyncio.Future[list[Completion]]):
        self.future = future
        self._samples, self._found = samples, list[Completion]()

    def add(self, completion: Completion) -> None:
        self._found.append(completion)
        if len(self._found) == self._samples and not self.future.done():
            self.future.set_result(self._found)


def _open(config: RunConfig, world: World, stack: ExitStack) -> RolloutEngine:
    model = Model.load(config)
    if config.engine.backend == "embedded":
        engine = open_engine(config, world, model, stack)
        assert isinstance(engine, EmbeddedEngine)
        engine.allocate()
        return engine
    eos = models.end_of_sequence_ids(model.directory, model.tokenizer)
    layout = server_layout(config, model, engine_dtype(config, world), 1)
    return open_server(config, model, eos, stack, layout, world, url=config.engine.url)
