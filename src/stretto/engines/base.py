"""The contract of every rollout engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from stretto.sync.layout import Layout
from stretto.types import Completion, Request, Version


class EngineError(RuntimeError):
    """The engine cannot serve; the message says why and what to do."""


class RolloutEngine(Protocol):
    """Token ids in; token ids, their log-probs, a finish reason and weight-version spans out.

    `generate` runs in the caller's thread; every other method may be called from any thread while it runs.
    """

    def generate(self, requests: Sequence[Request], *, deadline_s: float) -> Iterator[Completion]:
        """Yield each sample as it finishes, in no promised order; every request yields ``len(seeds)`` completions.

        Raises ValueError for a malformed request (before anything is generated), EngineError past `deadline_s`.
        """
        ...

    def abort(self, request_ids: Sequence[int] | None = None) -> None:
        """End those requests (all when None) at the next token: they are yielded with finish reason ABORT."""
        ...

    def pause(self) -> None:
        """Return once no token is being computed; none will be until `resume`. Kept KV stays."""
        ...

    def resume(self) -> None:
        """Continue after `pause`."""
        ...

    def release_memory(self) -> None:
        """Give back device memory that only generation needs."""
        ...

    def reclaim_memory(self) -> None:
        """Take that memory again before the next `generate`."""
        ...

    def layout(self) -> Layout:
        """Names, shapes and dtypes of the weights that a publication must fill."""
        ...

    def prepare(self, version: Version) -> None:
        """Get ready to receive `version`: no token is computed from here until `commit` and `resume`."""
        ...

    def commit(self, version: Version) -> None:
        """All weights of the prepared `version` are in place: tokens carry it from now on."""
        ...

    @property
    def version(self) -> Version:
        """The version that samples now."""
        ...

    def close(self) -> None:
        """Stop, and leave nothing behind."""
        ...
