"""One bucket on one side of a link: what has to be copied there, and the messages that travel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.sync.binding import dtype_name
from stretto.sync.links.base import Way
from stretto.sync.program import Bucket, Move
from stretto.sync.views import Copies, Views


@dataclass(frozen=True)
class Freight:
    """`messages` are flat bytes, in the order that both sides know; `trailer` is the last, where a checksum travels.

    `copies` bring into the slot what does not travel straight from its tensor, or out of it what did not arrive so.
    """

    messages: list[Tensor]
    copies: Copies
    trailer: Tensor | None

    @property
    def data(self) -> list[Tensor]:
        """The messages without the trailer."""
        return self.messages if self.trailer is None else self.messages[:-1]


def freight(bucket: Bucket, slot: Tensor, views: Views, way: Way, *, straight: bool, trailer: int) -> Freight:
    """How a bucket goes through `slot`, whose end has `trailer` bytes for a checksum.

    With `straight`, a large piece that this side holds contiguously, as it travels, does not go through it.
    """
    messages = [slot[: bucket.together]] if bucket.together else []
    places, copied, shifts = [], [], []
    for index, (move, place) in enumerate(zip(bucket.moves, _places(bucket, slot), strict=True)):
        own = views[move]
        alone = index >= bucket.joined
        direct = alone and straight and _travels(own, move, slot, way)
        if alone:
            messages.append(_bytes(own if direct else place))
        if not direct:
            places.append(place)
            copied.append(own)
            shifts.append(move.shift)
    end = slot[bucket.bytes : bucket.bytes + trailer] if trailer else None
    messages += [end] if end is not None else []
    if way == "out":
        return Freight(messages, Copies(places, copied, shifts), end)
    return Freight(messages, Copies(copied, places, [0.0] * len(places)), end)


def _travels(own: Tensor, move: Move, slot: Tensor, way: Way) -> bool:
    """Whether the view's own memory is the message."""
    alike = dtype_name(own.dtype) == move.dtype and own.device == slot.device
    return alike and own.is_contiguous() and not (way == "out" and move.shift)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _places(bucket: Bucket, slot: Tensor) -> Iterator[Tensor]:
    """Each move's place in the slot, seen as a tensor of its shape and dtype."""
    for move, offset in zip(bucket.moves, bucket.offsets, strict=True):
        yield slot[offset : offset + move.bytes].view(getattr(torch, move.dtype)).view(move.size)
