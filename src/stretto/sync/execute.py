"""Executing a plan: local moves as copies, the rest in packed buckets, one packed while the last one travels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.sync.checksum import TRAILER_BYTES, Checksums
from stretto.sync.freight import Freight, freight
from stretto.sync.links import GroupLink, Link, Work
from stretto.sync.links.base import Way
from stretto.sync.plan import Plan
from stretto.sync.program import WHOLE, Bucket, Move, Program, program
from stretto.sync.views import Copies, Views

EXTRA_BYTES = 512 * 2**20
"""Default bound on the memory that a transfer takes beside both sides' tensors."""

Tensors = Mapping[int, Mapping[str, Tensor]]
"""The local tensors of some ranks, by rank and by the layout's names."""


class Execution:
    """This process's part of a plan, ready to be run every step.

    `source` and `target` give the tensors of this process's ranks (an empty mapping where it has none). All processes
    of the plan make it and call `run` together. `link` carries what does not stay inside a process. With `checksums`,
    every bucket travels with one. Copies of tensors that are not contiguous take memory of their own.
    """

    def __init__(
        self,
        plan: Plan,
        process: int,
        source: Callable[[], Tensors],
        target: Callable[[], Tensors],
        *,
        link: Link | None = None,
        checksums: bool = False,
    ):
        assert link is not None or not plan.moved_bytes, "buckets need a link"
        self._process, self._count, self._link = process, plan.process_count, link
        self._source, self._target = source, target
        trailer = TRAILER_BYTES if checksums else 0
        self._program = program(plan, process, link.bucket_bytes - trailer if link else WHOLE)
        self._from = Views("source", plan.source, [(m, m.source) for m in self._program.read()])
        self._into = Views("target", plan.target, [(m, m.target) for m in self._program.written()])
        self._freight: dict[int, tuple[tuple[int, int], Freight]] = {}
        self._checks = Checksums() if checksums else None
        self._written: set[int] = set()
        self._local: tuple[tuple[int, int], list[Copies]] | None = None
        self._waiting: list[Copies] = []
        self.touched = False
        """Whether the last run may have written into the target."""

    @property
    def program(self) -> Program:
        """What this process does."""
        return self._program

    @torch.no_grad()
    def run(self) -> int:
        """Fill the target's tensors; returns the bytes that this process wrote.

        Raises ValueError when a tensor is missing on either side or is not what its layout says, and RuntimeError when
        another process fails or is not heard of within the link's timeout.
        """
        self._written.clear()
        self.touched = False
        self._from.bind(self._source())
        self._into.bind(self._target())
        self._waiting = list(reversed(self._local_copies()))
        for step in range(1, self._count):
            self._exchange(step)
        while self._waiting:
            self._copy_local()
        self._into.write_back()
        if self._link:
            self._link.settle()
        return self._program.bytes

    def verify(self) -> None:
        """Raise RuntimeError naming the first tensor that the last run did not write whole, or not as it was sent."""
        for move in self._program.written():
            if id(move) not in self._written:
                raise RuntimeError(f"{move.target.tensor} was not filled by this publication")
        if self._checks:
            self._checks.verify()

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
            self.touched = True
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
        rounds = self._rounds(step)
        if not rounds:
            return
        works: list[Work] = []
        for index in range(rounds + 1):
            try:
                # Packed and sent before the last one is unpacked, so that the link never waits for a copy.
                following = self._issue(index, out, into, to, back)
                self._copy_local()
                for work in works:
                    work.wait()
                works = following
                if 0 < index <= len(into):
                    self._unpack(index - 1, into, back)
            except RuntimeError as error:
                where = f"process {self._process}, bucket {min(index, rounds - 1)} of {rounds} (to {to}, from {back})"
                raise RuntimeError(f"{where}: {error}") from error

    def _issue(self, index: int, out: Sequence[Bucket], into: Sequence[Bucket], to: int, back: int) -> list[Work]:
        """Pack bucket `index` and start its transfer, and that of the one that comes in."""
        assert self._link is not None
        sent = received = None
        if index < len(out):
            load = self._load(index, out, self._from, "out", to)
            load.copies.run()
            if self._checks:
                self._checks.stamp(load)
            sent = to, load.messages
        if index < len(into):
            self.touched |= self._link.straight
            received = back, self._load(index, into, self._into, "in", back).messages
        return self._link.start(index % 2, sent, received) if sent or received else []

    def _unpack(self, index: int, into: Sequence[Bucket], back: int) -> None:
        assert self._link is not None
        load = self._load(index, into, self._into, "in", back)
        if self._checks:
            names = f"{into[index].moves[0].target.tensor} to {into[index].moves[-1].target.tensor}"
            self._checks.expect(load, f"bucket {index} from process {back} ({names})")
        self.touched = True
        load.copies.run()
        self._link.release(index % 2, back)
        self._written.update(map(id, into[index].moves))

    def _load(self, index: int, buckets: Sequence[Bucket], views: Views, way: Way, peer: int) -> Freight:
        """The freight of a bucket, made once and made anew when a tensor or the slot has moved."""
        assert self._link is not None
        bucket, trailer = buckets[index], TRAILER_BYTES if self._checks else 0
        need = max(bucket.bytes for bucket in buckets) + trailer
        slot = self._link.buffer(way, index % 2, peer, need)
        known = self._freight.get(id(bucket))
        key = (views.generation, slot.data_ptr())
        if known is None or known[0] != key:
            made = freight(bucket, slot, views, way, straight=self._link.straight, trailer=trailer)
            known = self._freight[id(bucket)] = (key, made)
        return known[1]


def over_group(
    plan: Plan,
    *,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    extra_bytes: int = EXTRA_BYTES,
) -> GroupLink | None:
    """The link of a plan between the processes of a torch.distributed group; None when nothing leaves a process.

    All processes of the group call, in which process numbers are ranks. Raises ValueError when it is too small, and
    RuntimeError when its processes have made different plans: else they would wait for what nobody sends.
    """
    if not plan.moved_bytes:
        return None
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
    return GroupLink(device, group, extra_bytes)
