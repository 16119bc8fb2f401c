"""Ways in which a weight map can be wrong without contradicting itself, as changes of the checkpoint that undo them.

A map that swaps gate and up on their way in swaps them back on the way out: every round trip is bitwise, and only the
model's outputs are wrong. Fed a checkpoint in which the two are swapped, that trainer is right, which names the row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from stretto.models.language import Held, Piece, Row, WeightMap
from stretto.sync.fill import Read
from stretto.sync.layout import at_layer

Change = Callable[[Read], dict[str, Tensor]]
"""Pieces that take the place of the checkpoint's, made from them."""

_ROTATED = re.compile(r"\.(q|k)_(proj|norm)\.(weight|bias)$")
_FEW = 64
"""Group counts that are tried."""


@dataclass(frozen=True)
class Hypothesis:
    """If `change` mends the trainer, the map has the mistake `kind` in the row of these parameters."""

    parameters: tuple[str, ...]
    kind: str
    change: Change


@dataclass(frozen=True)
class _Part:
    """A piece in all its layers, as tensors of the checkpoint: ``names[layer]`` has one name, or one an expert."""

    piece: Piece
    names: dict[int | None, list[str]]
    shape: tuple[int, ...]

    @property
    def flat(self) -> list[str]:
        """All names."""
        return [name for names in self.names.values() for name in names]


def hypotheses(weights: WeightMap, sides: Sequence[str], *, shards: int, stages: int) -> Iterator[Hypothesis]:
    """What is tried, likely and cheap things first.

    `sides` are the columns that the trainer has its tensors from, the first that a row has; `shards` and `stages` are
    how many ranks cut a tensor and the layers.
    """
    rows = [row for row in weights.rows if not row.tied and _held(row, sides)]
    parts = {id(row): [_part(weights, row, piece) for piece in row.pieces] for row in rows}
    norms = [part for row in rows for part in parts[id(row)] if _is_norm(part)]
    if norms:
        yield from _shifts("every norm", norms)
    yield from _all_layers([part for row in rows for part in parts[id(row)]], stages)
    yield from _experts(weights, [part for row in rows for part in parts[id(row)] if part.piece.spread], shards)
    for row in rows:
        for held, pieces in _held(row, sides):
            yield from _fused(weights, held, [_part(weights, row, piece) for piece in pieces], shards)
        for part in parts[id(row)]:
            yield from _single(weights, part, shards if row.cut else 1)
    rotated = [part for row in rows for part in parts[id(row)] if _ROTATED.search(part.piece.name)]
    yield from _rotary(weights, rotated)
    yield from _siblings(rows, parts)


def _held(row: Row, sides: Sequence[str]) -> list[tuple[Held, tuple[Piece, ...]]]:
    return next((row.tensors(side) for side in sides if side in row.held), [])


def _part(weights: WeightMap, row: Row, piece: Piece) -> _Part:
    count = weights.size(piece.spread) if piece.spread else None
    names = {}
    for layer in row.layers or (None,):
        name = at_layer(piece.name, layer)
        numbered = [name] if count is None else [name.replace(f"{{{piece.spread}}}", str(n)) for n in range(count)]
        names[layer] = numbered
    return _Part(piece, names, weights.shape(piece))


def _is_norm(part: _Part) -> bool:
    return len(part.shape) == 1 and "norm" in part.piece.name


def _each(parts: Sequence[_Part], how: Callable[[Tensor], Tensor]) -> Change:
    return lambda read: {name: how(read(name)) for part in parts for name in part.flat}


def _moved(pairs: Sequence[tuple[str, str]]) -> Change:
    """Each first name gets the value of the second."""
    return lambda read: {to: read(source) for to, source in pairs}


def _shifts(what: str, parts: Sequence[_Part]) -> Iterator[Hypothesis]:
    names = tuple(part.piece.name for part in parts)
    yield Hypothesis(names, f"+1 missing: {what} is centred at zero", _each(parts, lambda one: one + 1))
    yield Hypothesis(names, f"+1 too much: {what} is not centred at zero", _each(parts, lambda one: one - 1))


