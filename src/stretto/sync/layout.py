"""A layout: which boxes of the checkpoint's tensors every rank of one side holds, and where. Arrays, no weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stretto.models.language import Held, Piece, Row, WeightMap
from stretto.sync.storage import Stored, View

Ints = NDArray[np.int64]

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Atoms:
    """Every piece of every layer of a map: the coordinates that two layouts of it have in common."""

    weights: WeightMap
    names: tuple[str, ...]
    pieces: tuple[Piece, ...]
    sizes: Ints
    """[atoms, factors]: length of each factor, 1 beyond the piece's own."""

    @classmethod
    def of(cls, weights: WeightMap) -> Atoms:
        """The atoms of a map, in the order of its rows. Raises ValueError when two rows disagree on a piece."""
        found: dict[str, Piece] = {}
        for row in weights.rows:
            for layer in row.layers or (None,):
                for piece in row.pieces:
                    known = found.setdefault(at_layer(piece.name, layer), piece)
                    if known.axes != piece.axes:
                        raise ValueError(
                            f"the {weights.family} map has {piece.name} twice, as [{known.axes}] and as [{piece.axes}]"
                        )
        width = max((1, *(len(piece.factors) for piece in found.values())))
        sizes = np.ones((len(found), width), dtype=np.int64)
        for index, piece in enumerate(found.values()):
            sizes[index, : len(piece.factors)] = [weights.size(factor) for factor in piece.factors]
        return cls(weights, tuple(found), tuple(found.values()), sizes)

    def same(self, other: Atoms) -> bool:
        """Whether both are coordinates of the same checkpoint."""
        return self is other or (self.names == other.names and np.array_equal(self.sizes, other.sizes))

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Place of each atom by name."""
        return {name: place for place, name in enumerate(self.names)}

    @property
    def width(self) -> int:
        """Most factors of any atom."""
        return self.sizes.shape[1]


def at_layer(name: str, layer: int | None) -> str:
    """A name with its layer number put in."""
    return name if layer is None else name.replace("{layer}", str(layer))


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """A tensor as the ranks of one class hold it, or `count` alike whose name has their number in braces."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    count: int | None
    kind: int
    """The class of ranks: index into `Layout.classes`."""

    @property
    def bytes(self) -> int:
        """Bytes of all of them."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype] * (1 if self.count is None else self.count)

    def names(self) -> list[str]:
        """The names of the tensors."""
        return [self.name] if self.count is None else [self.numbered(index) for index in range(self.count)]

    def numbered(self, index: int) -> str:
        """Name of one of them."""
        if self.count is None:
            return self.name
        head, _, tail = self.name.partition("{")
        return f"{head}{index}{tail.partition('}')[2]}"


class Shards(NamedTuple):
    """One row a box of an atom that a group of ranks holds."""

    atom: Ints
    tensor: Ints
    """Index into `Layout.tensors`."""
    first: Ints
    """Which of a numbered tensor's the first index of the box is in."""
    step: Ints
    """1 when the box's first factor runs over tensors."""
    holders: Ints
    """Index into `Layout.groups`."""
    offset: Ints
    start: Ints
    """[shards, factors]"""
    size: Ints
    stride: Ints
    add: NDArray[np.float64]
    """What the side's value is more than the checkpoint's."""

    @property
    def volume(self) -> Ints:
        """Elements of each box."""
        return self.size.prod(axis=1)


