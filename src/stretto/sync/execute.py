"""Executing a plan: local moves as copies, the rest in packed buckets, one packed while the last one travels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.sync.freight import Freight, freight
from stretto.sync.plan import Plan
from stretto.sync.program import Bucket, Move, Program, program
from stretto.sync.views import Copies, Views

EXTRA_BYTES = 512 * 2**20
"""Default bound on the memory that a transfer takes beside both sides' tensors."""

Tensors = Mapping[int, Mapping[str, Tensor]]
"""The local tensors of some ranks, by rank and by the layout's names."""


class Execution:
    """This process's part of a plan, ready to be run every step.

    `source` and `target` give the tensors of this process's ranks (an empty mapping where it has none). All processes
    of the group make it and call `run` together; process numbers are ranks of `group`. Buckets lie on `device`, where
    it communicates: two on their way out and two on their way in, so that a bucket is a quarter of `extra_bytes`.
    Copies of tensors that are not contiguous come on top. Raises ValueError when the group is too small, and
    RuntimeError when its processes have made different plans.
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
        self._from = Views("source", plan.source, [(m, m.source) for m in self._program.read()])
        self._into = Views("target", plan.target, [(m, m.target) for m in self._program.written()])
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._freight: dict[int, tuple[tuple[int, int], Freight]] = {}
        self._written: set[int] = set()
        self._local: tuple[tuple[int, int], list[Copies]] | None = None
        self._waiting: list[Copies] = []
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
        self._written.clear()
        self._from.bind(self._source())
        self._into.bind(self._target())
        self._waiting = list(reversed(self._local_copies()))
        for step in range(1, self._count):
            self._exchange(step)
        while self._waiting:
            self._copy_local()
        self._into.write_back()
        return self._program.bytes

    def verify(self) -> None:
        """Raise RuntimeError naming the first tensor that the last run did not write whole."""
        for move in self._program.written():
            if id(move) not in self._written:
                raise RuntimeError(f"{move.target.tensor} was not filled by this publication")

    def _local_copies(self) -> list[Copies]:
        """The moves inside this process in parts of equal bytes, one a bucket: they never hold up a transfer."""
        key = (self._from.generation, self._into.generation)
        if self._local is None or self._local[0] != key:
            rounds = max(1, sum(self._rounds(step) for step in range(1, self._count)))
            total = sum(move.bytes for move in self._program.local)
            parts: list[list[Move]] = [[] for _ in range(rounds)]
            for move, end in zip(self._program.local, accumulate(m.bytes for m in self._program.local), strict=True):
                parts[min(rounds - 1, end * rounds // max(1, total))].append(move)
            self._local = key, [self._copies(part) for part in parts if part]
        return self._local[1]

    def _copies(self, moves: Sequence[Move]) -> Copies:
        return Copies([self._into[m] for m in moves], [self._from[m] for m in moves], [m.shift for m in moves])

    def _copy_local(self) -> None:
        if self._waiting:
            self._waiting.pop().run()
        if not self._waiting:
            self._written.update(map(id, self._program.local))

    def _links(self, step: int) -> tuple[Sequence[Bucket], Sequence[Bucket], int, int]:
        """What goes to the process `step` places on, what comes from the one as far back, and who they are."""
        to, back = (self._process + step) % self._count, (self._process - step) % self._count
        return self._program.outgoing.get(to, ()), self._program.incoming.get(back, ()), to, back

    def _rounds(self, step: int) -> int:
        out, into, *_ = self._links(step)
        return max(len(out), len(into))

    def _exchange(self, step: int) -> None:
        """Send to one process and receive from one: a link of each kind at a time bounds the memory."""
        out, into, to, back = self._links(step)
        works = self._issue(0, out, into, to, back)
        for index in range(max(len(out), len(into))):
            # Packed and sent before the last one is unpacked, so that the link never waits for a copy.
            following = self._issue(index + 1, out, into, to, back)
            self._copy_local()
            for work in works:
                work.wait()
            works = following
            if index < len(into):
                self._load(index, into, self._into, outgoing=False).copies.run()
                self._written.update(map(id, into[index].moves))

    def _issue(self, index: int, out: Sequence[Bucket], into: Sequence[Bucket], to: int, back: int) -> list[Any]:
        """Pack bucket `index` and start its transfer, and that of the one that comes in."""
        operations = []
        if index < len(out):
            load = self._load(index, out, self._from, outgoing=True)
            load.copies.run()
            operations += [dist.P2POp(dist.isend, one, self._peer(to), self._group) for one in load.messages]
        if index < len(into):
            load = self._load(index, into, self._into, outgoing=False)
            operations += [dist.P2POp(dist.irecv, one, self._peer(back), self._group) for one in load.messages]
        return dist.batch_isend_irecv(operations) if operations else []

    def _load(self, index: int, buckets: Sequence[Bucket], views: Views, *, outgoing: bool) -> Freight:
        """The freight of a bucket, made once and made anew when a tensor or the buffer has moved."""
        bucket, buffer = buckets[index], self._buffer("out" if outgoing else "in", index, buckets)
        key = (views.generation, buffer.data_ptr())
        known = self._freight.get(id(bucket))
        if known is None or known[0] != key:
            known = self._freight[id(bucket)] = (key, freight(bucket, buffer, views, outgoing=outgoing))
        return known[1]

    def _peer(self, process: int) -> int:
        return process if self._group is None else dist.get_global_rank(self._group, process)

    def _buffer(self, way: str, index: int, buckets: Sequence[Bucket]) -> Tensor:
        """One of the two flat buffers of a direction, as large as the largest bucket so far."""
        need = max(bucket.bytes for bucket in buckets)
        buffer = self._buffers.get((way, index % 2))
        if buffer is None or len(buffer) < need:
            buffer = self._buffers[way, index % 2] = torch.empty(need, dtype=torch.uint8, device=self._device)
        return buffer


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
