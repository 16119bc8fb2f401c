"""Requests for a generation that goes on: they come while it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stretto.types import Request


@dataclass(frozen=True)
class Bounds:
    """What every request of a generation keeps to: at most so many prompt and new tokens, at least so many samples."""

    prompt: int
    new: int
    samples: int

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Bounds:
        """The bounds of `requests`, of which there is at least one."""
        return cls(
            max(len(request.prompt_ids) for request in requests),
            max(request.sampling.max_new_tokens for request in requests),
            min(len(request.seeds) for request in requests),
        )


class Inbox:
    """Between those who ask, in any thread, and the engine, which takes what came at a moment of its choice."""

    def __init__(self, requests: Sequence[Request] = (), *, closed: bool = False):
        self._condition = threading.Condition()
        self._requests = list(requests)
        self._closed = closed
        self._check: Callable[[Sequence[Request]], None] = lambda _: None
        self._tell: Callable[[], None] = lambda: None

    def open(self, check: Callable[[Sequence[Request]], None], tell: Callable[[], None] = lambda: None) -> None:
        """The engine begins to serve: `check` raises ValueError for what it cannot serve, `tell` that more came."""
        with self._condition:
            check(self._requests)
            self._check, self._tell = check, tell

    def put(self, *requests: Request) -> None:
        """Ask. Raises ValueError, and asks nothing, when one cannot be served, and RuntimeError after `close`."""
        self._check(requests)
        with self._condition:
            if self._closed:
                raise RuntimeError("the inbox is closed: its generation ends")
            self._requests.extend(requests)
            self._condition.notify_all()
        self._tell()

    def close(self) -> None:
        """Nothing more comes; the generation ends after what was asked."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._tell()

    def take(self) -> list[Request]:
        """What came since the last call."""
        with self._condition:
            taken, self._requests = self._requests, []
            return taken

    def wait(self, timeout_s: float) -> None:
        """Return when there is something to take or nothing more comes, or after `timeout_s`."""
        with self._condition:
            self._condition.wait_for(lambda: self._requests or self._closed, timeout_s)

    @property
    def ended(self) -> bool:
        """Whether everything was taken and nothing more comes."""
        with self._condition:
            return self._closed and not self._requests
