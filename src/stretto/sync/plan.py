"""A plan: the intersection of two layouts. Which box goes from which view of which rank to which view of which rank."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from stretto.sync import senders
from stretto.sync.boxes import divided, meeting, members
from stretto.sync.coverage import check_atoms, check_filled, check_source
from stretto.sync.layout import ITEM_BYTES, Ints, Layout

_PIECE_BYTES = 64 * 2**20
"""Larger boxes are divided, so that replicas can share the sending and buckets can be small."""


class Boxes(NamedTuple):
    """The distinct boxes of the source, and which of its shards are each of them."""

    atom: Ints
    start: Ints
    size: Ints
    of_shard: Ints


class Pieces(NamedTuple):
    """One row a box that goes from a source box into a target shard."""

    atom: Ints
    start: Ints
    """[pieces, factors]: first index of each factor, in the checkpoint's coordinates."""
    size: Ints
    box: Ints
    target: Ints
    """Index into the target's shards."""
    bytes: Ints
    """In the target's dtype, which is what travels."""


class Sends(NamedTuple):
    """One row a piece and rank that receives it."""

    piece: Ints
    source: Ints
    """Index into the source's shards."""
    source_rank: Ints
    target_rank: Ints


@dataclass(frozen=True)
class Plan:
    """How `source` fills `target`. `source_at` and `target_at` are the processes of their ranks.

    A target rank that lives on a process which holds a box takes it there: nothing travels.
    """

    source: Layout
    target: Layout
    source_at: Ints
    target_at: Ints
    boxes: Boxes
    pieces: Pieces
    sends: Sends

    @classmethod
    def of(
        cls,
        source: Layout,
        target: Layout,
        target_at: Sequence[int] | None = None,
        source_at: Sequence[int] | None = None,
    ) -> Plan:
        """Make the plan. Source rank r is process r unless `source_at` says otherwise.

        Without `target_at` every target rank is a process of its own, behind those of the source.

        Raises ValueError, with the tensors and their nearest candidates, when an element of the target would be left
        unwritten or be written twice, or when one of the source is read by nobody.
        """
        assert source.atoms.same(target.atoms), "two layouts of one map"
        check_atoms(source, target)
        boxes = _boxes(source)
        check_source(source, boxes.atom, boxes.start, boxes.size)
        pieces = _intersect(boxes, target)
        check_filled(source, target, pieces.target, pieces.size)
        begin = np.arange(source.ranks) if source_at is None else np.asarray(source_at)
        end = np.arange(target.ranks) + begin.max() + 1 if target_at is None else np.asarray(target_at)
        return cls(source, target, begin, end, boxes, pieces, _send(source, target, boxes, pieces, begin, end))

    def only(self, names: Collection[str]) -> Plan:
        """The part of the plan that fills the target's tensors of these names (of numbered tensors, their patterns)."""
        wanted = np.array([tensor.name in names for tensor in self.target.tensors])
        keep = wanted[self.target.shards.tensor[self.pieces.target[self.sends.piece]]]
        return replace(self, sends=Sends(*(column[keep] for column in self.sends)))

    @cached_property
    def local(self) -> np.ndarray:
        """For each send, whether it stays inside a process."""
        return self.receiver == self.sender

    @cached_property
    def sender(self) -> Ints:
        """Process that each send leaves."""
        return self.source_at[self.sends.source_rank]

    @cached_property
    def receiver(self) -> Ints:
        """Process that each send comes to."""
        return self.target_at[self.sends.target_rank]

    @cached_property
    def send_bytes(self) -> Ints:
        """Bytes of each send, in the target's dtype."""
        return self.pieces.bytes[self.sends.piece]

    @property
    def process_count(self) -> int:
        """Processes that take part, numbered from 0."""
        return int(max(self.source_at.max(initial=0), self.target_at.max(initial=0)) + 1)

    @property
    def moved_bytes(self) -> int:
        """Bytes that go from one process to another."""
        return int(self.send_bytes[~self.local].sum())

    def link_bytes(self) -> dict[tuple[int, int], int]:
        """Bytes from each process to each other one."""
        away = ~self.local
        key = self.sender[away] * self.process_count + self.receiver[away]
        links, place = np.unique(key, return_inverse=True)
        total = np.bincount(place, weights=self.send_bytes[away], minlength=len(links))
        return {divmod(int(link), self.process_count): int(count) for link, count in zip(links, total, strict=True)}

    def sent_bytes(self) -> Ints:
        """Bytes that each process sends."""
        return self._per_process(self.sender)

    def received_bytes(self) -> Ints:
        """Bytes that each process receives."""
        return self._per_process(self.receiver)

    def _per_process(self, process: Ints) -> Ints:
        away = ~self.local
        return np.bincount(process[away], weights=self.send_bytes[away], minlength=self.process_count).astype(np.int64)

    def least_seconds(self, bytes_per_second: float) -> float:
        """No transfer is faster than this when each process sends and receives at most so many bytes a second."""
        return float(max(self.sent_bytes().max(initial=0), self.received_bytes().max(initial=0)) / bytes_per_second)

    @cached_property
    def sender_bound(self) -> float:
        """A lower bound on the bytes of the busiest sender, over all ways to share the sending among replicas."""
        away = ~self.local
        box = self.pieces.box[self.sends.piece[away]]
        return senders.bound(self.source, self.boxes.of_shard, box, self.send_bytes[away])

    @cached_property
    def digest(self) -> str:
        """A hash of everything that ranks have to agree on."""
        total = hashlib.blake2b(digest_size=16)
        for layout in (self.source, self.target):
            total.update(repr((layout.title, layout.ranks, layout.tensors)).encode())
        for array in (
            *self.pieces,
            *self.sends,
            self.source_at,
            self.target_at,
            *self.source.shards,
            *self.target.shards,
        ):
            total.update(np.ascontiguousarray(array).tobytes())
        return total.hexdigest()

    def summary(self) -> dict[str, object]:
        """The plan's totals, as data."""
        sent, received = self.sent_bytes(), self.received_bytes()
        return {
            "source": self.source.title,
            "target": self.target.title,
            "source_ranks": self.source.ranks,
            "target_ranks": self.target.ranks,
            "tensors": len(self.source.atoms.names),
            "pieces": len(self.pieces.atom),
            "sends": len(self.sends.piece),
            "target_bytes": int(self.send_bytes.sum()),
            "moved_bytes": self.moved_bytes,
            "busiest_sender_bytes": int(sent.max(initial=0)),
            "busiest_sender_bound_bytes": int(self.sender_bound),
            "busiest_receiver_bytes": int(received.max(initial=0)),
            "links": len(self.link_bytes()),
            "digest": self.digest,
        }


