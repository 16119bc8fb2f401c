"""Checksums that travel with buckets: whether what arrived is what was sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stretto.sync.freight import Freight

TRAILER_BYTES = 16
"""Room for a checksum at the end of a bucket; a multiple of the alignment of pieces."""

_CHUNK = 2**22
"""Elements that are summed up at a time: bounds the memory."""


class Checksums:
    """Stamps the buckets that go out and collects what is wrong with those that come in.

    Nothing waits for the device until `verify`.
    """

    def __init__(self) -> None:
        self._arrived: list[tuple[str, Tensor]] = []

    def stamp(self, load: Freight) -> None:
        """Write the checksum of a packed bucket to its trailer."""
        assert load.trailer is not None
        load.trailer.view(torch.int64).copy_(checksum(load.data))

    def expect(self, load: Freight, name: str) -> None:
        """Compare a bucket that arrived with its trailer."""
        assert load.trailer is not None
        self._arrived.append((name, (load.trailer.view(torch.int64) == checksum(load.data)).all()))

    def verify(self) -> None:
        """Raise RuntimeError naming the buckets since the last call that arrived changed."""
        arrived, self._arrived = self._arrived, []
        if wrong := [name for name, same in arrived if not bool(same)]:
            raise RuntimeError(f"changed on the way (their checksums differ): {', '.join(wrong)}")


def checksum(parts: Sequence[Tensor]) -> Tensor:
    """Two numbers (int64) of flat bytes: their sum as integers, and a sum weighted by place, both modulo 2**64.

    Fletcher, An Arithmetic Checksum for Serial Transmissions (1982): the second finds what changed places.
    """
    device = parts[0].device
    total = torch.zeros(2, dtype=torch.int64, device=device)
    place = 0
    for part in parts:
        whole = len(part) // 8 * 8
        words = part[:whole] if part.data_ptr() % 8 == 0 else part[:whole].clone()
        for chunk in (*words.view(torch.int64).split(_CHUNK), part[whole:].to(torch.int64)):
            weights = torch.arange(place + 1, place + 1 + len(chunk), device=device)
            total += torch.stack([chunk.sum(), (chunk * weights).sum()])
            place += len(chunk)
    return total
