"""What executing a plan asks of the way that its buckets travel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from torch import Tensor

Way = Literal["out", "in"]


class Work(Protocol):
    """A transfer under way."""

    def wait(self) -> object:
        """Return when it is complete. Raises RuntimeError when the other side failed or was not heard of in time."""
        ...


class Link(Protocol):
    """Carries buckets between the processes of a plan, which it knows by their numbers.

    Buckets of one pair of processes travel in order, in the slots 0 and 1 in turn; a sender has at most one on its way
    out while it packs the next.
    """

    bucket_bytes: int
    """Room of a slot."""
    straight: bool
    """Whether a large piece may travel from or into its tensor; else everything goes through the slots."""

    def buffer(self, way: Way, slot: int, peer: int, need: int) -> Tensor:
        """A flat uint8 slot of at least `need` bytes, at the same address every time that this can be.

        One on the way out is free to be packed; for one on the way in, what came was not waited for yet.
        """
        ...

    def start(
        self, slot: int, out: tuple[int, Sequence[Tensor]] | None, into: tuple[int, Sequence[Tensor]] | None
    ) -> list[Work]:
        """Begin sending messages to one process and receiving from one, each given with its process number."""
        ...

    def release(self, slot: int, peer: int) -> None:
        """What came from `peer` in the slot is unpacked."""
        ...

    def settle(self) -> None:
        """Return when every slot that was sent from here is unpacked at the other side."""
        ...

    def close(self) -> None:
        """Let go of what this link holds: whoever waits for this process hears of it."""
        ...
