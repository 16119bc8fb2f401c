"""Whether the tensors that a side really has are those that its layout says."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from stretto.sync.coverage import differences
from stretto.sync.layout import Layout
from stretto.world import local_part


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as layouts name it: ``float32``."""
    return str(dtype).removeprefix("torch.")


def unlike(name: str, tensor: Tensor, said: tuple[tuple[int, ...], str]) -> str | None:
    """A line when a tensor has not the shape and the dtype that its layout says; a shard's own where it is sharded."""
    held = local_part(tensor)
    if (tuple(held.shape), dtype_name(held.dtype)) == said:
        return None
    return f"{name} is {list(held.shape)} {dtype_name(held.dtype)} and its layout says {list(said[0])} {said[1]}"


def tensor_differences(layout: Layout, rank: int, tensors: Mapping[str, Tensor]) -> list[str]:
    """One line for each way in which `tensors` are not those of `rank`: names (with the nearest), shapes, dtypes."""
    expected = layout.local(rank)
    lines = [
        *differences("the layout has", sorted(set(expected) - set(tensors)), tensors),
        *differences("the layout does not have", sorted(set(tensors) - set(expected)), expected),
    ]
    both = (unlike(name, tensors[name], expected[name]) for name in sorted(set(expected) & set(tensors)))
    return [*lines, *(line for line in both if line)]


def check_tensors(layout: Layout, rank: int, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError with every difference between a rank's tensors and its layout."""
    lines = tensor_differences(layout, rank, tensors)
    if lines:
        raise ValueError(f"the weight map does not describe {layout.title}:\n  " + "\n  ".join(lines))


def check_targets(layout: Layout, rank: int, tensors: Mapping[str, Tensor]) -> None:
    """The same for tensors that are written piece by piece through views of their storage: they must be contiguous."""
    check_tensors(layout, rank, tensors)
    if scattered := [name for name, tensor in tensors.items() if not local_part(tensor).is_contiguous()]:
        raise ValueError(f"{layout.title}: {', '.join(scattered[:3])} cannot be filled, being not contiguous")
