"""Pieces of a map's source: each is an expression of a map file and the rows that it stands for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from stretto.models import blocks
from stretto.models.description import Tensor
from stretto.models.language import Held, Piece, Row, WeightMap, row
from stretto.sync.storage import store

BLOCKS = ("attention", "embedding", "experts", "final_norm", "gated_mlp", "norms", "router")
_NAMES: Mapping[str, Any] = {
    **{name: getattr(blocks, name) for name in BLOCKS},
    "Held": Held,
    "Piece": Piece,
    "row": row,
}
_DTYPE = "bfloat16"


class Part(NamedTuple):
    """An expression of a map file (a row, or with a star in front several) and its rows."""

    text: str
    rows: tuple[Row, ...]


def call(name: str, *words: str, **settings: Any) -> str:
    """The source of a call; settings that are None are left out."""
    given = [f"{key}={value!r}" for key, value in settings.items() if value is not None]
    return f"{name}({', '.join([*(repr(word) for word in words), *given])})".replace("'", '"')


def piece_text(name: str, axes: str, dtype: str | None = None) -> str:
    """The source of a piece."""
    return call("Piece", name, axes, dtype=dtype)


def row_text(name: str, axes: str, *, dtype: str | None = None, **columns: str | bool | None) -> str:
    """The source of a row of one piece."""
    given = [f"{key}={value!r}" for key, value in columns.items() if value is not None]
    return f"row({', '.join([piece_text(name, axes, dtype), *given])})".replace("'", '"')


def part(text: str) -> Part:
    """Read the source of a row, or of a block of them, which gets a star."""
    value = eval(text, {"__builtins__": {"True": True}}, dict(_NAMES))
    return Part(text, (value,)) if isinstance(value, Row) else Part(f"*{text}", tuple(value))


class Pool:
    """Tensors in files and in memory that no part has taken yet."""

    def __init__(self, files: Mapping[str, Tensor], memory: Mapping[str, Tensor], lengths: Mapping[str, int]):
        self.files, self.memory = dict(files), dict(memory)
        self.parts: list[Part] = []
        self._sizes = WeightMap("", lengths, (), 0)

    def take(self, *texts: str) -> bool:
        """Take what the expressions stand for, when both sides have exactly those tensors; say whether they do."""
        found = [part(text) for text in texts]
        rows = [one for each in found for one in each.rows]
        try:
            sides = [(self.files, self._held(rows, "checkpoint")), (self.memory, self._held(rows, "memory"))]
        except ValueError:  # a factor that the configuration does not give
            return False
        if any(there.get(name) != one for there, held in sides for name, one in held.items()):
            return False
        for there, held in sides:
            for name in held:
                del there[name]
        self.parts += found
        return True

    def _held(self, rows: Iterable[Row], side: str) -> dict[str, Tensor]:
        held = {}
        for one, pieces in (pair for each in rows for pair in each.tensors(side)):
            stored = store(self._sizes, one, pieces)
            shape = stored.shape if stored.count is None else (stored.count, *stored.shape)
            held[one.name] = Tensor(shape, next((piece.dtype for piece in pieces if piece.dtype), _DTYPE))
        return held
