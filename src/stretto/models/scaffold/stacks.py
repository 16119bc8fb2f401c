"""A model's tensors sorted into those of its layers, with numbers made letters, and the others."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from stretto.models.description import Tensor

NUMBERED = re.compile(r"(?<=\.)(\d+)(?=\.)")
_STACKED = re.compile(r"^((?:[^.\d][^.]*\.)+?)(\d+)\.(.+)$")


class Kind(NamedTuple):
    """Layers that have the same tensors: their numbers, and the tensors in files and in memory below the prefix."""

    numbers: tuple[int, ...]
    files: Mapping[str, Tensor]
    memory: Mapping[str, Tensor]


@dataclass(frozen=True)
class Stacks:
    """The decoder's layers by kind, and everything else. `prefix` is "" when no names look like layers."""

    prefix: str
    kinds: tuple[Kind, ...]
    files: Mapping[str, Tensor]
    memory: Mapping[str, Tensor]


def sort(files: Mapping[str, Tensor], memory: Mapping[str, Tensor], layer_count: int) -> Stacks:
    """Find the numbered names that are `layer_count` layers; numbers inside that run over tensors become {e}."""
    prefix = _decoder(memory, layer_count)
    if not prefix:
        return Stacks("", (), files, memory)
    stacked = [_below(prefix, one) for one in (files, memory)]
    kinds: dict[tuple[object, ...], list[int]] = {}
    for number in range(layer_count):
        parts = tuple(tuple(sorted(_folded(one.get(number, {})).items())) for one in stacked)
        kinds.setdefault(parts, []).append(number)
    found = tuple(
        Kind(tuple(numbers), *(_folded(one.get(numbers[0], {})) for one in stacked)) for numbers in kinds.values()
    )
    rest = [{name: one for name, one in side.items() if not _is_layer(name, prefix)} for side in (files, memory)]
    return Stacks(prefix, found, *rest)


def _decoder(names: Iterable[str], layer_count: int) -> str:
    """The prefix in front of the numbers 0 to `layer_count` - 1; of several the one with most tensors."""
    numbers: dict[str, list[int]] = {}
    for name in names:
        if found := _STACKED.match(name):
            numbers.setdefault(found[1], []).append(int(found[2]))
    layered = {prefix: len(seen) for prefix, seen in numbers.items() if set(seen) == set(range(layer_count))}
    return max(layered, key=lambda prefix: layered[prefix], default="")


def _is_layer(name: str, prefix: str) -> bool:
    return name.startswith(prefix) and name.removeprefix(prefix).partition(".")[0].isdigit()


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    layers: dict[int, dict[str, Tensor]] = {}
    for name, one in tensors.items():
        if _is_layer(name, prefix):
            number, _, rest = name.removeprefix(prefix).partition(".")
            layers.setdefault(int(number), {})[rest] = one
    return layers


def _folded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names that differ in one number alone as one name with {e} and a first axis: so many, of one shape and dtype."""
    runs: dict[str, dict[int, Tensor]] = {}
    for name, one in tensors.items():
        if found := NUMBERED.search(name):
            runs.setdefault(name[: found.start()] + "{e}" + name[found.end() :], {})[int(found[0])] = one
    folded = {name: one for name, one in tensors.items() if not NUMBERED.search(name)}
    for name, run in runs.items():
        shapes = set(run.values())
        if len(shapes) == 1 and set(run) == set(range(len(run))):
            shape, dtype = shapes.pop()
            folded[name] = Tensor((len(run), *shape), dtype)
        else:
            folded |= {name.replace("{e}", str(number)): one for number, one in run.items()}
    return folded


def patterns(tensors: Mapping[str, Tensor]) -> list[str]:
    """``name [shape]`` for each tensor, with numbers as {n} where that makes several one."""
    return list(dict.fromkeys(f"{NUMBERED.sub('{n}', name)} {list(one.shape)}" for name, one in tensors.items()))
