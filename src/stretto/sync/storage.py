"""Where the pieces of one tensor lie inside it: offsets and strides, from the map's row alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stretto.models.language import Held, Piece, WeightMap

Range = tuple[int, int]
"""First index and the one behind the last."""


@dataclass(frozen=True)
class View:
    """One piece inside a tensor: for each of its factors the first index, how many, and the stride (in elements).

    When `step` is 1 the piece's first factor runs over tensors (its stride is 0), of which `first` is the first.
    """

    start: tuple[int, ...]
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    step: int = 0


@dataclass(frozen=True)
class Stored:
    """A tensor (or, with `count`, so many of the same shape) and the views of its pieces, in the order of the row."""

    shape: tuple[int, ...]
    count: int | None
    views: tuple[View, ...]
    row_stride: int
    """Elements from one index of the tensor's first axis to the next."""


def store(
    weights: WeightMap,
    held: Held,
    pieces: Sequence[Piece],
    ranges: Mapping[str, Range] | None = None,
    rows: int | None = None,
) -> Stored:
    """Lay the pieces out as `held` says, each cut to `ranges` (by factor; a factor left out is whole).

    `rows` is the length of the first axis where it is padded beyond what the pieces fill. Raises ValueError for a row
    that does not describe a tensor: pieces of unequal width, a `per` that a piece does not begin with, nothing to
    transpose, a vocabulary behind other factors.
    """
    ranges = ranges or {}
    spread = pieces[0].spread
    apart = spread is not None and f"{{{spread}}}" in held.name
    per = tuple(held.per.split())
    for piece in pieces:
        if any(len(set(axis)) < len(axis) for axis in piece.factored):
            raise ValueError(f"{held.name}: an axis of {piece.name} has a factor twice: [{piece.axes}]")
    rests = [_rest(piece, per, held) for piece in pieces]
    length = {f: _length(weights, f, ranges) for piece in pieces for f in piece.factors}
    widths = [math.prod(length[factor] for factor in rest) for rest in rests]
    groups = math.prod(length[factor] for factor in per)
    filled = groups * sum(widths)
    tail = _tail(pieces, length, held.name)
    axes = [rows if rows is not None else filled, *tail]
    if axes[0] < filled:
        raise ValueError(
            f"{held.name}: the vocabulary has {axes[0]} rows here and its pieces have {filled}; v leads an axis"
        )
    if spread is not None and not apart:
        axes.insert(0, length[spread])
    main = len(axes) - len(tail) - 1
    if held.transpose and not tail:
        raise ValueError(f"{held.name}: {pieces[0].name} has no two axes of its own to transpose")
    axis_strides, shape = _axis_strides(axes, held.transpose)
    if len(pieces) == 1 and not pieces[0].factored:
        shape = shape[:main]
    views, before = [], 0
    for piece, rest, width in zip(pieces, rests, widths, strict=True):
        strides: dict[int, int] = {}
        _fill(strides, piece, 0, rest, axis_strides[main], length)
        _fill(strides, piece, 0, per, axis_strides[main] * sum(widths), length)
        for axis in range(1, len(piece.factored)):
            _fill(strides, piece, axis, piece.factored[axis], axis_strides[main + axis], length)
        lead = () if spread is None else ((0 if apart else axis_strides[0]),)
        views.append(
            View(
                start=tuple(ranges.get(factor, (0, 0))[0] for factor in piece.factors),
                size=tuple(length[factor] for factor in piece.factors),
                stride=(*lead, *(strides[place] for place in range(len(piece.factors) - len(lead)))),
                offset=before * axis_strides[main],
                step=int(apart),
            )
        )
        before += width
    return Stored(shape, length[spread] if apart and spread else None, tuple(views), math.prod(shape[1:]))


def _length(weights: WeightMap, factor: str, ranges: Mapping[str, Range]) -> int:
    start, stop = ranges.get(factor, (0, weights.size(factor)))
    return stop - start


