"""Executing a plan: local moves as copies, the rest in packed buckets, one packed while the last one travels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.sync.plan import Plan
from stretto.sync.program import Bucket, Program, program
from stretto.sync.views import Views, copy

EXTRA_BYTES = 512 * 2**20
"""Default bound on the memory that a transfer takes beside both sides' tensors."""

_SEAL_BYTES = 8

Tensors = Mapping[int, Mapping[str, Tensor]]
"""The local tensors of some ranks, by rank and by the layout's names."""


class Execution:
    """This process's part of a plan, ready to be run every step.

    `source` and `target` give the tensors of this process's ranks (an empty mapping where it has none). All processes
    of the group make it and call `run` together; process numbers are ranks of `group`. Buckets lie on `device`, where
    it communicates: two on their way out and two on their way in, so that a bucket is a quarter of `extra_bytes`.
    Behind each goes its seal, by which the receiver knows that it is whole and of this run. Copies of tensors that are
    not contiguous come on top. Raises ValueError when the group is too small, and RuntimeError when its processes have
    made different plans.
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
        self._program = program(plan, process, extra_bytes // 4 - _SEAL_BYTES)
        self._from = Views("source", plan.source, [(m, m.source) for m in self._program.read()])
        self._into = Views("target", plan.target, [(m, m.target) for m in self._program.written()])
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._packed: dict[int, tuple[Tensor, list[Tensor]]] = {}
        self._written: set[int] = set()
        self._unsealed: list[tuple[Bucket, Tensor]] = []
        self._runs = 0
        if plan.moved_bytes:
            _agree(plan, extra_bytes, group)

    @property
    def program(self) -> Program:
        """What this process does."""
        return self._program

    @torch.no_grad()
    def run(self) -> int:
        """Fill the target's tensors; returns the bytes that this process wrote.

        Raises ValueError when a tensor is missing on either side or is not what its layout says, and RuntimeError when
        another process fails or is not heard of within the group's timeout.
        """
        self._runs += 1
        self._written.clear()
        self._unsealed.clear()
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
        """Raise RuntimeError naming the first tensor that the last run did not write whole and as it was sent."""
        for move in self._program.written():
            if id(move) not in self._written:
                raise RuntimeError(f"{move.target.tensor} was not filled by this publication")
        if self._unsealed:
            wrong = torch.stack([left for _, left in self._unsealed]).nonzero().flatten().tolist()
            if wrong:
                tensors = list(dict.fromkeys(m.target.tensor for m in self._unsealed[wrong[0]][0].moves))
                raise RuntimeError(
                    f"{len(wrong)} of {len(self._unsealed)} buckets of this publication did not arrive as they were "
                    f"sent; the first has {tensors[0]} and {len(tensors) - 1} other tensors"
                )

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
            copy(self._slots(out[index], buffer), [self._from[m] for m in moves], [m.shift for m in moves])
            words = _words(out[index], buffer)
            words[-1] = words[:-1].sum() + self._runs
            operations.append(dist.P2POp(dist.isend, _sealed(out[index], buffer), self._peer(to), self._group))
        if index < len(into):
            buffer = self._buffer("in", index, into)
            operations.append(dist.P2POp(dist.irecv, _sealed(into[index], buffer), self._peer(back), self._group))
        return dist.batch_isend_irecv(operations) if operations else []

    def _unpack(self, bucket: Bucket, buffer: Tensor) -> None:
        words = _words(bucket, buffer)
        self._unsealed.append((bucket, words[:-1].sum() + self._runs - words[-1]))
        copy([self._into[m] for m in bucket.moves], self._slots(bucket, buffer), [0.0] * len(bucket.moves))
        self._written.update(map(id, bucket.moves))

    def _slots(self, bucket: Bucket, buffer: Tensor) -> list[Tensor]:
        """Each move's place in a flat buffer, seen as a tensor of its shape and dtype."""
        known = self._packed.get(id(bucket))
        if known is None or known[0] is not buffer:
            slots = [
                buffer[offset : offset + move.bytes].view(getattr(torch, move.dtype)).view(move.size)
                for move, offset in zip(bucket.moves, bucket.offsets, strict=True)
            ]
            known = self._packed[id(bucket)] = (buffer, slots)
        return known[1]

    def _peer(self, process: int) -> int:
        return process if self._group is None else dist.get_global_rank(self._group, process)

    def _buffer(self, way: str, index: int, buckets: Sequence[Bucket]) -> Tensor:
        """One of the two flat buffers of a direction, as large as the largest bucket so far."""
        need = max(bucket.bytes for bucket in buckets) + _SEAL_BYTES
        buffer = self._buffers.get((way, index % 2))
        if buffer is None or len(buffer) < need:
            buffer = self._buffers[way, index % 2] = torch.empty(need, dtype=torch.uint8, device=self._device)
        return buffer


def _sealed(bucket: Bucket, buffer: Tensor) -> Tensor:
    """What travels of a buffer: the bucket and its seal."""
    return buffer[: bucket.bytes + _SEAL_BYTES]


def _words(bucket: Bucket, buffer: Tensor) -> Tensor:
    """The same as integers, of which the last is the seal: the sum of the others and the number of the run."""
    return _sealed(bucket, buffer).view(torch.int64)


def _agree(plan: Plan, extra_bytes: int, group: dist.ProcessGroup | None) -> None:
    """Every process must have the same plan and buckets: else they would wait for what nobody sends."""
    if plan.process_count > dist.get_world_size(group):
        raise ValueError(
            f"the plan is for {plan.process_count} processes and the group has {dist.get_world_size(group)}"
        )
    mine = f"{plan.digest} with {extra_bytes} extra bytes"
    all_of_them: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(all_of_them, mine, group=group)
    others = [rank for rank, one in enumerate(all_of_them) if one != all_of_them[0]]
    if others:
        raise RuntimeError(
            f"ranks {others} have made another plan than rank 0 (digests {all_of_them}); "
            "start every rank with the same configuration and version"
        )
