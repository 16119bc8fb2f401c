"""Receiving a plan where the engine is: straight into its tensors, or through its own loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from stretto.sync.execute import Execution
from stretto.sync.layout import Layout
from stretto.sync.links import Link
from stretto.sync.windows import Part

Held = Callable[[], Mapping[str, Tensor]]
Load = Callable[[Iterable[tuple[str, Tensor]]], None]


class Receiving(Protocol):
    """One rank's part in every publication."""

    @property
    def touched(self) -> bool:
        """Whether the last run may have written into the engine's weights."""
        ...

    def run(self) -> int:
        """Receive one publication; returns the bytes that were written."""
        ...


class Direct:
    """Each piece goes from its slot into the engine's own parameter, at the address that it has."""

    def __init__(self, parts: list[Part], process: int, rank: int, link: Link, held: Held, *, checksums: bool):
        self._executions = [
            Execution(part.plan, process, dict, lambda: {rank: held()}, link=link, checksums=checksums)
            for part in parts
        ]
        self.touched = False

    def run(self) -> int:
        """See :class:`Receiving`."""
        self.touched = False
        written = 0
        for execution in self._executions:
            try:
                written += execution.run()
            finally:
                self.touched |= execution.touched
            execution.verify()
        return written


class Loading:
    """Whole tensors of the checkpoint, a part at a time, through the engine's loader in one call."""

    def __init__(
        self,
        parts: list[Part],
        process: int,
        rank: int,
        link: Link,
        load: Load,
        device: torch.device,
        *,
        checksums: bool,
    ):
        target = parts[0].plan.target
        self._load, self._device = load, device
        self._specs, self._copies = target.local(rank), head_copies(target)
        self._arriving: dict[str, Tensor] = {}
        self._parts = [
            (
                part.names,
                Execution(part.plan, process, dict, lambda: {rank: self._arriving}, link=link, checksums=checksums),
            )
            for part in parts
        ]
        self._written = 0
        self.touched = False

    def run(self) -> int:
        """See :class:`Receiving`."""
        self.touched, self._written = False, 0
        tensors = self._tensors()
        try:
            first = next(tensors)  # before the loader begins, which may take the old weights apart
            self.touched = True
            self._load(chain([first], tensors))
        finally:
            self._arriving = {}
        return self._written

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, in memory of its own: a loader may keep some until their module is whole."""
        for names, execution in self._parts:
            self._arriving = {name: self._empty(name) for name in names}
            self._written += execution.run()
            execution.verify()
            for name in names:
                yield name, self._arriving[name]
                if name in self._copies:
                    yield self._copies[name], self._arriving[name]

    def _empty(self, name: str) -> Tensor:
        shape, dtype = self._specs[name]
        return torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)


def head_copies(layout: Layout) -> dict[str, str]:
    """For a tied model, the name under which a loader takes the head, by that of the embedding.

    An engine may have made a packed copy of the head, which only a head that is loaded makes anew.
    """
    weights = layout.atoms.weights
    heads = [name for name in weights.dropped if name.endswith("lm_head.weight")]
    embeddings = [piece.name for row in weights.rows if row.tied for piece in row.pieces]
    return dict(zip(embeddings, heads, strict=False))
