"""The trainer's end of the receivers that run inside an engine's ranks."""

from __future__ import annotations

import json
import secrets
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any, Literal, Protocol

_SLICE_S = 0.2
"""Seconds between looks at whether the engine still lives."""

_PARTING_S = 10.0
"""Seconds that a failed publication gives an engine to come back, before the next one would meet it half-way."""


class Enterable(Protocol):
    """An engine whose ranks can be had to call `stretto.engines.inside.receiver.enter`."""

    def enter(self, payload: str, timeout_s: float) -> None:
        """Return when every rank has come back from it. Raises EngineError when one failed or the engine is gone."""
        ...


@dataclass(frozen=True)
class Terms:
    """How a plan is received: where it is written, in windows or not, with checksums or not, and by which link.

    `store` is the address of the store through which a process group is joined; None: memory that both sides see.
    """

    write: Literal["direct", "loader"]
    windows: bool
    checksums: bool
    extra_bytes: int
    store: tuple[str, int] | None


@dataclass(frozen=True)
class Answer:
    """What one rank says of a publication."""

    written: int
    touched: bool
    error: str | None


class Receivers:
    """All ranks of one engine. They are called in (`begin`), told what to do, and let go (`end`).

    The engine's ranks are numbered from `first_rank` on; `senders` are the trainer ranks' addresses, in order; `key`
    authenticates everyone. Whoever does not answer within `timeout_s` is named in a RuntimeError.
    """

    def __init__(
        self, engine: Enterable, count: int, first_rank: int, senders: Sequence[Any], key: bytes, timeout_s: float
    ):
        self._engine, self.count, self.first = engine, count, first_rank
        self._timeout_s, self._id = timeout_s, secrets.token_hex(8)
        self._door = Door(key)
        self._payload = json.dumps(
            {
                "id": self._id,
                "key": key.hex(),
                "control": self._door.address,
                "senders": dict(enumerate(senders)),
                "first_rank": first_rank,
                "timeout_s": timeout_s,
            }
        )
        self._ranks: dict[int, Connection] = {}
        self._entering: _Call | None = None

    def begin(self) -> None:
        """Call the ranks in; the engine computes nothing from here until `end`."""
        self._entering = _Call(self._engine, self._payload, self._timeout_s)
        deadline = time.monotonic() + self._timeout_s
        while len(self._ranks) < self.count:
            connection = self._door.accept(_SLICE_S)
            if connection is not None:
                self._ranks[int(connection.recv())] = connection
            self._watch(deadline, lambda: f"{self.count - len(self._ranks)} ranks did not call")

    def ask(self, command: str, arguments: Sequence[Any] | None = None) -> None:
        """Give every rank, in order, a command with its argument."""
        for index, rank in enumerate(sorted(self._ranks)):
            try:
                self._ranks[rank].send((command, arguments[index] if arguments else None))
            except OSError as error:
                raise RuntimeError(f"engine rank {rank} is gone before {command}") from error

    def answers(self, command: str) -> list[Any]:
        """What every rank, in order, answers to the last command."""
        deadline = time.monotonic() + self._timeout_s
        return [self._answer(rank, command, deadline) for rank in sorted(self._ranks)]

    def end(self) -> None:
        """Let the engine go on."""
        self.ask("go on")
        self.answers("go on")
        assert self._entering is not None
        self._entering.join(self._timeout_s)
        self._entering = None

    def close(self) -> None:
        """Hang up, and wait a moment for ranks that are called in, which come back with an error."""
        for connection in self._ranks.values():
            connection.close()
        self._ranks.clear()
        self._door.close()
        if self._entering is not None:
            self._entering.part(_PARTING_S)
            self._entering = None

    def _answer(self, rank: int, command: str, deadline: float) -> Any:
        try:
            while not self._ranks[rank].poll(_SLICE_S):
                self._watch(deadline, lambda: f"rank {rank} does not answer to {command}")
            good, answer = self._ranks[rank].recv()
        except (EOFError, OSError) as error:
            raise RuntimeError(f"engine rank {rank} ended in {command}") from error
        if not good:
            raise RuntimeError(f"engine rank {rank}, {command}: {answer}")
        return answer

    def _watch(self, deadline: float, what: Any) -> None:
        """Raise when the engine has failed or the deadline is past."""
        assert self._entering is not None, "begin comes first"
        self._entering.check(early=True)
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what()} within {self._timeout_s:g} s")


class _Call:
    """`engine.enter` in a thread."""

    def __init__(self, engine: Enterable, payload: str, timeout_s: float):
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(engine, payload, timeout_s), daemon=True)
        self._thread.start()

    def _run(self, engine: Enterable, payload: str, timeout_s: float) -> None:
        try:
            engine.enter(payload, timeout_s)
        except BaseException as error:
            self._error = error

    def check(self, *, early: bool) -> None:
        """Raise what the engine raised; with `early`, also when it came back before it was let go."""
        if self._error is not None:
            raise RuntimeError(f"the engine did not take the weights: {self._error}") from self._error
        if early and not self._thread.is_alive():
            raise RuntimeError("the engine went on before it was told to")

    def part(self, timeout_s: float) -> None:
        """Wait for the engine to have failed or gone on, if it does."""
        self._thread.join(timeout_s)

    def join(self, timeout_s: float) -> None:
        """Wait for the engine to have gone on."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise RuntimeError(f"the engine did not go on within {timeout_s:g} s")
        self.check(early=False)


class Door:
    """A unix socket in a private directory, where processes that know the key connect."""

    def __init__(self, key: bytes):
        self._directory = tempfile.TemporaryDirectory(prefix="stretto-")
        self.address = str(Path(self._directory.name) / "door")
        self._listener = Listener(self.address, authkey=key)

    def accept(self, timeout_s: float) -> Connection | None:
        """The next who knows the key; None when nobody came in time."""
        self._listener._listener._socket.settimeout(timeout_s)  # type: ignore[attr-defined]
        try:
            return self._listener.accept()
        except (TimeoutError, AuthenticationError):
            return None

    def close(self) -> None:
        """Close it and remove the directory."""
        self._listener.close()
        self._directory.cleanup()
