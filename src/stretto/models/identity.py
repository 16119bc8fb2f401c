"""The map of a model that has none: every tensor is itself. Enough for FSDP2 and the embedded engine."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from stretto.models.language import Piece, WeightMap, row


def identity_map(
    family: str, tensors: Iterable[tuple[str, Tensor, bool]], dropped: Iterable[str] = ()
) -> WeightMap:
    """A map in which the files, memory and engines have the same tensors; Megatron-Core has none of them.

    `tensors` are names, (meta) tensors and whether each is a buffer; `dropped` are names that the files may have beside
    them. Right for every model that transformers holds in memory as it is on disk.
    """
    rows = tuple(
        row(Piece(name, " ".join(map(str, tensor.shape)), buffer=is_buffer), cut=False)
        for name, tensor, is_buffer in tensors
    )
    return WeightMap(family=family, sizes={}, rows=rows, layer_count=1, dropped=tuple(dropped))
