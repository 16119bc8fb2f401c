"""Sizes of factors as expressions of a configuration, and axes as products of factors, found by length and by name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from stretto.models.blocks import heads

_KEYS = {
    "p": ("max_position_embeddings", "n_positions"),
    "f": ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "d_ff"),
    "e": ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
    "m": ("moe_intermediate_size", "expert_intermediate_size", "intermediate_size"),
    "s": ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size"),
}
_QUERY = re.compile(r"(^|\.)(q_proj|query|q_lin|wq|q)\.")
_KEY_OR_VALUE = re.compile(r"(^|\.)(k_proj|v_proj|key|value|k_lin|v_lin|wk|wv|k|v)\.")
_OUTPUT = re.compile(r"(^|\.)(o_proj|out_proj|dense|c_proj|out_lin|wo|o)\.")
NORM = re.compile(r"norm|(^|\.)ln_?\w*\.|layer_?norm", re.IGNORECASE)
_ATTENTION = re.compile(r"attn|attention")


@dataclass(frozen=True)
class Sizes:
    """Lengths of factors, and for those that are not of grouped-query attention the expression that gives them."""

    lengths: Mapping[str, int]
    expressions: Mapping[str, str]
    grouped: bool

    def of(self, axes: str) -> int:
        """Length of a product of factors, 0 when one is not known."""
        product = 1
        for factor in axes.strip("()").split():
            product *= int(factor) if factor.isdigit() else self.lengths.get(factor, 0)
        return product


def sizes_of(config: Any, lengths: Iterable[int]) -> Sizes:
    """The factors of a configuration; a key counts when some axis has its length, one of `lengths`."""
    seen = set(lengths)
    known: dict[str, tuple[str, int]] = {}
    if value := _whole(config, "vocab_size"):
        known["v"] = ("c.vocab_size", value)
    for factor, keys in _KEYS.items():
        for key in keys:
            if (value := _whole(config, key)) and value in seen:
                known[factor] = (f"c.{key}", value)
                break
    hidden = _whole(config, "hidden_size")
    if "f" not in known and hidden and 4 * hidden in seen:
        known["f"] = ("4 * c.hidden_size", 4 * hidden)
    if "s" not in known and (shared := _shared(config, seen)):
        known["s"] = shared
    lengths_of = {factor: value for factor, (_, value) in known.items()}
    expressions = {factor: expression for factor, (expression, _) in known.items()}
    if grouped := _heads(config):
        return Sizes({**lengths_of, **grouped}, expressions, True)
    if hidden:
        lengths_of["h"], expressions["h"] = hidden, "c.hidden_size"
    return Sizes(lengths_of, expressions, False)


def _whole(config: Any, key: str) -> int | None:
    try:
        value = getattr(config, key, None)
    except Exception:  # transformers refuses a key that each layer has its own value of
        return None
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _shared(config: Any, seen: set[int]) -> tuple[str, int] | None:
    for count in ("n_shared_experts", "num_shared_experts"):
        for rows in ("moe_intermediate_size", "intermediate_size"):
            number, length = _whole(config, count), _whole(config, rows)
            if number and length and number * length in seen:
                return f"c.{count} * c.{rows}", number * length
    return None


def _heads(config: Any) -> dict[str, int] | None:
    """Sizes of grouped-query attention, where the configuration has them as whole numbers."""
    try:
        found = heads(config)
    except Exception:  # without the keys, with one of each layer, or refusing in a way of its own
        return None
    return found if all(isinstance(value, int) and value > 0 for value in found.values()) else None


def axes_of(name: str, shape: tuple[int, ...], sizes: Sizes, *, transposed: bool = False) -> str | None:
    """The axes of a tensor as a piece writes them; None when a length has no factor, or several that differ in kind.

    `transposed` when its rows are inputs.
    """
    if not shape:
        return None
    lengths = shape[::-1] if transposed else shape
    found = [_axis(name, place, len(shape), length, sizes) for place, length in enumerate(lengths)]
    return None if None in found else " ".join(axis for axis in (found[::-1] if transposed else found) if axis)


def _axis(name: str, place: int, rank: int, length: int, sizes: Sizes) -> str | None:
    fits = [axes for axes in _candidates(name, place, rank) if sizes.of(axes) == length]
    if length == 1:
        return "1"
    return fits[0] if len(fits) == 1 or (fits and NORM.search(name)) else None


def _candidates(name: str, place: int, rank: int) -> tuple[str, ...]:
    """What an axis can be, by the name of its tensor. Only for norms does the order count: they are never cut."""
    if NORM.search(name):
        return ("h", "d", "(g q d)", "(g d)", "f")
    if _ATTENTION.search(name):
        if _OUTPUT.search(name):
            return ("(g q d)",) if rank == 2 and place == 1 else ("h",)
        if rank == 2 and place == 1:
            return ("h",)
        if _QUERY.search(name):
            return ("(g q d)",)
        return ("(g d)",) if _KEY_OR_VALUE.search(name) else ()
    if "expert" in name:
        return ("h", "m")
    if re.search(r"mlp|ffn|feed_forward|\bff\b|\bfc\d?\b", name):
        return ("e", "h") if re.search(r"gate\.|router", name) else ("h", "f")
    if "position" in name or "wpe" in name:
        return ("p", "h")
    return ("v", "h") if re.search(r"emb|head|wte|output", name) else ()
