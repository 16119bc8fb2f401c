"""The contract of every rollout engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

from stretto.engines.inbox import Bounds, Inbox
from stretto.sync.layout import Layout
from stretto.types import Completion, Request, Version

Memory = Literal["kv", "weights"]
"""What an engine can give back: the pool of keys and values, and its own copy of the weights."""


class EngineError(RuntimeError):
    """The engine cannot serve; the message says why and what to do."""


class RolloutEngine(Protocol):
    """Token ids in; token ids, their log-probs, a finish reason and weight-version spans out.

    `generate` and `serve` run in the caller's thread, one generation at a time; every other method may be called from
    any thread while it runs. A token is computed only while nothing is paused and no publication is under way: two
    gates, of which `resume` opens one, and `commit` or `cancel` the other.
    """

    def generate(self, requests: Sequence[Request], *, deadline_s: float) -> Iterator[Completion]:
        """Yield each sample as it finishes, in no promised order; every request yields ``len(seeds)`` completions.

        The iterator must be exhausted or closed (dropping it closes it) before the next call, which raises EngineError
        otherwise. Raises ValueError for a malformed request (before anything is generated); EngineError past
        `deadline_s`, after `close`, and at once when the weights may be mixed.
        """
        ...

    def serve(self, inbox: Inbox, bounds: Bounds) -> Iterator[Completion]:
        """Yield each sample of the requests that come through `inbox`, all within `bounds`, as it finishes.

        As `generate`, but that it goes on until the inbox has ended, and has no deadline: `abort` ends a request, and
        `close` all of them. A malformed request is refused where it is put into the inbox.
        """
        ...

    def abort(self, request_ids: Sequence[int] | None = None) -> None:
        """End those requests (all when None): they are yielded with finish reason ABORT, even while paused."""
        ...

    def pause(self, timeout_s: float = 60.0) -> None:
        """Return once no token is being computed; none will be until `resume`. Kept KV stays.

        Raises EngineError, and pauses nothing, when what is computed does not end within `timeout_s`.
        """
        ...

    def resume(self) -> None:
        """Undo `pause`. During a publication the engine stays shut until that ends."""
        ...

    def release_memory(self, *parts: Memory) -> None:
        """Give back device memory that only generation needs; the engine has to be paused.

        With "kv" its keys and values are forgotten; with "weights" it refuses until a full publication commits.
        """
        ...

    def reclaim_memory(self, *parts: Memory) -> None:
        """Take that memory again: the weights' before they are published, all of it before the next `generate`."""
        ...

    def layout(self) -> Layout:
        """Which boxes of the checkpoint a publication must bring to each rank of the engine's replicas."""
        ...

    def prepare(self, version: Version, timeout_s: float = 60.0) -> None:
        """Get ready to receive `version`: no token is computed from here until `commit`, `cancel` or a new version.

        Raises EngineError, and prepares nothing, for a version that is not newer or past `timeout_s`, as `pause` does.
        """
        ...

    def commit(self, version: Version) -> None:
        """All weights of `version` are in place: tokens carry it from now on. EngineError unless it is prepared."""
        ...

    def cancel(self, version: Version) -> None:
        """Give up the prepared `version`, of which nothing was written: the old one serves on.

        Raises EngineError unless it is prepared.
        """
        ...

    def fail(self, version: Version) -> None:
        """The prepared `version` did not arrive whole: every generation raises until a full publication commits.

        Raises EngineError unless it is prepared.
        """
        ...

    @property
    def version(self) -> Version:
        """The version that samples now."""
        ...

    def close(self) -> None:
        """End what is generated (its samples are yielded with ABORT), refuse more, and leave nothing behind."""
        ...