def _all_layers(parts: Sequence[_Part], stages: int) -> Iterator[Hypothesis]:
    """Layers as if they were numbered otherwise: all of them, for which every layer has to be of one kind."""
    layered = [part for part in parts if len(part.names) > 1 and None not in part.names]
    if not layered:
        return
    longest = max(len(part.names) for part in layered)
    whole = [part for part in layered if len(part.names) == longest]
    for turn in _turns(longest, longest // stages if stages > 1 else 1):
        pairs = [pair for part in whole for pair in _turned_layers(part, turn)]
        kind = f"wrong pipeline offset: layers off by {turn}" if stages > 1 else f"layers off by {turn}"
        yield Hypothesis(tuple(part.piece.name for part in whole), kind, _moved(pairs))


def _turns(count: int, shard: int) -> list[int]:
    return sorted({turn % count for turn in (1, -1, shard, -shard)} - {0}, key=lambda turn: min(turn, count - turn))


def _turned_layers(part: _Part, turn: int) -> list[tuple[str, str]]:
    rows = list(part.names.values())
    turned = rows[turn:] + rows[:turn]
    return [pair for row, other in zip(rows, turned, strict=True) for pair in zip(row, other, strict=True)]


def _fused(weights: WeightMap, held: Held, parts: Sequence[_Part], shards: int) -> Iterator[Hypothesis]:
    """Pieces that share a tensor: which is which, and how their rows alternate."""
    if len(parts) < 2 or len({part.shape[1:] for part in parts}) > 1:
        return
    for one, two in combinations(parts, 2):
        if one.shape == two.shape:
            pairs = [pair for a, b in zip(one.flat, two.flat, strict=True) for pair in ((a, b), (b, a))]
            yield Hypothesis((one.piece.name, two.piece.name), f"swapped within {held.name}", _moved(pairs))
    now = math.prod(weights.size(factor) for factor in held.per.split())
    common = math.gcd(*(part.shape[0] for part in parts))
    names = tuple(part.piece.name for part in parts)
    for count in [n for n in range(1, min(common, _FEW) + 1) if common % n == 0 and n != now]:
        # Cut over ranks, rows that do not alternate are one group a rank.
        for found in sorted({now, math.lcm(now, shards)} - {count}):
            if common % found == 0:
                kind = f"groups interleaved wrongly in {held.name}: {now} of them where there are {count}"
                yield Hypothesis(names, kind, _regrouped(parts, found, count))


def _regrouped(parts: Sequence[_Part], now: int, count: int) -> Change:
    """Pieces that, laid out in `now` groups, give what the true ones give in `count`."""

    def change(read: Read) -> dict[str, Tensor]:
        found = {}
        for names in zip(*(part.flat for part in parts), strict=True):
            pieces = [read(name) for name in names]
            fused = torch.cat(
                [chunk for group in zip(*(p.chunk(count) for p in pieces), strict=True) for chunk in group]
            )
            groups = [group.split([len(piece) // now for piece in pieces]) for group in fused.chunk(now)]
            found |= {name: torch.cat(own) for name, own in zip(names, zip(*groups, strict=True), strict=True)}
        return found

    return change


def _experts(weights: WeightMap, parts: Sequence[_Part], shards: int) -> Iterator[Hypothesis]:
    """Experts as if they were numbered otherwise, in all of these pieces."""
    counts = {weights.size(part.piece.spread) for part in parts if part.piece.spread}
    if len(counts) != 1:
        return
    count = counts.pop()
    for turn in _turns(count, count // shards if shards > 1 else 1):
        rows = [row for part in parts for row in part.names.values()]
        pairs = [pair for row in rows for pair in zip(row, row[turn:] + row[:turn], strict=True)]
        yield Hypothesis(tuple(part.piece.name for part in parts), f"experts off by {turn}", _moved(pairs))


def _single(weights: WeightMap, part: _Part, shards: int) -> Iterator[Hypothesis]:
    """One piece alone, in all its layers."""
    name = (part.piece.name,)
    if _is_norm(part):
        yield from _shifts(part.piece.name, [part])
    if len(part.shape) == 2 and part.shape[0] == part.shape[1]:
        yield Hypothesis(name, "transposed", _each([part], lambda one: one.T))
    if part.piece.name.endswith("bias"):
        yield Hypothesis(name, "dropped: the trainer does not use it", _each([part], torch.zeros_like))
    if part.piece.spread:
        yield from _experts(weights, [part], shards)
    if len(part.names) > 1:
        for turn in _turns(len(part.names), 1):
            yield Hypothesis(name, f"of the wrong layer, off by {turn}", _moved(_turned_layers(part, turn)))
    yield from _rows(weights, part, shards)


def _rows(weights: WeightMap, part: _Part, shards: int) -> Iterator[Hypothesis]:
    """The rows of a piece in another order: turned by a shard, or their factors nested the other way."""
    name = (part.piece.name,)
    for axis, size in enumerate(part.shape if shards > 1 else ()):
        if size % shards == 0:
            for turn in _turns(size, size // shards):
                said = "one" if turn in (1, size - 1) else "one shard"
                change = _each([part], lambda one, t=turn, a=axis: one.roll(-t, a))
                yield Hypothesis(name, f"off by {said} along axis {axis}", change)
    factors = part.piece.factored[0] if part.piece.factored else ()
    sizes = [weights.size(factor) for factor in factors]
    for place in range(len(factors) - 1):
        if 1 in sizes[place : place + 2]:
            continue
        kind = f"groups interleaved wrongly: {factors[place]} and {factors[place + 1]} nest the other way"
        yield Hypothesis(name, kind, _each([part], lambda one, p=place: _nested(one, sizes, p)))
        other = [*sizes[:place], sizes[place + 1], sizes[place], *sizes[place + 2 :]]
        yield Hypothesis(name, kind, _each([part], lambda one, p=place, s=other: _nested(one, s, p)))


def _nested(tensor: Tensor, sizes: Sequence[int], place: int) -> Tensor:
    """Rows as a product of `sizes`, two neighbours of them swapped."""
    return tensor.unflatten(0, list(sizes)).transpose(place, place + 1).reshape(tensor.shape)


def _rotary(weights: WeightMap, parts: Sequence[_Part]) -> Iterator[Hypothesis]:
    """Rotary pairs as neighbours or as halves of a head: queries and keys must agree on it with the model."""
    parts = [part for part in parts if part.piece.factored[0]]
    sizes = {weights.size(part.piece.factored[0][-1]) for part in parts}
    if len(sizes) != 1 or (head := sizes.pop()) % 2:
        return
    names = tuple(part.piece.name for part in parts)
    for shape in ((2, head // 2), (head // 2, 2)):
        yield Hypothesis(
            names, "rotary dimensions as halves where the model has pairs, or the reverse", _pairs(parts, shape)
        )


def _pairs(parts: Sequence[_Part], shape: tuple[int, int]) -> Change:
    return _each(parts, lambda one: one.unflatten(0, (-1, *shape)).transpose(1, 2).reshape(one.shape))


def _siblings(rows: Sequence[Row], parts: dict[int, list[_Part]]) -> Iterator[Hypothesis]:
    """Pieces of different rows of a layer that have one shape: their names may be swapped."""
    everything = [part for row in rows for part in parts[id(row)]]
    for one, two in combinations(everything, 2):
        if one.shape != two.shape or one.names.keys() != two.names.keys() or len(one.flat) != len(two.flat):
            continue
        if any(one in parts[id(row)] and two in parts[id(row)] for row in rows):
            continue
        pairs = [pair for a, b in zip(one.flat, two.flat, strict=True) for pair in ((a, b), (b, a))]
        yield Hypothesis((one.piece.name, two.piece.name), "swapped with each other", _moved(pairs))
