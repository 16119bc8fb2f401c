"""What one process does of a plan: which views of its tensors it packs, sends, receives and unpacks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np

from stretto.sync.boxes import divided, repeated
from stretto.sync.layout import ITEM_BYTES, Ints, Layout
from stretto.sync.plan import Plan

_ALIGN = 16
"""Bytes: every piece in a bucket begins at a multiple, so that it can be seen as a tensor of any dtype."""

_ALONE = 8 * 2**20
"""Bytes from which a piece is a message of its own, so that a side which holds it contiguously need not copy it.

Starting a message costs the host as much as copying a few MiB costs an H200.
"""

WHOLE = 2**62
"""Bytes that no piece has."""


@dataclass(frozen=True)
class End:
    """A view of one tensor of one rank."""

    rank: int
    tensor: str
    offset: int
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Move:
    """One piece between two views; `shift` is what the target's values are more than the source's."""

    source: End
    target: End
    size: tuple[int, ...]
    dtype: str
    """The target's, in which it travels."""
    shift: float
    bytes: int


@dataclass(frozen=True)
class Bucket:
    """Pieces that travel at the same time, and the offset of each in a flat buffer of `bytes`.

    The first `together` bytes are one message; each piece behind them is one of its own.
    """

    moves: tuple[Move, ...]
    offsets: tuple[int, ...]
    bytes: int
    together: int

    @property
    def joined(self) -> int:
        """How many pieces, the first ones, are in the common message."""
        return sum(offset < self.together for offset in self.offsets)


@dataclass(frozen=True)
class Program:
    """One process's part: moves inside it, then for each other process the buckets to it and from it."""

    local: tuple[Move, ...]
    outgoing: Mapping[int, tuple[Bucket, ...]]
    incoming: Mapping[int, tuple[Bucket, ...]]

    @cached_property
    def bytes(self) -> int:
        """Bytes that this process writes."""
        return sum(move.bytes for move in self.written())

    def read(self) -> Iterator[Move]:
        """Every move whose source is here."""
        yield from self.local
        yield from (move for buckets in self.outgoing.values() for bucket in buckets for move in bucket.moves)

    def written(self) -> Iterator[Move]:
        """Every move whose target is here."""
        yield from self.local
        yield from (move for buckets in self.incoming.values() for bucket in buckets for move in bucket.moves)


