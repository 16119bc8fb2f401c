"""Buckets over torch.distributed: NCCL between GPUs, gloo between CPU processes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.sync.links.base import Way, Work

_SLOTS = 4
"""Two on their way out and two on their way in."""


class GroupLink:
    """Process numbers are ranks of `group`. Its slots together take at most `extra_bytes` on `device`."""

    straight = True

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None, extra_bytes: int):
        self._device, self._group = device, group
        self.bucket_bytes = extra_bytes // _SLOTS
        self._buffers: dict[tuple[Way, int], Tensor] = {}

    @property
    def held_bytes(self) -> int:
        """Bytes that the slots take now."""
        return sum(len(one) for one in self._buffers.values())

    def buffer(self, way: Way, slot: int, peer: int, need: int) -> Tensor:
        """See :class:`~stretto.sync.links.base.Link`. A slot is as large as the largest bucket so far."""
        held = self._buffers.get((way, slot))
        if held is None or len(held) < need:
            held = self._buffers[way, slot] = torch.empty(need, dtype=torch.uint8, device=self._device)
        return held

    def start(
        self, slot: int, out: tuple[int, Sequence[Tensor]] | None, into: tuple[int, Sequence[Tensor]] | None
    ) -> list[Work]:
        """See :class:`~stretto.sync.links.base.Link`."""
        operations = []
        for way, kind in ((out, dist.isend), (into, dist.irecv)):
            if way is not None:
                peer, messages = way
                operations += [dist.P2POp(kind, one, self._peer(peer), self._group) for one in messages]
        return list(dist.batch_isend_irecv(operations)) if operations else []

    def release(self, slot: int, peer: int) -> None:
        """Nothing to do: the slot is this process's own."""

    def settle(self) -> None:
        """Nothing to do, as with `release`."""

    def close(self) -> None:
        """Nothing to do: the group is its maker's."""

    def _peer(self, process: int) -> int:
        return process if self._group is None else dist.get_global_rank(self._group, process)
