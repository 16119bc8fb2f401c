"""What of a model can be inferred: blocks where names and shapes match, rows where shapes tell, and what is left."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from stretto.models.description import Description
from stretto.models.language import Row
from stretto.models.scaffold.factors import Sizes, sizes_of
from stretto.models.scaffold.layer import layer_parts
from stretto.models.scaffold.outside import outside_parts
from stretto.models.scaffold.parts import Part, Pool
from stretto.models.scaffold.stacks import Kind, patterns, sort


@dataclass(frozen=True)
class Layer:
    """The parts of the layers of one kind."""

    numbers: tuple[int, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Draft:
    """A map so far: parts outside and inside of layers, and ``name [shape]`` of what is not inferred."""

    described: Description
    sizes: Sizes
    prefix: str
    layers: tuple[Layer, ...]
    outside: tuple[Part, ...]
    unresolved: tuple[str, ...]

    @property
    def rows(self) -> Iterator[Row]:
        """Every row, without the prefix of layers."""
        for one in (*self.outside, *(part for layer in self.layers for part in layer.parts)):
            yield from one.rows

    @property
    def without_megatron(self) -> list[str]:
        """Names of pieces that have no Megatron column yet."""
        lacking = (piece.name for one in self.rows if "megatron" not in one.held for piece in one.pieces)
        return list(dict.fromkeys(lacking))


def begin(described: Description) -> Draft:
    """Infer what names, shapes and the configuration tell."""
    c = described.config.get_text_config()
    count = getattr(c, "num_hidden_layers", 0)
    stacks = sort(described.files, described.memory, count)
    kinds = stacks.kinds
    tensors = [*stacks.files.values(), *(one for kind in kinds for one in kind.files.values())]
    sizes = sizes_of(c, (length for one in tensors for length in one.shape))
    layers: list[Layer] = []
    unresolved: list[str] = []
    for kind in kinds:
        pool = Pool(kind.files, kind.memory, sizes.lengths)
        layer_parts(
            pool, sizes, *(_local(names, stacks.prefix, kind) for names in (described.centred, described.transposed))
        )
        if pool.parts:
            layers.append(Layer(kind.numbers, tuple(pool.parts)))
        unresolved += _left(pool, f"{stacks.prefix}{{layer}}.")
    pool = Pool(stacks.files, stacks.memory, sizes.lengths)
    outside_parts(pool, described, sizes)
    return Draft(
        described,
        sizes,
        f"{stacks.prefix}{{layer}}." if stacks.prefix else "",
        tuple(layers),
        tuple(pool.parts),
        tuple(dict.fromkeys([*unresolved, *_left(pool, "")])),
    )


def _local(names: Iterable[str], prefix: str, kind: Kind) -> frozenset[str]:
    start = f"{prefix}{kind.numbers[0]}."
    return frozenset(name.removeprefix(start) for name in names if name.startswith(start))


def _left(pool: Pool, prefix: str) -> list[str]:
    """What no part took; a tensor that memory alone has is said to be there."""
    files = patterns({prefix + name: one for name, one in pool.files.items()})
    memory = patterns({prefix + name: one for name, one in pool.memory.items() if pool.files.get(name) != one})
    return [*files, *(f"{one} in memory" for one in memory)]
