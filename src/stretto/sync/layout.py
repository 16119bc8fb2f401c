"""What one side's weights look like, and whether one side can fill the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import NamedTuple

import torch
from torch import Tensor


class TensorSpec(NamedTuple):
    """Shape and dtype of one checkpoint tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


Layout = Mapping[str, TensorSpec]
"""Checkpoint tensor names and what they hold."""


def layout_of(tensors: Iterable[tuple[str, Tensor]]) -> Layout:
    """The layout of named tensors."""
    return {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors}


def check_complete(source: Layout, target: Layout) -> None:
    """Raise ValueError unless both sides hold the same tensors in the same shapes (dtypes may differ: a cast).

    The message has both lists of names, with the nearest candidate of each.
    """
    unwritten, unread = sorted(set(target) - set(source)), sorted(set(source) - set(target))
    shapes = [
        f"{name} is {list(source[name].shape)} in the trainer and {list(target[name].shape)} in the engine"
        for name in sorted(set(source) & set(target))
        if source[name].shape != target[name].shape
    ]
    lines = [
        *(f"nothing fills the engine's {_with_candidate(name, source)}" for name in unwritten),
        *(f"nothing reads the trainer's {_with_candidate(name, target)}" for name in unread),
        *shapes,
    ]
    if lines:
        raise ValueError("the trainer's weights do not fill the engine's:\n  " + "\n  ".join(lines))


def _with_candidate(name: str, candidates: Layout) -> str:
    near = get_close_matches(name, candidates, n=1)
    return f"{name} (nearest there: {near[0]})" if near else name
