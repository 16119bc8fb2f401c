"""Which keys name files, and what a relative one is relative to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PATHS = ("data.source", "eval.source", "model.path")
_BUILTIN = ("smollm2", "math_verify", "reasoning_gym")


def resolve_path(key: str, value: Any, base: Path) -> Any:
    """`value` of `key` with the file it names made absolute; names of other things, and other keys, stay."""
    if key in _PATHS and isinstance(value, str):
        return _resolve(value, base)
    if key in ("model.map", "sync.directory") and isinstance(value, str):
        return os.path.abspath(base / Path(value).expanduser())
    if key == "engine.python" and isinstance(value, str):
        # Not its real path: a virtual environment's interpreter is a link. A bare name is looked up in PATH.
        return os.path.abspath(base / Path(value).expanduser()) if os.sep in value else value
    if key == "reward.functions" and isinstance(value, list):
        return [_resolve_function(item, base) if isinstance(item, str) else item for item in value]
    return value


def resolve_paths(raw: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """A copy of the nested `raw` with every file it names made absolute."""
    return {
        section: {name: resolve_path(f"{section}.{name}", value, base) for name, value in table.items()}
        if isinstance(table, dict)
        else table
        for section, table in raw.items()
    }


def _resolve(value: str, base: Path) -> str:
    path = os.path.abspath(base / Path(value).expanduser())
    # A hub name looks like a relative path too: it is one only when that file exists, or when its spelling says so.
    spelt = value.startswith(("./", "../", "~/")) or value.endswith((".jsonl", ".json", ".parquet", ".py"))
    return path if value and value not in _BUILTIN and (spelt or os.path.exists(path)) else value


def _resolve_function(value: str, base: Path) -> str:
    file, colon, function = value.rpartition(":")
    return f"{_resolve(file, base)}:{function}" if colon and file.endswith(".py") else value