def _boxes(source: Layout) -> Boxes:
    shards = source.shards
    rows = np.concatenate([shards.atom[:, None], shards.start, shards.size], axis=1)
    distinct, of_shard = np.unique(rows, axis=0, return_inverse=True)
    width = source.atoms.width
    return Boxes(distinct[:, 0], distinct[:, 1 : 1 + width], distinct[:, 1 + width :], of_shard.reshape(-1))


def _intersect(boxes: Boxes, target: Layout) -> Pieces:
    """Every non-empty intersection of a source box with a target shard, atom by atom; equal layers once."""
    shards, atoms = target.shards, len(target.atoms.names)
    order = np.argsort(shards.atom, kind="stable")
    known: dict[tuple[bytes, ...], tuple[Ints, Ints]] = {}
    found: list[tuple[Ints, Ints]] = []
    for (a, b), (c, d) in zip(_runs(boxes.atom, atoms), _runs(shards.atom[order], atoms), strict=True):
        rows = order[c:d]
        arrays = boxes.start[a:b], boxes.size[a:b], shards.start[rows], shards.size[rows]
        key = tuple(array.tobytes() for array in arrays)
        if key not in known:
            known[key] = meeting(*arrays)
        box, place = known[key]
        found.append((box + a, rows[place]))
    box, into = (np.concatenate([one[k] for one in found]) for k in range(2))
    start = np.maximum(boxes.start[box], shards.start[into])
    stop = np.minimum((boxes.start + boxes.size)[box], (shards.start + shards.size)[into])
    return _pieces(boxes, target, box, into, start, stop - start)


def _pieces(boxes: Boxes, target: Layout, box: Ints, into: Ints, start: Ints, size: Ints) -> Pieces:
    """Large ones are cut."""
    item = np.array([ITEM_BYTES[tensor.dtype] for tensor in target.tensors], dtype=np.int64)[target.shards.tensor[into]]
    row, start, size = divided(start, size, _PIECE_BYTES // item)
    return Pieces(boxes.atom[box[row]], start, size, box[row], into[row], size.prod(axis=1) * item[row])


def _runs(sorted_atoms: Ints, count: int) -> list[tuple[int, int]]:
    edges = np.searchsorted(sorted_atoms, np.arange(count + 1))
    return [(int(a), int(b)) for a, b in pairwise(edges)]


def _send(source: Layout, target: Layout, boxes: Boxes, pieces: Pieces, begin: Ints, end: Ints) -> Sends:
    """Every receiver of every piece, and who sends it: the receiver's own process, or replicas in equal shares."""
    piece, target_rank = members(target, target.shards.holders[pieces.target])
    source_rank, shard = senders.choose(
        source, boxes.of_shard, pieces.box[piece], pieces.bytes[piece], begin, end[target_rank]
    )
    return Sends(piece, shard, source_rank, target_rank)
