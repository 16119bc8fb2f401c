"""Which architectures the installed Megatron-Bridge knows, read from its sources (importing it takes a GPU)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

INSTALL = "pip install --no-deps megatron-bridge"


class Bridges(NamedTuple):
    """Version of megatron-bridge and the transformers classes that it registers a bridge for."""

    version: str
    architectures: frozenset[str]


def installed_bridges() -> Bridges | None:
    """What the installed megatron-bridge knows; None when it is not installed."""
    try:
        spec = find_spec("megatron.bridge")
        version = metadata.version("megatron-bridge")
    except (ModuleNotFoundError, metadata.PackageNotFoundError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    sources = Path(next(iter(spec.submodule_search_locations))).glob("models/**/*_bridge.py")
    return Bridges(version, frozenset(name for path in sources for name in _registered(path)))


def _registered(path: Path) -> Iterator[str]:
    """The `source` of each ``register_bridge(source=...)`` of a file: a class or its name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "register_bridge":
            for keyword in node.keywords:
                if keyword.arg == "source":
                    yield from _name(keyword.value)


def _name(value: ast.expr) -> Iterator[str]:
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield value.value
    elif isinstance(value, ast.Name):
        yield value.id
    elif isinstance(value, ast.Attribute):
        yield value.attr
