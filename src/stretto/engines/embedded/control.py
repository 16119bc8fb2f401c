"""Pause, resume and abort of a generation that runs in another thread (or between two yields of this one)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from stretto.engines.base import EngineError


class Control:
    """A gate that every forward pass goes through."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._paused = False
        self._computing = False
        self._aborted: set[int] | None = set()

    @contextmanager
    def step(self, deadline: float) -> Iterator[None]:
        """One forward pass; waits while paused, until `deadline` (time.monotonic seconds)."""
        with self._condition:
            if not self._condition.wait_for(lambda: not self._paused, timeout=max(0.0, deadline - time.monotonic())):
                raise EngineError("the engine was still paused at the rollout's deadline (rollout.timeout_s)")
            self._computing = True
        try:
            yield
        finally:
            with self._condition:
                self._computing = False
                self._condition.notify_all()

    def pause(self) -> None:
        """Close the gate and wait for the pass under way."""
        with self._condition:
            self._paused = True
            self._condition.wait_for(lambda: not self._computing)

    def resume(self) -> None:
        """Open the gate."""
        with self._condition:
            self._paused = False
            self._condition.notify_all()

    def abort(self, request_ids: list[int] | None) -> None:
        """Mark requests (all when None) as aborted."""
        with self._condition:
            if request_ids is None or self._aborted is None:
                self._aborted = None
            else:
                self._aborted.update(request_ids)

    def is_aborted(self, request_id: int) -> bool:
        """Whether that request was aborted."""
        aborted = self._aborted  # read once: another thread may be replacing it
        return aborted is None or request_id in aborted

    def forget_aborts(self) -> None:
        """A new generation starts: earlier aborts do not concern it."""
        with self._condition:
            self._aborted = set()

    @property
    def paused(self) -> bool:
        """Whether the gate is closed."""
        return self._paused
