"""Whether one side's weights can fill the other's, and whether a side has the tensors that its layout says."""

from __future__ import annotations

import pytest
import torch

from stretto.models.language import Piece, Row, WeightMap, row
from stretto.sync.binding import check_tensors, tensor_differences
from stretto.sync.layout import Atoms, Layout
from stretto.sync.layouts import checkpoint_layout, fsdp_layout, replica_layout
from stretto.sync.plan import Plan


def only(side: str, name: str) -> Row:
    """A row of which one side alone has the tensor."""
    whole = row(Piece(name, "2"))
    return Row(whole.pieces, {side: whole.held[side]})


def atoms(*rows: Row) -> Atoms:
    return Atoms.of(WeightMap(family="test", sizes={}, rows=rows, layer_count=1))


def test_both_lists_are_named_with_the_nearest_candidate() -> None:
    model = atoms(
        row(Piece("model.norm", "2")),
        only("checkpoint", "model.layers.0.q_proj"),
        only("checkpoint", "zzz"),
        only("memory", "model.layers.0.q_pro"),
        only("memory", "extra_tensor"),
    )
    with pytest.raises(ValueError) as caught:
        Plan.of(checkpoint_layout(model, "float32"), replica_layout(model, "float32", 1), [0])
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert lines == [
        "checkpoint does not fill embedded(replicas=1):",
        "nothing fills the target's model.layers.0.q_pro (nearest there: model.layers.0.q_proj)",
        "nothing fills the target's extra_tensor",
        "nothing reads the source's model.layers.0.q_proj (nearest there: model.layers.0.q_pro)",
        "nothing reads the source's zzz",
    ]


def test_layouts_are_complete_though_dtypes_differ() -> None:
    model = atoms(row(Piece("a", "2 3")), row(Piece("b", "4", dtype="float32")))
    source, target = checkpoint_layout(model, "float64"), replica_layout(model, "bfloat16", 1)
    assert target.local(0) == {"a": ((2, 3), "bfloat16"), "b": ((4,), "float32")}
    assert Plan.of(source, target, [0]).send_bytes.sum() == 6 * 2 + 4 * 4


def two_ranks() -> Layout:
    return fsdp_layout(
        atoms(row(Piece("a", "3 2")), row(Piece("b", "5")), row(Piece("c", "2", buffer=True))), "float32", 2
    )


def test_tensors_that_are_as_the_layout_says_have_no_differences() -> None:
    first = {"a": torch.empty(2, 2), "b": torch.empty(3), "c": torch.empty(2)}
    last = {"a": torch.empty(1, 2), "b": torch.empty(2), "c": torch.empty(2)}
    check_tensors(two_ranks(), 0, first)
    check_tensors(two_ranks(), 1, last)
    assert tensor_differences(two_ranks(), 0, last) == [
        "a is [1, 2] float32 and its layout says [2, 2] float32",
        "b is [2] float32 and its layout says [3] float32",
    ]


def test_every_tensor_that_is_not_as_the_layout_says_is_named_with_the_nearest() -> None:
    held = {"aa": torch.empty(2, 2), "b": torch.empty(3, dtype=torch.bfloat16), "zzzz": torch.empty(1)}
    held["c"] = torch.empty(1, 2)
    with pytest.raises(ValueError) as caught:
        check_tensors(two_ranks(), 0, held)
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert lines == [
        "the weight map does not describe fsdp(ranks=2):",
        "the layout has a (nearest there: aa)",
        "the layout does not have aa (nearest there: a)",
        "the layout does not have zzzz",
        "b is [3] bfloat16 and its layout says [3] float32",
        "c is [1, 2] float32 and its layout says [2] float32",
    ]
