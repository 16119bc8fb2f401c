"""Dividing a factor over ranks."""

from __future__ import annotations

from stretto.sync.storage import Range

_MEANING = {
    "v": "vocabulary rows",
    "g": "kv heads",
    "q": "query heads of a kv head",
    "n": "heads",
    "a": "key heads",
    "f": "MLP rows",
    "s": "shared expert rows",
    "e": "experts",
    "m": "rows of an expert",
}


def even_range(count: int, parts: int, index: int, who: str, factor: str) -> Range:
    """Part `index` of `parts` equal ones. Raises ValueError when they are not equal."""
    if count % parts:
        raise ValueError(f"{who} does not divide the model's {count} {_MEANING[factor]}; use a divisor of {count}")
    size = count // parts
    return size * index, size * (index + 1)


def padded(count: int, multiple: int) -> int:
    """`count` rounded up to a multiple."""
    return -(-count // multiple) * multiple
