"""What every rank of a side holds, made slowly from whole tensors: by narrowing, permuting and concatenating them.

It knows the words of the map language and of the parallel sizes, and nothing of boxes, offsets or strides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.models.language import Held, Piece, Row, WeightMap
from stretto.sync.layout import Atoms, Layout
from stretto.sync.layouts import (
    EngineSizes,
    checkpoint_layout,
    engine_layout,
    fsdp_layout,
    megatron_layout,
    replica_layout,
)
from stretto.sync.parallel import MegatronSizes

Values = Mapping[str, Tensor]
"""Every piece of a model, by its name in the checkpoint, with an axis for each factor."""


@dataclass(frozen=True)
class Side:
    """One end of a plan: a kind of layout, how it is cut (for fsdp and embedded a number of ranks), and its dtype."""

    kind: str
    sizes: MegatronSizes | EngineSizes | int = 1
    dtype: str = "float32"

    def layout(self, atoms: Atoms) -> Layout:
        if isinstance(self.sizes, MegatronSizes):
            return megatron_layout(atoms, self.dtype, self.sizes)
        if isinstance(self.sizes, EngineSizes):
            return engine_layout(atoms, self.dtype, self.sizes)
        if self.kind == "fsdp":
            return fsdp_layout(atoms, self.dtype, self.sizes)
        if self.kind == "embedded":
            return replica_layout(atoms, self.dtype, self.sizes)
        return checkpoint_layout(atoms, self.dtype)

    @property
    def columns(self) -> tuple[str, ...]:
        """The column of the map."""
        if isinstance(self.sizes, MegatronSizes):
            return ("grouped",) if self.sizes.grouped_experts else ("te",) if self.sizes.te else ("megatron",)
        if isinstance(self.sizes, EngineSizes):
            return ("engine",)
        return ("checkpoint",) if self.kind == "checkpoint" else ("memory",)


@dataclass(frozen=True)
class Cut:
    """What a rank has of a row: for each factor which indices, rows of the padded vocabulary, and its layers.

    `layers` are (number in the model, number in the name, prefix of the name).
    """

    ranges: Mapping[str, range]
    rows: int | None
    layers: tuple[tuple[int | None, int | None, str], ...]


def numbered(name: str, layer: int | None) -> str:
    return name.replace("{layer}", str(layer))


def pieces_of(weights: WeightMap) -> dict[str, Piece]:
    """Every piece of every layer."""
    return {
        numbered(piece.name, layer): piece
        for row in weights.rows
        for layer in row.layers or (None,)
        for piece in row.pieces
    }


def random_values(weights: WeightMap, seed: int = 0) -> dict[str, Tensor]:
    """Random numbers for every piece, in float32, no two alike in a piece."""
    random = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn([weights.size(f) for f in piece.factors], generator=random)
        for name, piece in pieces_of(weights).items()
    }


def added(weights: WeightMap, side: Side) -> dict[str, float]:
    """What a side's values are more than the checkpoint's."""
    return {
        numbered(piece.name, layer): held.add
        for row in weights.rows
        for held, pieces in held_by(row, side)
        for layer in row.layers or (None,)
        for piece in pieces
    }


def held_by(row: Row, side: Side) -> list[tuple[Held, tuple[Piece, ...]]]:
    for column in side.columns:
        if column in row.held:
            held = row.held[column]
            return (
                [(held[0], row.pieces)]
                if len(held) == 1
                else [(h, (p,)) for h, p in zip(held, row.pieces, strict=True)]
            )
    return []


def local_tensors(weights: WeightMap, side: Side, rank: int, values: Values) -> dict[str, Tensor]:
    """The tensors of one rank, in the dtypes of `side`; rows of padding are NaN."""
    found: dict[str, Tensor] = {}
    for row in weights.rows:
        for held, pieces in held_by(row, side):
            cut = cut_of(weights, side, row, pieces, rank)
            for layer, number, prefix in cut.layers:
                name = prefix + numbered(held.name, number)
                if isinstance(side.sizes, EngineSizes):
                    name = weights.engine_name(side.sizes.backend, name)
                parts = [values[numbered(piece.name, layer)] for piece in pieces]
                whole = laid_out(held, pieces, parts, cut.ranges, cut.rows)
                dtype = getattr(torch, next((p.dtype for p in pieces if p.dtype), None) or side.dtype)
                for key, tensor in named(name, whole, pieces[0].spread, held):
                    assert key not in found, key
                    found[key] = row_chunk(tensor, side, pieces[0], rank).to(dtype)
    return found


def row_chunk(tensor: Tensor, side: Side, piece: Piece, rank: int) -> Tensor:
    """What FSDP2 leaves on a rank of a whole tensor."""
    if side.kind != "fsdp" or piece.buffer or not tensor.dim():
        return tensor
    assert isinstance(side.sizes, int)
    chunks = tensor.chunk(side.sizes)
    return chunks[rank] if rank < len(chunks) else tensor[:0]


def named(name: str, whole: Tensor, spread: str | None, held: Held) -> Iterator[tuple[str, Tensor]]:
    mark = f"{{{spread}}}"
    if spread is None or mark not in held.name:
        yield name, whole
        return
    for index, one in enumerate(whole.unbind(0)):
        yield name.replace(mark, str(index)), one


def laid_out(
    held: Held, pieces: tuple[Piece, ...], parts: list[Tensor], ranges: Mapping[str, range], rows: int | None
) -> Tensor:
    """The pieces one after another along the first axis, for each index of `per`; a factor over tensors is in front."""
    blocks = []
    for piece, value in zip(pieces, parts, strict=True):
        for place, factor in enumerate(piece.factors):
            if factor in ranges:
                value = value.narrow(place, ranges[factor].start, len(ranges[factor]))
        lead = 1 if piece.spread else 0
        first = list(piece.factored[0]) if piece.factored else []
        per = held.per.split()
        rest = [f for f in first if f not in per]
        if held.order:
            rest.sort(key=held.order.split().index)
        moved = [first.index(f) + lead for f in (*per, *rest)]
        tail = list(range(lead + len(first), value.dim()))
        value = value.permute((*range(lead), *moved, *tail))
        over = value.shape[:lead]
        groups = math.prod(value.shape[lead : lead + len(per)])
        width = math.prod(value.shape[lead + len(per) : lead + len(first)])
        axes, at = [], lead + len(first)
        for axis in piece.factored[1:]:
            axes.append(math.prod(value.shape[at : at + len(axis)]))
            at += len(axis)
        blocks.append(value.reshape(*over, groups, width, *axes))
    lead = 1 if pieces[0].spread else 0
    whole = torch.cat(blocks, dim=lead + 1).flatten(lead, lead + 1)
    if rows is not None:
        padding = torch.full((rows - whole.shape[0], *whole.shape[1:]), torch.nan)
        whole = torch.cat([whole.float(), padding])
    if len(pieces) == 1 and not pieces[0].factored:
        whole = whole.squeeze(lead)
    return whole.transpose(-1, -2) if held.transpose else whole


def cut_of(weights: WeightMap, side: Side, row: Row, pieces: tuple[Piece, ...], rank: int) -> Cut:
    factors = {factor for piece in pieces for factor in piece.factors}
    same = tuple((layer, layer, "") for layer in row.layers or (None,))
    if isinstance(side.sizes, MegatronSizes):
        return megatron_cut(weights, side.sizes, row, factors, rank)
    if isinstance(side.sizes, EngineSizes):
        ranges, rows = engine_ranges(weights, side.sizes, factors, rank % side.sizes.tp) if row.cut else ({}, None)
        return Cut(ranges, rows, same)
    return Cut({}, None, same)


def part(count: int, parts: int, index: int) -> range:
    """One of the equal parts of so many indices."""
    assert count % parts == 0, "sizes were chosen to divide"
    each = count // parts
    return range(each * index, each * (index + 1))


def vocabulary(count: int, multiple: int, parts: int, index: int) -> tuple[range, int]:
    """The real rows of a part of a padded vocabulary, and how many rows it has with the padding."""
    whole = count
    while whole % multiple or whole % parts:
        whole += 1
    rows = whole // parts
    real = [row for row in range(rows * index, rows * (index + 1)) if row < count]
    return (range(real[0], real[-1] + 1) if real else range(count, count)), rows


def engine_ranges(
    weights: WeightMap, sizes: EngineSizes, factors: set[str], place: int
) -> tuple[dict[str, range], int | None]:
    tp = sizes.tp
    if "e" in factors:
        among, inside = divmod(place, tp // sizes.ep)
        ranges = {"e": part(weights.size("e"), sizes.ep, among)}
        if "m" in factors:
            ranges["m"] = part(weights.size("m"), tp // sizes.ep, inside)
        return ranges, None
    if "v" in factors:
        real, rows = vocabulary(weights.size("v"), math.lcm(sizes.vocab_multiple, tp), tp, place)
        return {"v": real}, rows
    if "g" in factors and tp > (groups := weights.size("g")):
        copies = tp // groups
        return {
            "g": range(place // copies, place // copies + 1),
            "q": part(weights.size("q"), copies, place % copies),
        }, None
    cut = next((f for f in "gnafsm" if f in factors), None)
    return ({cut: part(weights.size(cut), tp, place)} if cut else {}), None


def megatron_places(sizes: MegatronSizes) -> list[dict[str, int]]:
    """Coordinates of each rank, in Megatron's order: tensor ranks are neighbours, then expert, data, pipeline."""
    dense = [
        {"pp": pp, "dp": dp, "tp": tp} for pp in range(sizes.pp) for dp in range(sizes.dp) for tp in range(sizes.tp)
    ]
    expert = [
        {"edp": edp, "ep": ep, "etp": etp}
        for _ in range(sizes.pp)
        for edp in range(sizes.tp * sizes.dp // sizes.ep // sizes.etp)
        for ep in range(sizes.ep)
        for etp in range(sizes.etp)
    ]
    return [{**one, **other} for one, other in zip(dense, expert, strict=True)]


def megatron_cut(weights: WeightMap, sizes: MegatronSizes, row: Row, factors: set[str], rank: int) -> Cut:
    at = megatron_places(sizes)[rank]
    layers = megatron_layers(weights, sizes, row, at["pp"])
    if not row.cut:
        return Cut({}, None, layers)
    if "e" in factors:
        ranges = {"e": part(weights.size("e"), sizes.ep, at["ep"])}
        if "m" in factors:
            ranges["m"] = part(weights.size("m"), sizes.etp, at["etp"])
        return Cut(ranges, None, layers)
    if "v" in factors:
        real, rows = vocabulary(weights.size("v"), sizes.vocab_divisor * sizes.tp, sizes.tp, at["tp"])
        return Cut({"v": real}, rows, layers)
    cut = next((f for f in "gnafs" if f in factors), None)
    return Cut({cut: part(weights.size(cut), sizes.tp, at["tp"])} if cut else {}, None, layers)


def megatron_layers(
    weights: WeightMap, sizes: MegatronSizes, row: Row, stage: int
) -> tuple[tuple[int | None, int | None, str], ...]:
    chunks = ["" if sizes.vpp == 1 else f"vp{chunk}." for chunk in range(sizes.vpp)]
    if row.stage == "first":
        return tuple((layer, layer, chunks[0]) for layer in row.layers or (None,)) if stage == 0 else ()
    if row.stage == "last":
        there = stage == sizes.pp - 1 and not (row.tied and sizes.pp == 1)
        return tuple((layer, layer, chunks[-1]) for layer in row.layers or (None,)) if there else ()
    order = [(chunk, one) for chunk in range(sizes.vpp) for one in range(sizes.pp)]
    counts = list(sizes.pp_layers) or [0] * len(order)
    while sum(counts) < weights.layer_count:  # the first stages get what is left
        for index in range(min(len(order), weights.layer_count - sum(counts))):
            counts[index] += 1
    found, layer = [], 0
    for (chunk, one), count in zip(order, counts, strict=True):
        found += [(layer + k, k, chunks[chunk]) for k in range(count) if one == stage and layer + k in row.layers]
        layer += count
    return tuple(found)
