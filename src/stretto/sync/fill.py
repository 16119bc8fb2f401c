"""Whole tensors of one side into the tensors of one rank of the other, one after another."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from stretto.sync.layout import Layout
from stretto.sync.plan import Plan
from stretto.sync.program import Move, moves_to
from stretto.sync.views import copy, view
from stretto.world import local_part

Read = Callable[[str], Tensor]
"""A tensor of the source by its name there."""


class Filler:
    """Fills the tensors of one rank of `target` from whole tensors of `source`, again and again, by a plan made once.

    `source` has one rank. Raises ValueError when it does not fill `target`.
    """

    def __init__(self, source: Layout, target: Layout, rank: int):
        self._moves: dict[str, list[Move]] = {}
        for move in moves_to(Plan.of(source, target, [0] * target.ranks, [0]), rank):
            self._moves.setdefault(move.source.tensor, []).append(move)

    @property
    def bytes(self) -> int:
        """Bytes that the rank's tensors take in."""
        return sum(move.bytes for moves in self._moves.values() for move in moves)

    def fill(self, tensors: Mapping[str, Tensor], read: Read, names: Collection[str] | None = None) -> None:
        """Write what the source's tensors `names` (all when None) have in `tensors`, by local name."""
        for name in self._moves:
            if names is None or name in names:
                self.write(tensors, name, read(name))

    def write(self, tensors: Mapping[str, Tensor], name: str, whole: Tensor) -> None:
        """Write what the source's tensor `name` has in `tensors`; nothing when the rank needs none of it."""
        make(self._moves.get(name, ()), {name: whole}, tensors)


@torch.no_grad()
def make(moves: Sequence[Move], sources: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    """Make moves from tensors into contiguous tensors, both by name."""
    whole = {name: tensor.detach().contiguous() for name, tensor in sources.items()}
    copy(
        [view(local_part(targets[move.target.tensor].detach()), move.target, move.size) for move in moves],
        [view(whole[move.source.tensor], move.source, move.size) for move in moves],
        [move.shift for move in moves],
    )
