"""The map of a model that has none: every tensor is itself. Enough for FSDP2 and the embedded engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from stretto.models.language import Piece, Row, WeightMap, row


class Whole(NamedTuple):
    """A (meta) tensor with its names in memory and in files; a buffer is no parameter."""

    name: str
    in_files: str
    tensor: Tensor
    buffer: bool


def identity_map(family: str, tensors: Iterable[Whole], dropped: Iterable[str] = ()) -> WeightMap:
    """A map in which memory has the tensors of the files, and Megatron-Core none of them.

    `dropped` are names that the files may have beside them. Right for every model whose tensors transformers loads as
    they are on disk, under the same or another name.
    """
    rows = tuple(_row(one) for one in tensors)
    return WeightMap(family=family, sizes={}, rows=rows, layer_count=1, dropped=tuple(dropped))


def _row(one: Whole) -> Row:
    piece = Piece(one.in_files, " ".join(map(str, one.tensor.shape)), buffer=one.buffer)
    return row(piece, memory=one.name, cut=False)
