"""Validation errors in words: the key, what it was given, what it accepts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from stretto.config.keys import find_key, keys, nearest, sections


def problems_of(error: ValidationError) -> list[str]:
    """One line for each thing that is wrong, in the order of the file."""
    return [line for details in error.errors(include_url=False) for line in _lines(details)]


def unknown_key(name: str) -> str:
    """The line for a key that does not exist."""
    if name in sections():
        return f"{name} is a section; its keys are {_keys_of(name)}"
    return f"unknown key {name}; the nearest keys are {', '.join(nearest(name, keys()))}"


def _lines(details: ErrorDetails) -> Iterator[str]:
    name, kind, given = ".".join(map(str, details["loc"])), details["type"], details["input"]
    if kind == "value_error":
        yield from str(details.get("ctx", {})["error"]).splitlines()
    elif kind == "extra_forbidden":
        yield from (unknown_key(leaf) for leaf in _leaves(name, given))
    elif kind == "missing":
        wanted = (key for key in keys().values() if key.name == name or key.name.startswith(f"{name}."))
        yield from (f"{key.name} is missing; it is {key.accepts}. {key.sentence}" for key in wanted if key.required)
    elif name in sections():
        yield f"{name} is {_show(given)}; it must be a section with the keys {_keys_of(name)}"
    else:
        yield _wrong_value(details)


def _wrong_value(details: ErrorDetails) -> str:
    *_, key = (key for end in range(1, len(details["loc"]) + 1) if (key := find_key(_dotted(details["loc"][:end]))))
    place = "".join(f"[{part}]" for part in details["loc"][key.name.count(".") + 1 :])
    finite = " and finite" if details["type"] == "finite_number" else ""
    return f"{key.name}{place} is {_show(details['input'])}; {key.name} must be {key.accepts}{finite}"


def _dotted(location: tuple[int | str, ...]) -> str:
    return ".".join(map(str, location))


def _keys_of(section: str) -> str:
    return ", ".join(name for name in keys() if name.startswith(f"{section}."))


def _leaves(name: str, value: Any) -> Iterator[str]:
    """The dotted names below an unknown table, so that `[trainr] lr` is answered with `trainer.lr`."""
    if isinstance(value, dict) and value:
        for child, below in value.items():
            yield from _leaves(f"{name}.{child}", below)
    else:
        yield name


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
