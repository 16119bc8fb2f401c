"""Nothing moves: every tensor of the engine is a whole tensor of the trainer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from stretto.types import Version


def can_alias(source: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether an engine of `dtype` on `device` can generate with the trainer's own tensors."""
    return all(
        not hasattr(tensor, "to_local") and tensor.dtype == dtype and tensor.device == device
        for tensor in source.values()
    )


class AliasTransport:
    """The version flips at the optimizer step, which excludes generation."""

    name = "alias"

    def __init__(self, source: Mapping[str, Tensor], target: Mapping[str, Tensor]):
        self._source, self._target = source, target

    def transfer(self, version: Version) -> int:
        """Moves nothing."""
        return 0

    def verify(self) -> None:
        """Raise RuntimeError unless both sides still are the same memory."""
        for name, tensor in self._target.items():
            if tensor.data_ptr() != self._source[name].data_ptr():
                raise RuntimeError(f"{name} of the engine is no longer the trainer's tensor")
