"""Executing a plan: local moves as copies, the rest through packed buckets, packing the next under the transfer of the last."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.sync.plan import Plan
from stretto.sync.program import Bucket, Program, program
from stretto.sync.views import Views, copy

EXTRA_BYTES = 512 * 2**20
"""Default bound on the memory that a transfer takes beside both sides' tensors."""

Tensors = Mapping[int, Mapping[str, Tensor]]
"""The local tensors of some ranks, by rank and by the layout's names."""


class Execution:
    """This process's part of a plan, ready to be run every step.

    `source` and `target` give the tensors of this process's ranks (an empty mapping where it has none). All processes of the plan make it and call `run` together; process numbers are ranks of `group`. Buckets
    lie on `device`, where the group communicates: two on their way out and two on their way in, so that a bucket is a
    quarter of `extra_bytes`. Raises RuntimeError when the processes have made different plans.
    """

    def __init__(
        self,
        plan: Plan,
        process: int,
        source: Callable[[], Tensors],
        target: Callable[[], Tensors],
        *,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        extra_bytes: int = EXTRA_BYTES,
    ):
        self._process, self._count, self._group, self._device = process, plan.process_count, group, device
        self._source, self._target = source, target
        self._program = program(plan, process, extra_bytes // 4)
        self._from = Views(f"the source {plan.source.title}", [(m, m.source) for m in self._program.read()])
        self._into = Views(f"the target {plan.target.title}", [(m, m.target) for m in self._program.written()])
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._written: set[int] = set()
        if plan.moved_bytes:
            _agree(plan.digest, group)

    @property
    def program(self) -> Program:
        """What this process does."""
        return self._program

    @torch.no_grad()
    def run(self) -> int:
        """Fill the target's tensors; returns the bytes that this process wrote.

        Raises ValueError when a tensor is missing on either side or has another size.
        """
        self._written.clear()
        self._from.bind(self._source())
        self._into.bind(self._target())
        local = self._program.local
        copy([self._into[m] for m in local], [self._from[m] for m in local], [m.shift for m in local])
        self._written.update(map(id, local))
        for step in range(1, self._count):
            self._exchange((self._process + step) % self._count, (self._process - step) % self._count)
        self._into.write_back()
        return self._program.bytes

    def verify(self) -> None:
        """Raise RuntimeError naming the first tensor that the last run did not write whole."""
        for move in self._program.written():
            if id(move) not in self._written:
                raise RuntimeError(f"{move.target.tensor} was not filled by this publication")

    def _exchange(self, to: int, back: int) -> None:
        """Send the buckets for `to` and receive those of `back`: one link of each kind at a time bounds the memory."""
        out, into = self._program.outgoing.get(to, ()), self._program.incoming.get(back, ())
        works = self._issue(0, out, into, to, back)
        for index in range(max(len(out), len(into))):
            # Packed and sent before the last one is unpacked, so that the link never waits for a copy.
            following = self._issue(index + 1, out, into, to, back)
            for work in works:
                work.wait()
            works = following
            if index < len(into):
                self._unpack(into[index], self._buffer("in", index, into))

    def _issue(self, index: int, out: Sequence[Bucket], into: Sequence[Bucket], to: int, back: int) -> list[Any]:
        """Pack bucket `index` and start its transfer, and that of the one that comes in."""
        operations = []
        if index < len(out):
            buffer = self._buffer("out", index, out)
            moves = out[index].moves
            copy(list(_slots(out[index], buffer)), [self._from[m] for m in moves], [m.shift for m in moves])
            operations.append(dist.P2POp(dist.isend, buffer[: out[index].bytes], self._peer(to), self._group))
        if index < len(into):
            buffer = self._buffer("in", index, into)
            operations.append(dist.P2POp(dist.irecv, buffer[: into[index].bytes], self._peer(back), self._group))
        return dist.batch_isend_irecv(operations) if operations else []

    def _unpack(self, bucket: Bucket, buffer: Tensor) -> None:
        copy([self._into[m] for m in bucket.moves], list(_slots(bucket, buffer)), [0.0] * len(bucket.moves))
        self._written.update(map(id, bucket.moves))

    def _peer(self, process: int) -> int:
        return process if self._group is None else dist.get_global_rank(self._group, process)

    def _buffer(self, way: str, index: int, buckets: Sequence[Bucket]) -> Tensor:
        """One of the two flat buffers of a direction, as large as the largest bucket so far."""
        need = max(bucket.bytes for bucket in buckets)
        buffer = self._buffers.get((way, index % 2))
        if buffer is None or len(buffer) < need:
            buffer = self._buffers[way, index % 2] = torch.empty(need, dtype=torch.uint8, device=self._device)
        return buffer


def _slots(bucket: Bucket, buffer: Tensor) -> Iterator[Tensor]:
    """Each move's place in a flat buffer, seen as a tensor of its shape and dtype."""
    for move, offset in zip(bucket.moves, bucket.offsets, strict=True):
        yield buffer[offset : offset + move.bytes].view(getattr(torch, move.dtype)).view(move.size)


def _agree(digest: str, group: dist.ProcessGroup | None) -> None:
    """Every process must have the same plan: else they would wait for buckets that nobody sends."""
    digests: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(digests, digest, group=group)
    others = [rank for rank, one in enumerate(digests) if one != digests[0]]
    if others:
        raise RuntimeError(
            f"ranks {others} have made another plan than rank 0 (digests {digests}); "
            "start every rank with the same configuration and version"
        )
