"""One bucket on one side of a link: what has to be copied there, and the messages that travel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.sync.program import Bucket, Move
from stretto.sync.views import Copies, Views


@dataclass(frozen=True)
class Freight:
    """`messages` are flat bytes, in the order that both sides know.

    `copies` bring into the buffer what does not travel straight from its tensor, or out of it what did not arrive so.
    """

    messages: list[Tensor]
    copies: Copies


def freight(bucket: Bucket, buffer: Tensor, views: Views, *, outgoing: bool) -> Freight:
    """How a bucket goes through `buffer`. A large piece that this side holds contiguously, as it travels, does not."""
    messages = [buffer[: bucket.together]] if bucket.together else []
    slots, copied, shifts = [], [], []
    for place, (move, slot) in enumerate(zip(bucket.moves, _slots(bucket, buffer), strict=True)):
        own = views[move]
        alone = place >= bucket.joined
        straight = alone and _travels(own, move, buffer, outgoing)
        if alone:
            messages.append(_bytes(own if straight else slot))
        if not straight:
            slots.append(slot)
            copied.append(own)
            shifts.append(move.shift)
    if outgoing:
        return Freight(messages, Copies(slots, copied, shifts))
    return Freight(messages, Copies(copied, slots, [0.0] * len(slots)))


def _travels(own: Tensor, move: Move, buffer: Tensor, outgoing: bool) -> bool:
    """Whether the view's own memory is the message."""
    alike = str(own.dtype).removeprefix("torch.") == move.dtype and own.device == buffer.device
    return alike and own.is_contiguous() and not (outgoing and move.shift)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _slots(bucket: Bucket, buffer: Tensor) -> Iterator[Tensor]:
    """Each move's place in the buffer, seen as a tensor of its shape and dtype."""
    for move, offset in zip(bucket.moves, bucket.offsets, strict=True):
        yield buffer[offset : offset + move.bytes].view(getattr(torch, move.dtype)).view(move.size)
