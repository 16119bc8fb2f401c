"""Whether one side's weights can fill the other's."""

from __future__ import annotations

import pytest
import torch

from stretto.sync.layout import Layout, TensorSpec, check_complete, layout_of


def layout(**shapes: tuple[int, ...]) -> Layout:
    return {name.replace("__", "."): TensorSpec(shape, torch.float32) for name, shape in shapes.items()}


def test_a_layout_says_names_shapes_and_dtypes() -> None:
    tensors = [("a", torch.empty(2, 3)), ("b", torch.empty(4, dtype=torch.bfloat16))]
    assert layout_of(tensors) == {"a": ((2, 3), torch.float32), "b": ((4,), torch.bfloat16)}


def test_equal_layouts_are_complete_though_dtypes_differ() -> None:
    check_complete({"a": TensorSpec((2,), torch.float32)}, {"a": TensorSpec((2,), torch.bfloat16)})


def test_both_lists_are_named_with_the_nearest_candidate() -> None:
    source = layout(model__layers__0__q_proj=(2,), model__norm=(2,), zzz=(2,))
    target = layout(model__layers__0__q_pro=(2,), model__norm=(2,), extra_tensor=(2,))
    with pytest.raises(ValueError) as caught:
        check_complete(source, target)
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert lines[1:] == [
        "nothing fills the engine's extra_tensor",
        "nothing fills the engine's model.layers.0.q_pro (nearest there: model.layers.0.q_proj)",
        "nothing reads the trainer's model.layers.0.q_proj (nearest there: model.layers.0.q_pro)",
        "nothing reads the trainer's zzz",
    ]


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"a is \[2, 3\] in the trainer and \[3, 2\] in the engine"):
        check_complete(layout(a=(2, 3)), layout(a=(3, 2)))
