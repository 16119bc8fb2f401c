"""A publication: one version of the weights on its way, prepare -> transfer -> verify -> commit."""

from __future__ import annotations

from typing import Protocol

from stretto.types import Version


class Receiver(Protocol):
    """The part of a rollout engine that a publication speaks to."""

    def prepare(self, version: Version) -> None: ...
    def commit(self, version: Version) -> None: ...
    def resume(self) -> None: ...


class Transport(Protocol):
    """Carries the weights of the trainer into one engine. Knows nothing about models."""

    name: str

    def transfer(self) -> int:
        """Bring every tensor over; returns the bytes that moved. All trainer ranks call together."""
        ...

    def verify(self) -> None:
        """Raise RuntimeError naming the first tensor that did not arrive."""
        ...


class Publisher:
    """Publishes versions into one engine; the engine serves the old version or the new one, never a mixture.

    `open` comes before the optimizer step, `close` after it: in between no token is computed, so an engine that shares
    the trainer's tensors never reads half a step. A failure raises here and leaves the engine paused, since its weights
    may be mixed; the next publication that goes through lets it serve again.
    """

    def __init__(self, engine: Receiver, transport: Transport):
        self._engine, self._transport = engine, transport
        self._pending: Version | None = None

    @property
    def transport(self) -> str:
        """Name of the transport."""
        return self._transport.name

    def open(self, version: Version) -> None:
        """Prepare: the engine stops computing tokens."""
        assert self._pending is None, f"{self._pending} is still on its way"
        self._engine.prepare(version)
        self._pending = version

    def close(self) -> int:
        """Transfer, verify, commit, and let the engine serve the new version; returns the bytes that moved."""
        assert self._pending is not None, "open comes first"
        version, self._pending = self._pending, None
        moved = self._transport.transfer()
        self._transport.verify()
        self._engine.commit(version)
        self._engine.resume()
        return moved
