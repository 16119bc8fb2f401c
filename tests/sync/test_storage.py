"""Where pieces lie inside a tensor: each view read by strides against the same tensor made with torch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from map_oracle import laid_out
from torch import Tensor

from stretto.models.language import Held, Piece, WeightMap
from stretto.sync.storage import Stored, View, rows_of, store

SIZES = {"g": 2, "q": 3, "d": 4, "h": 5, "e": 3, "m": 2, "v": 7}
MAP = WeightMap("test", SIZES, (), 1)

Q, K, V = Piece("q", "(g q d) h"), Piece("k", "(g d) h"), Piece("v", "(g d) h")
GATE, UP = Piece("experts.{e}.gate", "m h"), Piece("experts.{e}.up", "m h")


def values(piece: Piece, seed: int) -> Tensor:
    shape = [SIZES.get(factor) or int(factor) for factor in piece.factors]
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def read(view: View, tensors: list[Tensor]) -> Tensor:
    """The box that a view means, out of the tensor or of each of the numbered ones."""
    if view.step:
        parts = [torch.as_strided(one, view.size[1:], view.stride[1:], view.offset) for one in tensors]
        return torch.stack(parts)
    return torch.as_strided(tensors[0], view.size, view.stride, view.offset)


CASES = {
    "plain": (Held("t"), (Q,)),
    "one after another": (Held("t"), (Q, K, V)),
    "by group": (Held("t", per="g"), (Q, K, V)),
    "by group, transposed": (Held("t", per="g", transpose=True), (Q, K, V)),
    "by group, in another order": (Held("t", per="g", order="d q"), (Q, K, V)),
    "row by row": (Held("t", per="g d"), (K, V)),
    "numbered": (Held("experts.{e}.fc1"), (GATE, UP)),
    "stacked": (Held("experts.fc1"), (GATE, UP)),
    "stacked and transposed": (Held("experts.fc1", transpose=True), (GATE, UP)),
    "many axes": (Held("t", transpose=True), (Piece("conv", "(g d) 1 h q"),)),
    "a bias": (Held("t", per="g"), (Piece("qb", "(g q d)"), Piece("kb", "(g d)"))),
    "a scalar": (Held("t"), (Piece("s", ""),)),
    "numbered scalars": (Held("t{e}"), (Piece("s{e}", ""),)),
    "stacked scalars": (Held("t"), (Piece("s{e}", ""),)),
    "two scalars together": (Held("t"), (Piece("a", ""), Piece("b", ""))),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ranges", [{}, {"g": (1, 2)}, {"e": (1, 3), "h": (2, 4)}, {"d": (1, 1)}], ids=str)
def test_views_are_the_pieces_of_the_tensor(name: str, ranges: dict[str, tuple[int, int]]) -> None:
    held, pieces = CASES[name]
    stored = store(MAP, held, pieces, ranges)
    parts = [values(piece, seed) for seed, piece in enumerate(pieces)]
    whole = laid_out(held, pieces, parts, {factor: range(*one) for factor, one in ranges.items()}, None).contiguous()
    tensors = [one.clone() for one in whole.unbind(0)] if stored.count is not None else [whole]
    assert {tuple(one.shape) for one in tensors} == {stored.shape}
    assert stored.count in (None, len(tensors))
    for piece, part, view in zip(pieces, parts, stored.views, strict=True):
        for place, factor in enumerate(piece.factors):
            start, stop = ranges.get(factor, (0, part.shape[place]))
            assert (view.start[place], view.size[place]) == (start, stop - start)
            part = part.narrow(place, start, stop - start)
        if part.numel():
            assert torch.equal(read(view, tensors), part)


def test_padding_comes_behind_the_pieces() -> None:
    stored = store(MAP, Held("t"), (Piece("embed", "v h"),), {"v": (4, 7)}, rows=6)
    assert stored.shape == (6, 5)
    assert stored.views[0] == View(start=(4, 0), size=(3, 5), stride=(5, 1), offset=0)


@pytest.mark.parametrize(
    ("held", "pieces", "message"),
    [
        (Held("t"), (Q, Piece("x", "g d")), "unequal widths"),
        (Held("t", per="d"), (Q, K), r"q are \(g q d\), which do not begin with"),
        (Held("t", order="d"), (Q,), r"the order \(d\) lacks factors of q"),
        (Held("t", transpose=True), (Piece("b", "h"),), "no two axes"),
        (Held("experts.fc1", transpose=True), (Piece("experts.{e}.b", "h"),), "no two axes"),
        (Held("t"), (Piece("x", "(d d) h"),), "a factor twice"),
        (Held("t"), (Piece("x", "unheard h"),), "'unheard' and its sizes do not say"),
    ],
)
def test_a_row_that_describes_no_tensor_is_refused(held: Held, pieces: tuple[Piece, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        store(MAP, held, pieces)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(name for name in CASES if "scalar" not in name)), st.data())
def test_some_rows_are_the_boxes_that_lie_in_them(name: str, data: st.DataObject) -> None:
    """A cut that knows nothing of factors: each box lies where it says, and together they are the rows, once."""
    held, pieces = CASES[name]
    stored = store(MAP, held, pieces)
    start = data.draw(st.integers(0, stored.shape[0] - 1))
    stop = data.draw(st.integers(start + 1, stored.shape[0]))
    parts = [values(piece, seed) for seed, piece in enumerate(pieces)]
    whole = laid_out(held, pieces, parts, {}, None).contiguous()
    rows = whole[:, start:stop] if stored.count is not None else whole[start:stop]
    tensors = [one.clone() for one in (rows.unbind(0) if stored.count is not None else [rows])]
    written = [torch.zeros_like(one, dtype=torch.int) for one in tensors]
    for part, views in zip(parts, rows_of(stored.views, stored.row_stride, start, stop), strict=True):
        for view in views:
            box = tuple(slice(first, first + size) for first, size in zip(view.start, view.size, strict=True))
            assert torch.equal(read(view, tensors), part[box])
            for index, one in enumerate(written):
                target = torch.as_strided(
                    one, view.size, (0, *view.stride[1:]) if view.step else view.stride, view.offset
                )
                target[index if view.step else slice(None)] += 1
    assert all((one == 1).all() for one in written)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 40), st.integers(1, 9))
def test_row_cuts_of_a_box_are_few(lengths: list[int], rows: int, parts: int) -> None:
    """At each factor at most two indices are cut: so many boxes there are at most, however large the factors."""
    names = "abcdefgh"[: len(lengths)]
    weights = WeightMap("test", dict(zip(names, lengths, strict=True)), (), 1)
    stored: Stored = store(weights, Held("t"), (Piece("p", f"({' '.join(names)}) {rows}"),))
    height = math.prod(lengths)
    chunk = -(-height // parts)
    for start in range(0, height, chunk):
        (boxes,) = rows_of(stored.views, stored.row_stride, start, min(height, start + chunk))
        assert sum(math.prod(box.size) for box in boxes) == rows * (min(height, start + chunk) - start)
        assert len(boxes) <= 2 * len(lengths) + 1
