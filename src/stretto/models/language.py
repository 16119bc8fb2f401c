"""The language of weight maps: pieces of the checkpoint, their factors, and the tensors that each side makes of them.

A *piece* is a tensor of the checkpoint, or the part of one that some side holds apart. Its axes are products of named
factors, outermost first: ``"(g q d) h"`` says that the rows of q_proj are kv groups x queries per group x head dim. A
factor named in braces in the piece's name runs over tensors: ``experts.{e}.gate_proj.weight`` is one piece for all
experts.

The factors that tensor parallelism cuts have fixed letters: ``v`` vocabulary, ``g`` kv groups, ``n`` heads of latent
attention, ``a`` key heads of linear attention, ``f`` rows of an MLP, ``s`` rows of a shared expert; for experts ``e``
their number and ``m`` their rows. Any other letter is never cut.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

SIDES = ("checkpoint", "memory", "megatron", "te", "grouped", "engine")
"""The columns of a map: the files; transformers in memory (FSDP2 and embedded); Megatron-Core with its local layers,
with Transformer Engine's, and with grouped experts; SGLang and vLLM."""
MEGATRON_SIDES = ("megatron", "te", "grouped")
STAGES = ("layer", "first", "last")
"""Where Megatron's pipeline has a row."""

_BRACES = re.compile(r"\{(\w+)\}")
_AXIS = re.compile(r"\(([^)]*)\)|(\S+)")


@dataclass(frozen=True)
class Piece:
    """A tensor of the checkpoint, or a part of one.

    `dtype` when every side keeps this one, whatever it computes in; `buffer` for what is no parameter: FSDP2 does not
    cut it.
    """

    name: str
    axes: str
    dtype: str | None = None
    buffer: bool = False

    @cached_property
    def factored(self) -> tuple[tuple[str, ...], ...]:
        """The factors of each axis, outermost first."""
        return tuple(tuple((group or single).split()) for group, single in _AXIS.findall(self.axes))

    @cached_property
    def spread(self) -> str | None:
        """The factor that runs over tensors, if there is one."""
        found = [name for name in _BRACES.findall(self.name) if name != "layer"]
        if len(found) > 1:
            raise ValueError(f"{self.name}: only one factor can run over tensors, and {', '.join(found)} are in braces")
        return found[0] if found else None

    @property
    def factors(self) -> tuple[str, ...]:
        """All factors: the one over tensors, then those of the axes."""
        return (*((self.spread,) if self.spread else ()), *(factor for axis in self.factored for factor in axis))


@dataclass(frozen=True)
class Held:
    """A tensor of one side: its pieces one after another along the first axis, for each index of the factors `per`.

    ``Held("linear_qkv.weight", per="g")`` of q, k, v: for each kv group its queries, its key, its value. A factor that
    runs over the checkpoint's tensors and is not in braces here is stacked as the tensor's first axis. `transpose`
    swaps the last two axes. The side's values are the checkpoint's plus `add` (a norm centred at zero, held as its
    whole weight, is +1). `order` says how the row factors behind `per` nest where they do not as in the checkpoint.
    """

    name: str
    per: str = ""
    transpose: bool = False
    add: float = 0.0
    order: str = ""


@dataclass(frozen=True)
class Row:
    """Some pieces and, for each side, the tensors that hold them.

    `held` has either one tensor for all pieces or one for each. A side that is left out does not have them. `cut` is
    False for what every tensor-parallel rank has whole. `stage` is where Megatron's pipeline has it: "first", "last",
    or "layer". A `tied` row is a copy that only pipeline parallelism makes: Megatron's last stage has the embedding
    again.
    """

    pieces: tuple[Piece, ...]
    held: Mapping[str, tuple[Held, ...]]
    cut: bool = True
    stage: str = "layer"
    tied: bool = False
    layers: tuple[int, ...] = ()

    def tensors(self, side: str) -> list[tuple[Held, tuple[Piece, ...]]]:
        """Each tensor of `side` with its pieces; empty when the side has none."""
        held = self.held.get(side, ())
        if len(held) == 1:
            return [(held[0], self.pieces)]
        return [(one, (piece,)) for one, piece in zip(held, self.pieces, strict=True)] if held else []


