"""A publication: one version of the weights on its way, prepare -> transfer -> verify -> commit."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from stretto.types import Version


class Receiver(Protocol):
    """The part of a rollout engine that a publication speaks to."""

    def prepare(self, version: Version) -> None: ...
    def commit(self, version: Version) -> None: ...
    def cancel(self, version: Version) -> None: ...
    def fail(self, version: Version) -> None: ...


class Transport(Protocol):
    """Carries the weights of the trainer into one engine. Knows nothing about models."""

    name: str

    @property
    def touched(self) -> bool:
        """Whether the last `transfer` may have written into the engine's weights; True when that is not known."""
        ...

    def transfer(self, version: Version) -> int:
        """Bring every tensor of `version` over; returns the bytes that moved. All trainer ranks call together.

        Inside one process nothing needs the version; a delta, a push over HTTP and a directory are named by it.
        """
        ...

    def verify(self) -> None:
        """Raise RuntimeError naming the first tensor that did not arrive."""
        ...

    def close(self) -> None:
        """Let go of what it holds."""
        ...


@runtime_checkable
class Sparing(Protocol):
    """What a transport has besides that may send less than all weights."""

    full_bytes: int
    """Bytes that the last transfer would have moved if it had sent all of them."""


@runtime_checkable
class Rereading(Protocol):
    """What a transport has besides that can compare what an engine holds with what the trainer has."""

    def reread(self, number: int | None) -> list[str]:
        """The tensors, among those whose turn it is, that have other bits. All trainer ranks call together."""
        ...


class Publisher:
    """Publishes versions into one engine; the engine serves the old version or the new one, never a mixture.

    `open` comes before the optimizer step, `close` after it: in between no token is computed, so an engine that shares
    the trainer's tensors never reads half a step. When `close` fails, it raises here; if anything was written by then,
    the engine refuses, since its weights may be mixed, until the next publication that goes through; else it serves on.
    """

    def __init__(self, engine: Receiver, transport: Transport):
        self._engine, self._transport = engine, transport
        self._pending: Version | None = None

    @property
    def transport(self) -> str:
        """Name of the transport."""
        return self._transport.name

    @property
    def full_bytes(self) -> int | None:
        """Bytes of the last publication had it been a full one; None where all are."""
        return self._transport.full_bytes if isinstance(self._transport, Sparing) else None

    def open(self, version: Version) -> None:
        """Prepare: the engine stops computing tokens."""
        assert self._pending is None, f"{self._pending} is still on its way"
        self._engine.prepare(version)
        self._pending = version

    def close(self) -> int:
        """Transfer, verify and commit, so that the engine serves the new version; returns the bytes that moved."""
        assert self._pending is not None, "open comes first"
        version, self._pending = self._pending, None
        try:
            moved = self._transport.transfer(version)
            self._transport.verify()
        except BaseException:  # an interrupt leaves half a version as well
            if self._transport.touched:
                self._engine.fail(version)
            else:
                self._engine.cancel(version)
            raise
        self._engine.commit(version)
        return moved

    def reread(self, number: int | None) -> list[str]:
        """Tensors of the engine that are not what the trainer has, of a sample that changes with `number` (None: all).

        No tensor where the transport cannot tell. All trainer ranks call together.
        """
        return self._transport.reread(number) if isinstance(self._transport, Rereading) else []

    def cancel(self) -> None:
        """Give up what `open` began, before anything was written: the engine serves the old version on.

        Where the engine shares the trainer's tensors, an optimizer step that changed a weight was a write. Raises
        RuntimeError once the transfer has begun.
        """
        if self._pending is None:
            raise RuntimeError("nothing to cancel: no publication is open, or its transfer has begun")
        version, self._pending = self._pending, None
        self._engine.cancel(version)

    def hang_up(self) -> None:
        """No version is published any more."""
        self._transport.close()
