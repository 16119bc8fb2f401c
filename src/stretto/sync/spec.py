"""The sides of a plan as one writes them on a command line: ``megatron:tp=4,pp=2,ep=8``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stretto.data.nearest import listed
from stretto.sync.layout import ITEM_BYTES, Atoms, Layout
from stretto.sync.layouts import (
    EngineSizes,
    checkpoint_layout,
    engine_layout,
    fsdp_layout,
    megatron_layout,
    replica_layout,
)
from stretto.sync.parallel import MegatronSizes

_SWITCH = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("a whole number of at least 1")
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    if not all(part.isdecimal() and int(part) for part in text.split("/")):
        raise ValueError("whole numbers of at least 1 with slashes between them, as in 8/8/7/7")
    return tuple(int(part) for part in text.split("/"))


def _switch(text: str) -> bool:
    if text.lower() not in _SWITCH:
        raise ValueError("1 or 0")
    return _SWITCH[text.lower()]


def _dtype(text: str) -> str:
    if text not in ITEM_BYTES:
        raise ValueError(f"one of {', '.join(ITEM_BYTES)}")
    return text


_MEGATRON: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("tp", "pp", "vpp", "ep", "etp", "dp", "vocab_divisor"), _count),
    "pp_layers": _counts,
    **dict.fromkeys(("te", "grouped"), _switch),
}
_ENGINE: dict[str, Callable[[str], Any]] = dict.fromkeys(("tp", "ep", "replicas"), _count)
_KEYS: Mapping[str, Mapping[str, Callable[[str], Any]]] = {
    "megatron": _MEGATRON,
    "fsdp": {"ranks": _count, "dp": _count},
    "checkpoint": {},
    "embedded": {"replicas": _count},
    "sglang": _ENGINE,
    "vllm": _ENGINE,
}


@dataclass(frozen=True)
class Side:
    """One side of a plan: its name, its sizes, and the dtype it holds where it is not the other's."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: str | None = None

    def layout(self, atoms: Atoms, dtype: str) -> Layout:
        """The shards of every rank. Raises ValueError when the sizes do not divide the model."""
        dtype, options = self.dtype or dtype, dict(self.options)
        if self.name == "megatron":
            return megatron_layout(atoms, dtype, self.megatron)
        if self.name == "fsdp":
            return fsdp_layout(atoms, dtype, options.get("ranks", options.get("dp", 1)))
        if self.name == "checkpoint":
            return checkpoint_layout(atoms, dtype)
        if self.name == "embedded":
            return replica_layout(atoms, dtype, options.get("replicas", 1))
        return engine_layout(atoms, dtype, EngineSizes(self.name, **options))

    @property
    def megatron(self) -> MegatronSizes:
        """The sizes of a Megatron side."""
        options = dict(self.options)
        return MegatronSizes(grouped_experts=options.pop("grouped", False), **options)

    def uneven(self, layers: int) -> tuple[int, ...] | None:
        """Layers of each (virtual) stage when they do not divide and nobody said how to cut them; else None."""
        if self.name != "megatron" or self.megatron.pp_layers:
            return None
        stages = self.megatron.layers(layers)
        sizes = tuple(len(stage[chunk]) for chunk in range(self.megatron.vpp) for stage in stages)
        return sizes if len(set(sizes)) > 1 else None


def parse_side(text: str) -> Side:
    """Read ``NAME`` or ``NAME:KEY=VALUE,...``; a switch may stand alone (``te``), and `dtype` goes with every side.

    Raises ValueError for an unknown side or key, with the nearest one, and for a value that the key does not take.
    """
    name, _, rest = text.partition(":")
    if name not in _KEYS:
        raise ValueError(f"there is no side {name!r} {listed(name, _KEYS)}")
    keys = {**_KEYS[name], "dtype": _dtype}
    values: dict[str, Any] = {}
    for word in rest.split(",") if rest else ():
        key, equals, value = word.partition("=")
        if key not in keys:
            raise ValueError(f"{name} has no key {key!r} {listed(key, keys)}")
        if key in values:
            raise ValueError(f"{name}: {key} is given twice")
        if not equals and keys[key] is _switch:
            value = "1"
        try:
            values[key] = keys[key](value)
        except ValueError as wanted:
            raise ValueError(f"{name}: {key} is {value!r}; it must be {wanted}") from None
    if {"ranks", "dp"} <= values.keys():
        raise ValueError("fsdp: ranks and dp are two names of one number; leave one out")
    dtype = values.pop("dtype", None)
    side = Side(name, values, dtype)
    if name == "megatron":
        _ = side.megatron  # sizes that do not fit each other are refused before a model is read
    return side