def program(plan: Plan, process: int, bucket_bytes: int) -> Program:
    """The part of `process`. A bucket holds at most `bucket_bytes`, which pieces that travel are cut to."""
    sender, receiver = plan.sender, plan.receiver
    mine = np.nonzero((sender == process) | (receiver == process))[0]
    limit = max(_ALIGN, bucket_bytes // _ALIGN * _ALIGN)
    moves = _moves(plan, mine, np.where(plan.local[mine], WHOLE, limit))
    local: list[Move] = []
    out: dict[int, list[Move]] = {}
    into: dict[int, list[Move]] = {}
    for send, move in moves:
        if sender[send] == receiver[send]:
            local.append(move)
        elif sender[send] == process:
            out.setdefault(int(receiver[send]), []).append(move)
        else:
            into.setdefault(int(sender[send]), []).append(move)
    return Program(tuple(local), _bucketed(out, limit), _bucketed(into, limit))


def moves_to(plan: Plan, rank: int) -> list[Move]:
    """All moves into one rank of the target, wherever they come from."""
    sends = np.nonzero(plan.sends.target_rank == rank)[0]
    return [move for _, move in _moves(plan, sends, np.full(len(sends), WHOLE))]


def _bucketed(links: Mapping[int, Sequence[Move]], limit: int) -> dict[int, tuple[Bucket, ...]]:
    return {other: tuple(_pack(moves, limit)) for other, moves in links.items()}


def _pack(moves: Sequence[Move], limit: int) -> Iterator[Bucket]:
    taken: list[Move] = []
    used = 0
    for move in moves:
        if taken and used + _room(move) > limit:
            yield _bucket(taken)
            taken, used = [], 0
        taken.append(move)
        used += _room(move)
    if taken:
        yield _bucket(taken)


def _room(move: Move) -> int:
    return -(-move.bytes // _ALIGN) * _ALIGN


def _bucket(moves: Sequence[Move]) -> Bucket:
    small = [move for move in moves if move.bytes < _ALONE]
    ordered = (*small, *(move for move in moves if move.bytes >= _ALONE))
    ends = list(accumulate(map(_room, ordered)))
    return Bucket(ordered, (0, *ends[:-1]), ends[-1], sum(map(_room, small)))


def _moves(plan: Plan, sends: Ints, limit: Ints) -> Iterator[tuple[int, Move]]:
    """The moves of some sends in order, of at most `limit` bytes; one over several numbered tensors becomes many."""
    piece = plan.sends.piece[sends]
    source_shard, target_shard = plan.sends.source[sends], plan.pieces.target[piece]
    spread = (plan.source.shards.step[source_shard] | plan.target.shards.step[target_shard]).astype(bool)
    start, size = plan.pieces.start[piece], plan.pieces.size[piece]
    row, number = repeated(np.where(spread, size[:, 0], 1))
    start, size = start[row], size[row]
    start[:, 0] += number
    size[:, 0] = np.where(spread[row], 1, size[:, 0])
    items = np.array([ITEM_BYTES[tensor.dtype] for tensor in plan.target.tensors])[
        plan.target.shards.tensor[target_shard]
    ]
    part, start, size = divided(start, size, (limit // items)[row])
    row = row[part]
    ends = [
        _ends(layout, rank[sends][row], shard[row], start)
        for layout, rank, shard in (
            (plan.source, plan.sends.source_rank, source_shard),
            (plan.target, plan.sends.target_rank, target_shard),
        )
    ]
    shift = plan.target.shards.add[target_shard][row] - plan.source.shards.add[source_shard][row]
    dtypes = [tensor.dtype for tensor in plan.target.tensors]
    for k, (from_end, to_end) in enumerate(zip(*ends, strict=True)):
        dtype = dtypes[plan.target.shards.tensor[target_shard[row[k]]]]
        yield int(sends[row[k]]), _merged(from_end, to_end, size[k].tolist(), dtype, float(shift[k]))


def _merged(source: End, target: End, size: Sequence[int], dtype: str, shift: float) -> Move:
    """A move with as few axes as it can have: what lies one after another on both sides is one axis."""
    axes: list[tuple[int, int, int]] = []
    for count, ours, theirs in zip(size, source.stride, target.stride, strict=True):
        if count == 1:
            continue
        if axes and axes[-1][1:] == (ours * count, theirs * count):
            axes[-1] = (axes[-1][0] * count, ours, theirs)
        else:
            axes.append((count, ours, theirs))
    sizes, ours, theirs = zip(*axes, strict=True) if axes else ((), (), ())
    return Move(
        replace(source, stride=ours),
        replace(target, stride=theirs),
        sizes,
        dtype,
        shift,
        math.prod(sizes) * ITEM_BYTES[dtype],
    )


def _ends(layout: Layout, rank: Ints, shard: Ints, start: Ints) -> Iterator[End]:
    """Where the element `start` of each shard lies."""
    shards = layout.shards
    inside = start - shards.start[shard]
    offset = shards.offset[shard] + (inside * shards.stride[shard]).sum(axis=1)
    number = shards.first[shard] + np.where(shards.step[shard] == 1, inside[:, 0], 0)
    strides = shards.stride[shard].tolist()
    for k in range(len(shard)):
        tensor = layout.tensors[shards.tensor[shard[k]]]
        yield End(int(rank[k]), tensor.numbered(int(number[k])), int(offset[k]), tuple(strides[k]))
