"""The checkpoint's pieces as tensors of their own, also where the files hold several in one tensor."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from stretto.models.language import Held, Row
from stretto.sync.fill import Read, make
from stretto.sync.layout import Atoms, Layout
from stretto.sync.layouts import checkpoint_layout
from stretto.sync.plan import Plan
from stretto.sync.program import Move, moves_to


def pieces_layout(atoms: Atoms, dtype: str) -> Layout:
    """A checkpoint that has each piece alone, under its own name, with the values of the files."""
    rows = tuple(_apart(row) for row in atoms.weights.rows)
    return checkpoint_layout(Atoms.of(replace(atoms.weights, rows=rows)), dtype)


def _apart(row: Row) -> Row:
    if "checkpoint" not in row.held:
        return row
    alone = tuple(Held(piece.name) for piece in row.pieces)
    return replace(row, held={**row.held, "checkpoint": alone})


class Pieces:
    """Reads pieces by name out of the tensors of the files."""

    def __init__(self, files: Layout, apart: Layout, read: Read):
        self._read, self._shapes = read, {name: shape for name, (shape, _) in apart.local(0).items()}
        self._moves: dict[str, list[Move]] = {}
        for move in moves_to(Plan.of(files, apart, [0], [0]), 0):
            self._moves.setdefault(move.target.tensor, []).append(move)

    def read(self, name: str) -> Tensor:
        """One piece."""
        moves = self._moves[name]
        whole = {move.source.tensor: self._read(move.source.tensor) for move in moves}
        piece = torch.empty(self._shapes[name], dtype=whole[moves[0].source.tensor].dtype)
        make(moves, whole, {name: piece})
        return piece
