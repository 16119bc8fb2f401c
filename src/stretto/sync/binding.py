"""Whether the tensors that a side really has are those that its layout says."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from stretto.sync.coverage import differences
from stretto.sync.layout import Layout
from stretto.world import local_part


def tensor_differences(layout: Layout, rank: int, tensors: Mapping[str, Tensor]) -> list[str]:
    """One line for each way in which `tensors` are not those of `rank`: names (with the nearest), shapes, dtypes."""
    expected = layout.local(rank)
    lines = [
        *differences("the layout has", sorted(set(expected) - set(tensors)), tensors),
        *differences("the layout does not have", sorted(set(tensors) - set(expected)), expected),
    ]
    for name in sorted(set(expected) & set(tensors)):
        shape, dtype = expected[name]
        held = local_part(tensors[name])
        real = tuple(held.shape), str(held.dtype).removeprefix("torch.")
        if real != (shape, dtype):
            lines.append(f"{name} is {list(real[0])} {real[1]} and its layout says {list(shape)} {dtype}")
    return lines


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
