"""Same process: the trainer's tensors are copied into buffers of the engine, whose addresses never change."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from stretto.types import Version
from stretto.world import whole


class LocalTransport:
    """Fills the engine's tensors one by one; a sharded one is gathered first, so extra memory is one whole tensor.

    A cast is computed from the trainer's value and rounded once to the engine's dtype.
    """

    name = "local"

    def __init__(self, source: Callable[[], Mapping[str, Tensor]], target: Mapping[str, Tensor]):
        self._source, self._target = source, target
        self._addresses = {name: tensor.data_ptr() for name, tensor in target.items()}
        self._filled: set[str] = set()

    @torch.no_grad()
    def transfer(self, version: Version) -> int:
        """Fill every tensor of the engine; all ranks call together when the source is sharded."""
        source = self._source()
        self._filled.clear()
        moved = 0
        for name, tensor in self._target.items():
            tensor.copy_(whole(source[name]))
            self._filled.add(name)
            moved += tensor.nbytes
        return moved

    def verify(self) -> None:
        """Raise RuntimeError when a tensor was not filled or has moved."""
        for name, address in self._addresses.items():
            if name not in self._filled:
                raise RuntimeError(f"{name} was not filled by this publication")
            if self._target[name].data_ptr() != address:
                raise RuntimeError(f"{name} of the engine has moved to another address")
