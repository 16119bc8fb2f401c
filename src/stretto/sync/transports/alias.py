"""Nothing moves: every tensor of the engine is a whole tensor of the trainer."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from stretto.sync.layout import Layout
from stretto.types import Version


def can_alias(source: Layout, target: Layout, weights: Mapping[str, Tensor]) -> bool:
    """Whether an engine can generate with the trainer's own tensors: one rank, and the same names, shapes and dtypes.

    Local shards of a sharded model are no such tensors: their owner moves and frees them.
    """
    return (
        source.ranks == target.ranks == 1
        and source.local(0) == target.local(0)
        and not any(hasattr(tensor, "to_local") for tensor in weights.values())
    )


class AliasTransport:
    """The version flips at the optimizer step, which excludes generation."""

    name = "alias"
    touched = True
    """The optimizer step writes into the engine's tensors."""

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

    def close(self) -> None:
        """Nothing to let go of."""
