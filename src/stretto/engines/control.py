"""What other threads ask of a generation (or its own, between two yields): pause, abort, close, new weights.

Every engine has these gates and versions; what waits at the gates differs (a forward pass, a request to a server).
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Generator
from typing import Any

from stretto.engines.base import EngineError
from stretto.types import Version


class Control:
    """Two gates before all that is computed, the versions, and what ends a generation early.

    The publication gate is shut from `prepare` to `commit` or `cancel`, the other one from `pause` to `resume`.
    """

    under_way = "what was being computed"  # for the message of a pause that was not in time

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._stream: weakref.ref[Generator[Any]] | None = None
        self._aborted: set[int] | None = set()
        self._disturbed = self._closed = False
        self._computing = 0
        self._paused = False
        self._prepared: Version | None = None
        self._mixed = False
        self.version = Version(0, 0)

    def begin(self, stream: Generator[Any]) -> None:
        """A new generation starts; earlier aborts do not concern it. EngineError when closed or busy with another."""
        with self._condition:
            if self._closed:
                raise EngineError("the engine is closed")
            # Weak: an iterator that was never begun runs no `finally`, and one that nobody holds is no generation.
            earlier = self._stream and self._stream()
            if earlier is not None and inspect.getgeneratorstate(earlier) != inspect.GEN_CLOSED:
                raise EngineError("an earlier generation is unfinished; exhaust or close its iterator first")
            self._stream = weakref.ref(stream)
            self._aborted, self._disturbed = set(), False

    def pause(self, timeout_s: float) -> None:
        """Shut the gate and wait for what is under way. EngineError, and nothing changed, when it does not end."""
        with self._condition:
            before, self._paused = self._paused, True
            if not self._idle(timeout_s):
                self._paused = before
                self._changed()
                raise EngineError(f"pause: {self.under_way} did not end within {timeout_s:g} s")

    def resume(self) -> None:
        """Open the gate that `pause` shut; the publication gate stays as it is."""
        with self._condition:
            self._paused = False
            self._changed()

    def prepare(self, version: Version, timeout_s: float) -> None:
        """Shut the publication gate and wait for what is under way, as `pause` does."""
        with self._condition:
            if version <= self.version:
                raise EngineError(f"version {version} is not newer than {self.version}, which is served")
            before, self._prepared = self._prepared, version
            if not self._idle(timeout_s):
                self._prepared = before
                self._changed()
                raise EngineError(f"prepare of {version}: {self.under_way} did not end within {timeout_s:g} s")
            # What is replaced was not cancelled, so it may have begun to write.
            self._mixed = self._mixed or before is not None

    def commit(self, version: Version) -> None:
        """Open the publication gate to the prepared version."""
        with self._condition:
            self._end_publication(version)
            self.version, self._mixed = version, False

    def cancel(self, version: Version) -> None:
        """Open the publication gate as if `version` had not been prepared."""
        with self._condition:
            self._end_publication(version)

    def fail(self, version: Version) -> None:
        """The prepared version did not arrive whole: refuse until another one commits."""
        with self._condition:
            self._end_publication(version)
            self._mixed = True

    def lose_weights(self) -> None:
        """There are none until a publication commits."""
        with self._condition:
            self._mixed = True

    def abort(self, request_ids: list[int] | None) -> None:
        """Mark requests (all when None) as aborted."""
        with self._condition:
            if request_ids is None or self._aborted is None:
                self._aborted = None
            else:
                self._aborted.update(request_ids)
            self._disturbed = True
            self._changed()

    def close(self) -> None:
        """Abort everything and begin nothing more."""
        with self._condition:
            self._closed = True
            self.abort(None)

    @property
    def closed(self) -> bool:
        """Whether the engine was closed."""
        return self._closed

    def is_aborted(self, request_id: int) -> bool:
        """Whether that request was aborted."""
        aborted = self._aborted  # read once: another thread may be replacing it
        return aborted is None or request_id in aborted

    @property
    def _refuses(self) -> bool:
        return self._mixed and self._prepared is None

    def _shut_by(self) -> str | None:
        if self._prepared is not None:
            return f"version {self._prepared} was prepared and neither committed nor cancelled"
        return "the engine was still paused" if self._paused else None

    def _refusal(self) -> EngineError:
        return EngineError(
            f"a publication after {self.version} failed midway or the memory of the weights was given back, so they "
            "may be a mixture; a full publication must commit before the engine serves again"
        )

    def _changed(self) -> None:
        """Something above is new; the condition is held."""
        self._condition.notify_all()

    def _idle(self, timeout_s: float) -> bool:
        self._changed()
        return self._condition.wait_for(lambda: not self._computing, timeout_s)

    def _end_publication(self, version: Version) -> None:
        if self._prepared != version:
            raise EngineError(f"version {version} is not the prepared one, which is {self._prepared}")
        self._prepared = None
        self._changed()