@dataclass(frozen=True)
class Layout:
    """The shards of every rank of one side. `title` says how it was made."""

    title: str
    atoms: Atoms
    ranks: int
    tensors: tuple[LocalTensor, ...]
    classes: tuple[Ints, ...]
    """Ranks that hold the same table of tensors."""
    groups: tuple[Ints, ...]
    """Ranks that hold the same box: replicas of each other."""
    shards: Shards

    def kind(self, rank: int) -> int:
        """The class that a rank belongs to."""
        return self._kinds[rank]

    @cached_property
    def _kinds(self) -> dict[int, int]:
        return {int(rank): kind for kind, ranks in enumerate(self.classes) for rank in ranks}

    def local(self, rank: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of every tensor of one rank, by name."""
        kind = self.kind(rank)
        return {
            name: (tensor.shape, tensor.dtype)
            for tensor in self.tensors
            if tensor.kind == kind
            for name in tensor.names()
        }

    def local_bytes(self, rank: int) -> int:
        """Bytes of the weights on one rank."""
        return self._class_bytes[self.kind(rank)]

    @cached_property
    def _class_bytes(self) -> list[int]:
        found = [0] * len(self.classes)
        for tensor in self.tensors:
            found[tensor.kind] += tensor.bytes
        return found

    def __str__(self) -> str:
        sizes = sorted(set(self._class_bytes))
        spread = f"{sizes[0] / 1e9:.2f}" + (f" to {sizes[-1] / 1e9:.2f}" if len(sizes) > 1 else "")
        return f"{self.title}: {self.ranks} ranks, {len(self.atoms.names)} tensors, {spread} GB a rank"


class LayoutBuilder:
    """Collects the tensors and shards of a side and makes a :class:`Layout` of them."""

    def __init__(self, title: str, atoms: Atoms, ranks: int, dtype: str):
        self._title, self._atoms, self._ranks, self._dtype = title, atoms, ranks, dtype
        self._tensors: list[LocalTensor] = []
        self._classes: list[Ints] = []
        self._groups: dict[bytes, int] = {}
        self._group_ranks: list[Ints] = []
        self._scalars: list[tuple[int, int, int, int, int, int, float]] = []
        self._boxes: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = []

    def new_class(self, ranks: Sequence[int] | Ints) -> int:
        """Ranks that hold the same tensors."""
        self._classes.append(np.asarray(ranks, dtype=np.int64))
        return len(self._classes) - 1

    def group(self, ranks: Sequence[int] | Ints) -> int:
        """Ranks that hold the same box."""
        array = np.asarray(ranks, dtype=np.int64)
        place = self._groups.setdefault(array.tobytes(), len(self._group_ranks))
        if place == len(self._group_ranks):
            self._group_ranks.append(array)
        return place

    def tensor(self, kind: int, name: str, stored: Stored, pieces: Sequence[Piece], shape: tuple[int, ...]) -> int:
        """A tensor of the ranks of class `kind`; a piece's own dtype goes before the side's."""
        fixed = next((piece.dtype for piece in pieces if piece.dtype), None)
        self._tensors.append(LocalTensor(name, shape, fixed or self._dtype, stored.count, kind))
        return len(self._tensors) - 1

    def shard(self, tensor: int, name: str, view: View, held: Held, group: int) -> None:
        """The box of the atom `name` that `view` of `tensor` is, on the ranks of `group`; an empty one is left out."""
        if 0 in view.size:
            return
        atom = self._atoms.index[name]
        self._scalars.append((atom, tensor, 0, view.step, group, view.offset, held.add))
        self._boxes.append((view.start, view.size, view.stride))

    def build(self) -> Layout:
        """The layout."""
        width = self._atoms.width
        columns = np.array([one[:6] for one in self._scalars], dtype=np.int64).reshape(-1, 6).T
        atom, tensor, first, step, holders, offset = columns
        start, size, stride = (
            _padded([box[place] for box in self._boxes], width, fill) for place, fill in ((0, 0), (1, 1), (2, 0))
        )
        add = np.array([one[6] for one in self._scalars], dtype=np.float64)
        shards = Shards(atom, tensor, first, step, holders, offset, start, size, stride, add)
        return Layout(
            self._title,
            self._atoms,
            self._ranks,
            tuple(self._tensors),
            tuple(self._classes),
            tuple(self._group_ranks),
            shards,
        )


def _padded(rows: Sequence[tuple[int, ...]], width: int, fill: int) -> Ints:
    return np.array([(*row, *(fill,) * (width - len(row))) for row in rows], dtype=np.int64).reshape(-1, width)


def side_of(row: Row, sides: Sequence[str]) -> str | None:
    """The first of `sides` that the row has a column for."""
    return next((side for side in sides if side in row.held), None)
