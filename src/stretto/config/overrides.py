"""Dotted overrides from the command line: `--trainer.lr 2e-5`, `--trainer.lr=2e-5`."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from typing import Any, get_origin

from stretto.config.keys import find_key

_WORDS = {"true": True, "false": False}


def split_overrides(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """(key, text) of each override. Raises ValueError for an argument that is none, or that lacks its value."""
    pairs: list[tuple[str, str]] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--"):
            raise ValueError(f"unexpected argument {argument}; an override looks like --trainer.lr 2e-5")
        key, equals, text = argument[2:].partition("=")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ValueError(f"--{key} needs a value: --{key} VALUE")
            text = rest.pop(0)
        pairs.append((key, text))
    return pairs


def parse_value(name: str, text: str) -> Any:
    """`text` as the type that the key `name` declares; text that is not of that type comes back as it is.

    Lists and tables are JSON or TOML. Entries of a free table (`data.args.size`) are any TOML value, else text.
    """
    key = find_key(name)
    assert key is not None, name
    if key.name != name:
        return _structure(text)
    if key.annotation is bool:
        return _WORDS.get(text.lower(), text)
    if key.annotation in (int, float):
        return _number(key.annotation, text)
    return _structure(text) if get_origin(key.annotation) in (list, tuple, dict) else text


def assign(raw: dict[str, Any], name: str, value: Any) -> None:
    """Put `value` at the dotted `name`; where a section is no table, leave it for the validation to report."""
    *path, leaf = name.split(".")
    table: Any = raw
    for part in path:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            return
    table[leaf] = value


def _number(kind: type[int] | type[float], text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        return text


def _structure(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        pass
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
