"""A rollout engine that is a server of its own: SGLang or vLLM, by its dialect."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from queue import Empty
from typing import Any

import torch

from stretto.engines.base import EngineError, Memory
from stretto.engines.inbox import Bounds, Inbox
from stretto.engines.requests import check_requests
from stretto.engines.server.client import Call, Client
from stretto.engines.server.dialect import Dialect, Setup
from stretto.engines.server.flight import Flight, Flights
from stretto.engines.server.gate import RequestControl
from stretto.engines.server.options import command_line, installed_options
from stretto.engines.server.process import ReservedPort, ServerProcess
from stretto.engines.server.sample import Sample
from stretto.engines.stopping import StopRule
from stretto.models.checkpoint import load_config
from stretto.sync.binding import dtype_name
from stretto.sync.layout import Layout
from stretto.types import Completion, FinishReason, Request, Version

_POLL_S = 0.2
_ATTEMPTS = 3
_SWITCH_S = 60.0
_CLOSE_S = 5.0


class ServerEngine:
    """Meets :class:`~stretto.engines.base.RolloutEngine` with a server that it starts, or adopts at `url`.

    The server generates with `tp` ranks, in `dtype`, of the checkpoint in `directory`; `max_sequences` samples are at
    the server at the same time. `options` are its own, by their Python names; `python` is its interpreter (this one
    when None). `filters` says whether requests will have top-p, top-k or min-p. With a `receiver`, our code runs inside
    of it, for `enter`. Of processes that share a server, the one that `leads` pauses it and has it receive weights.
    `releases` says whether it will have to give memory back, and `memory_share` how much of its devices' memory is its
    own (None: as its options say). ValueError for options that are unknown or set by the adapter, and for a server at
    `url` that cannot serve this run; EngineError when the server is not ready after `start_timeout_s`; what it wrote is
    in `log`.
    """

    def __init__(
        self,
        dialect: Dialect,
        directory: Path,
        tokenizer: Any,
        *,
        dtype: torch.dtype,
        eos_ids: Sequence[int],
        max_length: int,
        max_sequences: int,
        tp: int,
        layout: Layout | None,
        options: Mapping[str, Any],
        python: str | None,
        url: str | None,
        device: torch.device,
        start_timeout_s: float,
        log: Path,
        filters: bool = False,
        receiver: bool = True,
        leads: bool = True,
        releases: bool = False,
        memory_share: float | None = None,
    ):
        self._dialect, self._layout = dialect, layout
        self.leads = leads
        self._eos_ids = tuple(eos_ids)
        self._max_length, self._max_sequences = max_length, max_sequences
        self._vocabulary = load_config(directory).get_text_config().vocab_size
        setup = Setup(
            directory,
            dtype_name(dtype),
            max_length,
            max_sequences,
            tp,
            device,
            filters,
            receiver,
            releases,
            memory_share,
        )
        self._flights = Flights(dialect, StopRule(tokenizer, eos_ids))
        self._control = RequestControl(self._flights.changed)
        self._switching = threading.RLock()
        self._process: ServerProcess | None = None
        self._flying: set[Future[None]] = set()
        if url is None:
            self._start(setup, python or sys.executable, options, log, start_timeout_s)
        else:
            if options:
                raise ValueError(f"{dialect.section} has options, but the server at {url} already runs; leave them out")
            self._connect(url, start_timeout_s)
            self._meet(setup)
            self._say(dialect.resume(), _SWITCH_S)  # whoever had it before may have left it paused
        self._flights.start(self._client, self._control)

    @property
    def base_url(self) -> str:
        """Where the server listens."""
        return self._client.base_url

    @property
    def process(self) -> ServerProcess | None:
        """The server's process; None for one that was adopted."""
        return self._process

    def layout(self) -> Layout:
        """See the contract."""
        assert self._layout is not None, "set_layout comes first"
        return self._layout

    def set_layout(self, layout: Layout) -> None:
        """What `layout` says from now on."""
        self._layout = layout

    @property
    def version(self) -> Version:
        """See the contract."""
        return self._control.version

    def pause(self, timeout_s: float = _SWITCH_S) -> None:
        """See the contract. What was under way is aborted at the server, and begins again where it was."""
        with self._switching:
            end, before = time.monotonic() + timeout_s, self._control.paused
            self._control.pause(timeout_s)
            try:
                self._say(self._dialect.pause(flush=False), end - time.monotonic())
            except EngineError:
                if not before:
                    self._control.resume()
                raise

    def resume(self) -> None:
        """See the contract."""
        with self._switching:
            self._control.resume()
            self._open()

    def prepare(self, version: Version, timeout_s: float = _SWITCH_S) -> None:
        """See the contract."""
        with self._switching:
            end = time.monotonic() + timeout_s
            self._control.prepare(version, timeout_s)
            try:
                self._say(self._dialect.pause(flush=True), end - time.monotonic())
            except EngineError:
                self._control.cancel(version)
                raise

    def commit(self, version: Version) -> None:
        """See the contract."""
        with self._switching:
            self._control.commit(version)
            self._open()

    def cancel(self, version: Version) -> None:
        """See the contract."""
        with self._switching:
            self._control.cancel(version)
            self._open()

    def fail(self, version: Version) -> None:
        """See the contract."""
        self._control.fail(version)

    def abort(self, request_ids: Sequence[int] | None = None) -> None:
        """See the contract."""
        self._control.abort(None if request_ids is None else list(request_ids))

    def release_memory(self, *parts: Memory) -> None:
        """See the contract."""
        if "weights" in parts:
            self._control.lose_weights()
        self._say(self._dialect.release(parts), _SWITCH_S)

    def reclaim_memory(self, *parts: Memory) -> None:
        """See the contract."""
        self._say(self._dialect.reclaim(parts), _SWITCH_S)

    def enter(self, payload: str, timeout_s: float) -> None:
        """Every rank of the server calls our entry point with `payload`; returns when all have returned.

        Raises EngineError with what the server says when one of them failed, or past `timeout_s`.
        """
        answer = self._client.call(self._dialect.enter(payload), timeout_s)
        if wrong := self._dialect.entered(answer):
            raise EngineError(f"{self._dialect.name}: {wrong}")

    def close(self) -> None:
        """See the contract. An adopted server runs on, unpaused."""
        if self._control.closed:
            return
        self._control.close()
        wait(self._flying, _CLOSE_S)
        if self._process is not None:
            self._process.stop()
            wait(self._flying, _CLOSE_S)  # what did not answer before hears of the end now
        else:
            with suppress(EngineError):
                self._say(self._dialect.resume(), _CLOSE_S)
        self._client.close()

    def generate(self, requests: Sequence[Request], *, deadline_s: float) -> Iterator[Completion]:
        """See the contract."""
        self._check(requests)
        return self._begin(Inbox(requests, closed=True), time.monotonic() + deadline_s)

    def serve(self, inbox: Inbox, bounds: Bounds) -> Iterator[Completion]:
        """See the contract. The server minds its bounds itself."""
        stream = self._begin(inbox, math.inf)
        inbox.open(self._check, self._flights.changed)
        return stream

    def _check(self, requests: Sequence[Request]) -> None:
        check_requests(requests, vocabulary=self._vocabulary, max_length=self._max_length)
        for request in requests:
            if wrong := self._dialect.wrong_sampling(request.sampling):
                raise ValueError(f"request {request.id}: {wrong}")

    def _begin(self, inbox: Inbox, deadline: float) -> Generator[Completion]:
        stream = self._generate(inbox, deadline)
        self._control.begin(stream)
        return stream

    def _samples(self, request: Request) -> Iterator[Sample]:
        ends = (*self._eos_ids, *request.sampling.stop_ids)
        return (Sample(request, index, ends) for index in range(len(request.seeds)))

    def _generate(self, inbox: Inbox, deadline: float) -> Generator[Completion]:
        if self._control.closed:
            for request in inbox.take():
                yield from (sample.completion(FinishReason.ABORT) for sample in self._samples(request))
            return
        flight = Flight(self._flights, inbox, self._samples, self._max_sequences)
        flying = self._client.submit(flight.fly())
        self._flying = {flying, *(one for one in self._flying if not one.done())}
        try:
            while (one := self._next(flight, deadline)) is not None:
                if isinstance(one, BaseException):
                    raise one
                yield one
        finally:
            if not flying.done():
                flight.over = True
                self._flights.changed()

    def _next(self, flight: Flight, deadline: float) -> Completion | BaseException | None:
        """What lands next; None after the last."""
        left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        try:
            return flight.landed.get(timeout=left)
        except Empty:
            raise self._control.overdue(flight.unfinished) from None

    def _open(self) -> None:
        if self._control.serves:
            self._say(self._dialect.resume(), _SWITCH_S)

    def _say(self, calls: Sequence[Call], timeout_s: float) -> None:
        for call in calls if self.leads else ():
            self._client.call(call, max(timeout_s, 0.001))

    def _start(self, setup: Setup, python: str, options: Mapping[str, Any], log: Path, timeout_s: float) -> None:
        dialect, end = self._dialect, time.monotonic() + timeout_s
        known = installed_options(python, dialect.list_options, dialect.name)
        for attempt in range(_ATTEMPTS):
            port = ReservedPort()
            own = {**dialect.own_options(setup), "host": "127.0.0.1", "port": port.number}
            words = command_line(options, own, known, dialect.section)
            self._process = ServerProcess(
                [python, *dialect.command(), *words],
                dialect.environment(setup),
                log,
                same_python=python == sys.executable,
            )
            try:
                self._connect(f"http://127.0.0.1:{port.number}", end - time.monotonic())
                return
            except EngineError as error:
                self._process.stop()
                if "ddress already in use" not in str(error) or attempt == _ATTEMPTS - 1:
                    raise
            finally:
                port.release()

    def _connect(self, url: str, timeout_s: float) -> None:
        """Speak to the server at `url`, once it serves."""
        client = Client(self._dialect.name, url.rstrip("/"), self._obituary)
        end = time.monotonic() + timeout_s
        try:
            while True:
                self._check_alive()
                try:
                    client.call(self._dialect.health(), min(10.0, max(0.1, end - time.monotonic())))
                    break
                except EngineError as error:
                    if time.monotonic() > end:
                        raise EngineError(f"{error}\n{self._not_ready(timeout_s)}") from None
                time.sleep(_POLL_S)
        except BaseException:
            client.close()
            raise
        self._client = client

    def _meet(self, setup: Setup) -> None:
        """Look whether a server that runs already can serve this run."""
        try:
            self._dialect.meet(self._client.call(self._dialect.introduction(), _SWITCH_S), setup)
        except BaseException:
            self._client.close()
            raise

    def _check_alive(self) -> None:
        if self._process is not None and (code := self._process.ended()) is not None:
            raise EngineError(
                f"{self._dialect.name} ended with exit code {code} before it served; {self._process.tail()}"
            )

    def _not_ready(self, timeout_s: float) -> str:
        said = f"{self._dialect.name} was not ready after {timeout_s:g} s (engine.start_timeout_s)"
        return said if self._process is None else f"{said}; {self._process.tail()}"

    def _obituary(self) -> str:
        if self._process is None:
            return ""
        code = self._process.ended(1.0)
        return "" if code is None else f"; it ended with exit code {code}; {self._process.tail()}"
