"""SGLang and vLLM: tensor and expert parallel ranks, and replicas of the whole."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from stretto.models.language import Piece, Row, WeightMap
from stretto.sync.layout import Atoms, Layout, LayoutBuilder, at_layer
from stretto.sync.layouts.cuts import even_range, padded
from stretto.sync.storage import Range, store

_TENSOR_CUT = "vgnafsm"


@dataclass(frozen=True)
class EngineSizes:
    """Parallel sizes of a rollout engine: `tp` ranks a replica, of which `ep` share out the experts.

    The rows of the embedding are padded to a multiple of `vocab_multiple` before they are cut; both engines use 64.
    """

    backend: str
    tp: int = 1
    ep: int = 1
    replicas: int = 1
    vocab_multiple: int = 64

    def __post_init__(self) -> None:
        small = [name for name in ("tp", "ep", "replicas") if getattr(self, name) < 1]
        if small:
            raise ValueError(f"{self.backend}: {', '.join(small)} must be at least 1")
        if self.tp % self.ep:
            raise ValueError(f"{self.backend}: ep={self.ep} does not divide tp={self.tp}")

    @property
    def ranks(self) -> int:
        """How many ranks hold weights."""
        return self.tp * self.replicas


def engine_layout(atoms: Atoms, dtype: str, sizes: EngineSizes) -> Layout:
    """Rank ``replica * tp + place``. Key and value heads are repeated when there are fewer than `tp`.

    Raises ValueError when the sizes do not divide the model.
    """
    title = f"{sizes.backend}(tp={sizes.tp}, ep={sizes.ep}, replicas={sizes.replicas})"
    build = LayoutBuilder(title, atoms, sizes.ranks, dtype)
    kind = build.new_class(range(sizes.ranks))
    for row in atoms.weights.rows:
        for held, pieces in row.tensors("engine"):
            stored = [
                (store(atoms.weights, held, pieces, ranges, rows), build.group(holders))
                for ranges, rows, holders in _cells(atoms.weights, sizes, row, pieces)
            ]
            for layer in row.layers or (None,):
                first = stored[0][0]
                tensor = build.tensor(
                    kind,
                    at_layer(atoms.weights.engine_name(sizes.backend, held.name), layer),
                    first,
                    pieces,
                    first.shape,
                )
                for cell, group in stored:
                    for piece, view in zip(pieces, cell.views, strict=True):
                        build.shard(tensor, at_layer(piece.name, layer), view, held, group)
    return build.build()


def _cells(
    weights: WeightMap, sizes: EngineSizes, row: Row, pieces: tuple[Piece, ...]
) -> Iterator[tuple[dict[str, Range], int | None, list[int]]]:
    """For each distinct place of a replica: the ranges there, the padded rows, and the ranks there."""
    factors = {factor for piece in pieces for factor in piece.factors}
    found = next((factor for factor in ("e", *_TENSOR_CUT) if factor in factors), None) if row.cut else None
    if found is None:
        yield {}, None, list(range(sizes.ranks))
        return
    for place in range(sizes.tp):
        ranges, rows = _ranges(weights, sizes, found, "m" in factors, place)
        yield ranges, rows, list(range(place, sizes.ranks, sizes.tp))


def _ranges(
    weights: WeightMap, sizes: EngineSizes, factor: str, expert_rows: bool, place: int
) -> tuple[dict[str, Range], int | None]:
    count, who = weights.size(factor), f"{sizes.backend}: tp={sizes.tp}"
    if factor == "v":
        rows = padded(count, math.lcm(sizes.vocab_multiple, sizes.tp)) // sizes.tp
        return {"v": (min(count, rows * place), min(count, rows * (place + 1)))}, rows
    if factor == "e":
        inner = sizes.tp // sizes.ep
        ranges = {"e": even_range(count, sizes.ep, place // inner, f"{sizes.backend}: ep={sizes.ep}", "e")}
        if expert_rows:
            ranges["m"] = even_range(weights.size("m"), inner, place % inner, who, "m")
        return ranges, None
    if factor == "g" and sizes.tp > count:
        if sizes.tp % count:
            raise ValueError(f"{who} is not a multiple of the model's {count} kv heads")
        inner = sizes.tp // count
        return {
            "g": (place // inner, place // inner + 1),
            "q": even_range(weights.size("q"), inner, place % inner, who, "q"),
        }, None
    return {factor: even_range(count, sizes.tp, place, who, factor)}, None
