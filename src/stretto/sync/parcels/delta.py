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
    differs = before != after
    changed, count = int(differs.sum()), len(after)
    if not changed:
        return {}
    wide = torch.int32 if count <= _SHORT else torch.int64
    where = min(changed * wide.itemsize, -(-count // 8))
    if where + changed * after.element_size() >= count * after.element_size():
        return {"whole": new}
    values = after[differs]
    if where < changed * wide.itemsize:
        return {"mask": torch.from_numpy(np.packbits(differs.numpy())), "values": values}
    return {"places": differs.nonzero().view(-1).to(wide), "values": values}


def decode(old: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
    """The tensor that `encode` was given as `new`; `old` stays as it is.

    Raises ValueError when the parts do not fit it or one another.
    """
    if not parts:
        return old
    if "whole" in parts:
        return parts["whole"]
    bits = _bits(old).clone()
    if "mask" in parts:
        where = torch.from_numpy(np.unpackbits(parts["mask"].numpy(), count=len(bits)).view(np.bool_))
    else:
        where = parts["places"].long()
    try:
        bits[where] = parts["values"]
    except (RuntimeError, IndexError) as error:
        raise ValueError(f"the changes do not fit ({error})") from error
    return bits.view(old.dtype).view(old.shape)


def _bits(tensor: Tensor) -> Tensor:
    """The elements as integers, flat."""
    return tensor.contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
