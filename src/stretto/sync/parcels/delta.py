"""What changed in a tensor, to the bit: pure functions.

Elements are compared and sent as integers of their size, so -0.0 is not 0.0 and every NaN is itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SHORT = 2**31
"""Elements up to which a place is four bytes."""


def encode(old: Tensor, new: Tensor) -> dict[str, Tensor]:
    """The parts from which who has `old` makes `new`, of the same shape and dtype, on CPU.

    Nothing when no bit differs. Else the new `values` with their `places` [changed] or with a `mask` (a bit for each
    element), whichever is shorter; or the `whole` tensor, where that is not longer.
    """
    before, after = _bits(old), _bits(new)
    differs = (before != after).numpy()
    places, count = _places(differs), len(after)
    changed = len(places)
    if not changed:
        return {}
    wide = torch.int32 if count <= _SHORT else torch.int64
    where = min(changed * wide.itemsize, -(-count // 8))
    if where + changed * after.element_size() >= count * after.element_size():
        return {"whole": new}
    values = after[places]
    if where < changed * wide.itemsize:
        return {"mask": torch.from_numpy(np.packbits(differs)), "values": values}
    return {"places": places.to(wide), "values": values}


def decode(old: Tensor, *changes: Mapping[str, Tensor]) -> Tensor:
    """The tensor that `encode` was given as `new`, after several changes the oldest first; `old` stays as it is.

    Raises ValueError when the parts do not fit it or one another.
    """
    tensor, ours = old, False
    for parts in changes:
        if "whole" in parts:
            tensor, ours = parts["whole"], False
        elif parts:
            tensor, ours = tensor if ours else tensor.clone(memory_format=torch.contiguous_format), True
            _change(_bits(tensor), parts)
    return tensor


def _change(bits: Tensor, parts: Mapping[str, Tensor]) -> None:
    """Write the values where they belong."""
    if "mask" in parts:
        where = _places(np.unpackbits(parts["mask"].numpy(), count=len(bits)).view(np.bool_))
    else:
        where = parts["places"].long()
    if where.shape != parts["values"].shape:
        raise ValueError(f"the changes do not fit ({len(where)} places, {len(parts['values'])} values)")
    try:
        bits.scatter_(0, where, parts["values"])
    except RuntimeError as error:
        raise ValueError(f"the changes do not fit ({error})") from error


def _places(mask: np.ndarray) -> Tensor:
    """Where it is set; numpy finds that in a fraction of torch's time."""
    return torch.from_numpy(np.flatnonzero(mask))


def _bits(tensor: Tensor) -> Tensor:
    """The elements as integers, flat."""
    return tensor.contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