def row(
    *pieces: Piece,
    megatron: str | Held | Sequence[Held] | None = None,
    checkpoint: str | Held | Sequence[Held] | None = None,
    memory: str | Held | Sequence[Held] | None = None,
    engine: str | Held | Sequence[Held] | None = None,
    te: str | Held | Sequence[Held] | None = None,
    grouped: str | Held | Sequence[Held] | None = None,
    cut: bool = True,
    stage: str = "layer",
    tied: bool = False,
) -> Row:
    """A row. The checkpoint has each piece under its name unless said otherwise; memory and engine are like it.

    Without `megatron`, Megatron-Core has no such weight; `te` and `grouped` are given where they differ from it.
    """
    given = {
        "checkpoint": checkpoint or [Held(piece.name) for piece in pieces],
        "memory": memory or checkpoint or [Held(piece.name) for piece in pieces],
        "engine": engine or checkpoint or [Held(piece.name) for piece in pieces],
        "megatron": megatron,
        "te": te or megatron,
        "grouped": grouped or te or megatron,
    }
    sides = MEGATRON_SIDES if tied else SIDES
    held = {side: _tuple(value) for side in sides if (value := given[side]) is not None}
    _check_row(pieces, held, stage)
    return Row(pieces, held, cut, stage, tied)


def _check_row(pieces: Sequence[Piece], held: Mapping[str, Sequence[Held]], stage: str) -> None:
    """Raise ValueError, naming the row, for what can be wrong with it whatever the sizes are."""
    name = f"the row of {pieces[0].name}" if pieces else "a row"
    if not pieces:
        raise ValueError("a row needs at least one piece")
    if stage not in STAGES:
        raise ValueError(f"{name}: stage is {stage!r} and must be one of {', '.join(STAGES)}")
    for side, tensors in held.items():
        if len(tensors) not in (1, len(pieces)):
            raise ValueError(
                f"{name}: {side} has {len(tensors)} tensors for {len(pieces)} pieces; give one for all or one for each"
            )
    if len({piece.spread for piece in pieces}) > 1:
        raise ValueError(f"{name}: all its pieces or none must have the same factor in braces")


def _tuple(value: str | Held | Sequence[Held]) -> tuple[Held, ...]:
    if isinstance(value, str):
        return (Held(value),)
    return (value,) if isinstance(value, Held) else tuple(value)


def layers(
    indices: int | Iterable[int],
    rows: Iterable[Row],
    *,
    prefix: str = "model.layers.{layer}.",
    megatron: str = "decoder.layers.{layer}.",
    stage: str = "layer",
) -> list[Row]:
    """The rows of a layer, for every layer of `indices` (or of the first so many), with names below a prefix."""
    numbers = tuple(range(indices) if isinstance(indices, int) else indices)
    if not numbers:
        return []
    starts = {side: megatron if side in MEGATRON_SIDES else prefix for side in SIDES}
    return [
        replace(
            one,
            pieces=tuple(replace(piece, name=prefix + piece.name) for piece in one.pieces),
            held={s: tuple(replace(h, name=starts[s] + h.name) for h in held) for s, held in one.held.items()},
            layers=numbers,
            stage=stage,
        )
        for one in rows
    ]


@dataclass(frozen=True)
class WeightMap:
    """All weights of one model: the sizes of the factors, the rows, and names in the checkpoint that no side holds.

    `layer_count` is the decoder's, which pipeline stages share out. `megatron` are the settings of Megatron-Core's
    TransformerConfig that the family needs beside what its Hugging Face config says; None when Megatron-Core has no
    such model. `spelled` is, for an engine, what its names have instead of parts of the engine column's.
    `unresolved` are tensors for which a map that `stretto new-model` began has no row yet: until then it is refused.
    """

    family: str
    sizes: Mapping[str, int]
    rows: tuple[Row, ...]
    layer_count: int
    dropped: tuple[str, ...] = ()
    megatron: Mapping[str, Any] | None = field(default=None)
    spelled: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    unresolved: tuple[str, ...] = ()

    def size(self, factor: str) -> int:
        """How many values a factor has; a number stands for itself."""
        if factor.isdigit():
            return int(factor)
        if factor not in self.sizes:
            raise ValueError(
                f"the {self.family} map uses the factor {factor!r} and its sizes do not say how large it is"
            )
        return self.sizes[factor]

    def engine_name(self, backend: str, name: str) -> str:
        """A name of the engine column as the engine `backend` spells it."""
        for ours, theirs in self.spelled.get(backend, {}).items():
            name = name.replace(ours, theirs)
        return name

    def shape(self, piece: Piece) -> tuple[int, ...]:
        """Shape of a piece on its own."""
        return tuple(math.prod(self.size(factor) for factor in axis) for axis in piece.factored)

    def __str__(self) -> str:
        return "\n".join(_describe(one) for one in self.rows)


def _describe(one: Row) -> str:
    pieces = "\n".join(f"{piece.name}  [{piece.axes}]" for piece in one.pieces)
    sides = []
    for side, held in one.held.items():
        for h in held:
            marks = {"per": h.per, "order": h.order, "add": h.add, "transpose": h.transpose}
            shown = "".join(f"  {mark} {value}" for mark, value in marks.items() if value)
            sides.append(f"    {side:<10} {h.name}{shown}")
    return "\n".join((pieces, *sides))