def _rest(piece: Piece, per: tuple[str, ...], held: Held) -> tuple[str, ...]:
    """The factors of the piece's first axis after the shared ones, as they nest in the tensor."""
    first = piece.factored[0] if piece.factored else ()
    if first[: len(per)] != per:
        raise ValueError(
            f"{held.name}: the rows of {piece.name} are ({' '.join(first)}), which do not begin with {per}"
        )
    rest, order = first[len(per) :], held.order.split()
    if order and not set(rest) <= set(order):
        raise ValueError(f"{held.name}: the order ({held.order}) lacks factors of {piece.name}: ({' '.join(rest)})")
    return tuple(sorted(rest, key=order.index)) if order else rest


def _tail(pieces: Sequence[Piece], length: Mapping[str, int], name: str) -> list[int]:
    """Lengths of the axes behind the first, which all pieces of a tensor must have in common."""
    found = {piece.name: [math.prod(length[f] for f in axis) for axis in piece.factored[1:]] for piece in pieces}
    if len({tuple(lengths) for lengths in found.values()}) > 1:
        raise ValueError(f"{name}: its pieces have unequal widths: {found}")
    return found[pieces[0].name]


def _axis_strides(axes: Sequence[int], transpose: bool) -> tuple[list[int], tuple[int, ...]]:
    """Strides of the axes in the piece's order, and the tensor's shape (the last two axes swapped when transposed)."""
    order = list(range(len(axes)))
    if transpose:
        order[-2:] = order[:-3:-1]
    shape = tuple(axes[axis] for axis in order)
    strides = [0] * len(axes)
    for place, axis in enumerate(order):
        strides[axis] = math.prod(shape[place + 1 :])
    return strides, shape


def _fill(
    strides: dict[int, int],
    piece: Piece,
    axis: int,
    factors: Sequence[str],
    unit: int,
    length: Mapping[str, int],
) -> None:
    """Strides of `factors` of an axis as they nest in the tensor, of which the last moves by `unit`."""
    before = sum(len(one) for one in piece.factored[:axis])
    for index, factor in enumerate(factors):
        place = before + piece.factored[axis].index(factor)
        strides[place] = unit * math.prod(length[inner] for inner in factors[index + 1 :])


def rows_of(views: Sequence[View], row_stride: int, start: int, stop: int) -> list[list[View]]:
    """What rows [start, stop) of a row-major tensor hold of each of its views; offsets count from row `start`.

    A cut that ignores the factors leaves several boxes of a view.
    """
    return [_cut_view(view, start * row_stride, stop * row_stride) for view in views]


def _cut_view(view: View, start: int, stop: int) -> list[View]:
    """The boxes of `view` whose elements lie in [start, stop) of the tensor's storage; whole rows are cut alone."""
    order = sorted(range(view.step, len(view.size)), key=lambda k: -view.stride[k])
    boxes: list[View] = []
    _descend(view, order, start, stop, list(view.start), list(view.size), view.offset, 0, boxes)
    return boxes


def _descend(
    view: View,
    order: Sequence[int],
    start: int,
    stop: int,
    at: list[int],
    size: list[int],
    offset: int,
    depth: int,
    boxes: list[View],
) -> None:
    """At each factor, outermost first, keep the indices that are whole and go into the (at most two) that are cut."""
    extent = 1 + sum((size[k] - 1) * view.stride[k] for k in order[depth:])
    if offset >= stop or offset + extent <= start:
        return
    if start <= offset and offset + extent <= stop:
        boxes.append(View(tuple(at), tuple(size), view.stride, offset - start, view.step))
        return
    assert depth < len(order), "a cut goes between elements"
    k = order[depth]
    inner = 1 + sum((size[j] - 1) * view.stride[j] for j in order[depth + 1 :])
    stride, count, first = view.stride[k], size[k], at[k]
    low = min(count, max(0, -(-(start - offset) // stride)))
    high = min(count, max(0, (stop - offset - inner) // stride + 1))
    ranges = [(low, high)] if high > low else []
    ranges += [(index, index + 1) for index in {low - 1, max(low, high)} if 0 <= index < count]
    for begin, end in sorted(ranges):
        part_at, part_size = list(at), list(size)
        part_at[k], part_size[k] = first + begin, end - begin
        next_depth = depth if (begin, end) == (low, high) else depth + 1
        if next_depth == depth:
            boxes.append(
                View(tuple(part_at), tuple(part_size), view.stride, offset + begin * stride - start, view.step)
            )
        else:
            _descend(view, order, start, stop, part_at, part_size, offset + begin * stride, next_depth, boxes)
