"""Megatron-Core: tensor, pipeline (virtual too), expert, expert tensor and data parallel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stretto.models.language import MEGATRON_SIDES, Row
from stretto.sync.layout import Atoms, Layout, LayoutBuilder, at_layer, side_of
from stretto.sync.layouts.cuts import even_range, padded
from stretto.sync.parallel import MegatronSizes
from stretto.sync.storage import Range, store

_TENSOR_CUT = "vgnafs"


def megatron_layout(atoms: Atoms, dtype: str, sizes: MegatronSizes) -> Layout:
    """The model weights of every rank, after any pending parameter all-gather; data parallel ranks are replicas.

    With more than one model chunk a rank, names begin with the chunk: ``vp1.decoder.layers.0...``. Raises ValueError
    when the sizes do not divide the model, or Megatron-Core has no such model.
    """
    return _Builder(atoms, dtype, sizes).run()


class _Builder:
    def __init__(self, atoms: Atoms, dtype: str, sizes: MegatronSizes):
        if atoms.weights.megatron is None:
            raise ValueError(
                f"the {atoms.weights.family} map has no Megatron-Core model; use the fsdp trainer, or give its "
                "WeightMap `megatron=` (the settings that TransformerConfig needs, {} when it computes as Llama)"
            )
        self._atoms, self._weights, self._sizes = atoms, atoms.weights, sizes
        self._build = LayoutBuilder(_title(sizes), atoms, sizes.ranks, dtype)
        self._layers = sizes.layers(self._weights.layer_count)
        self._sides = ("grouped",) if sizes.grouped_experts else ("te",) if sizes.te else ("megatron",)
        self._places = [sizes.place(rank) for rank in range(sizes.ranks)]

    def run(self) -> Layout:
        for stage in range(self._sizes.pp):
            ranks = [rank for rank, place in enumerate(self._places) if place["pp"] == stage]
            kind = self._build.new_class(ranks)
            for row in self._weights.rows:
                for layer, prefix, number in self._copies(row, stage):
                    self._add(row, kind, ranks, layer, prefix, number)
        return self._build.build()

    def _copies(self, row: Row, stage: int) -> Iterator[tuple[int | None, str, int | None]]:
        """Each time the stage has the row: the layer in the model, the chunk's prefix, and the layer's local number."""
        last = self._sizes.pp - 1
        if row.stage == "layer":
            for chunk, held in enumerate(self._layers[stage]):
                for number, layer in enumerate(held):
                    if layer in row.layers:
                        yield layer, self._prefix(chunk), number
        elif (row.stage == "first" and stage == 0) or (row.stage == "last" and stage == last):
            if row.tied and last == 0:
                return
            chunk = 0 if row.stage == "first" else self._sizes.vpp - 1
            for layer in row.layers or (None,):
                yield layer, self._prefix(chunk), layer

    def _prefix(self, chunk: int) -> str:
        return f"vp{chunk}." if self._sizes.vpp > 1 else ""

    def _add(
        self, row: Row, kind: int, ranks: Sequence[int], layer: int | None, prefix: str, number: int | None
    ) -> None:
        side = side_of(row, self._sides)
        if side is None:
            if side_of(row, MEGATRON_SIDES):
                raise ValueError(
                    f"megatron: {row.pieces[0].name} of {self._weights.family} is there only with Transformer Engine's "
                    "layers; set te"
                )
            return
        for held, pieces in row.tensors(side):
            factors = {factor for piece in pieces for factor in piece.factors}
            axes = self._cuts(row, factors)
            tensor = None
            for ranges, rows, holders in self._cells(axes, ranks):
                stored = store(self._weights, held, pieces, ranges, rows)
                if tensor is None:
                    name = prefix + at_layer(held.name, number)
                    tensor = self._build.tensor(kind, name, stored, pieces, stored.shape)
                for piece, view in zip(pieces, stored.views, strict=True):
                    self._build.shard(tensor, at_layer(piece.name, layer), view, held, self._build.group(holders))

    def _cuts(self, row: Row, factors: set[str]) -> dict[str, str]:
        """Which factor each parallel dimension cuts."""
        if not row.cut:
            return {}
        if "e" in factors:
            return {"ep": "e", **({"etp": "m"} if "m" in factors else {})}
        found = next((factor for factor in _TENSOR_CUT if factor in factors), None)
        return {"tp": found} if found else {}

    def _cells(
        self, axes: dict[str, str], ranks: Sequence[int]
    ) -> Iterator[tuple[dict[str, Range], int | None, list[int]]]:
        """For each distinct place in the cut dimensions: the ranges there, the padded rows, and the ranks there."""
        cells: dict[tuple[int, ...], list[int]] = {}
        for rank in ranks:
            cells.setdefault(tuple(self._places[rank][axis] for axis in axes), []).append(rank)
        for cell, holders in cells.items():
            ranges, rows = {}, None
            for (axis, factor), index in zip(axes.items(), cell, strict=True):
                count, parts = self._weights.size(factor), getattr(self._sizes, axis)
                if factor == "v":
                    rows = padded(count, self._sizes.vocab_divisor * parts) // parts
                    ranges[factor] = (min(count, rows * index), min(count, rows * (index + 1)))
                else:
                    ranges[factor] = even_range(count, parts, index, f"megatron: {axis}={parts}", factor)
            yield ranges, rows, holders


def _title(sizes: MegatronSizes) -> str:
    """The sizes that are not their defaults."""
    usual = MegatronSizes()
    shown = [f"{name}={value}" for name, value in vars(sizes).items() if value != getattr(usual, name)]
    return f"megatron({', '.join(shown) or 'tp=1'})"
