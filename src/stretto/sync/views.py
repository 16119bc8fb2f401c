"""Views of local tensors as a program means them, and copying between views."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.sync.layout import Layout
from stretto.sync.program import End, Move
from stretto.world import local_part


class Views:
    """The view of one local tensor for each move, made once and made anew when a tensor has moved.

    Ends are offsets and strides into contiguous storage; a tensor that is not contiguous is copied to a contiguous one
    at every `bind`, and back from it by `write_back`.
    """

    def __init__(self, side: str, layout: Layout, ends: Iterable[tuple[Move, End]]):
        self._side = f"the {side} {layout.title}"
        self._ends: dict[tuple[int, str], list[tuple[int, End, tuple[int, ...]]]] = {}
        for move, end in ends:
            self._ends.setdefault((end.rank, end.tensor), []).append((id(move), end, move.size))
        self._specs = {rank: layout.local(rank) for rank in {rank for rank, _ in self._ends}}
        self._views: dict[int, Tensor] = {}
        self._bound: dict[tuple[int, str], int] = {}
        self._copies: list[tuple[Tensor, Tensor]] = []
        self.generation = 0
        """Counts how often a view was made anew: what is kept of views is good while it stays."""

    def bind(self, tensors: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Take the tensors of this run, by rank and name.

        Raises ValueError when one is missing, or has not the shape and the dtype that the layout says.
        """
        self._copies.clear()
        for (rank, name), ends in self._ends.items():
            if name not in tensors.get(rank, ()):
                raise ValueError(f"{self._side} has no tensor {name} at rank {rank}")
            given = local_part(tensors[rank][name].detach())
            flat = given.contiguous()
            if flat is not given and flat.data_ptr() != given.data_ptr():
                self._copies.append((given, flat))
            real = tuple(given.shape), str(given.dtype).removeprefix("torch.")
            if real != (said := self._specs[rank][name]):
                raise ValueError(
                    f"{self._side}: {name} is {list(real[0])} {real[1]} and its layout says {list(said[0])} {said[1]}"
                )
            if self._bound.get((rank, name)) != flat.data_ptr():
                self._views.update({move: view(flat, end, size) for move, end, size in ends})
                self._bound[rank, name] = flat.data_ptr()
                self.generation += 1

    def write_back(self) -> None:
        """Bring what was written into contiguous copies to the tensors themselves."""
        for given, flat in self._copies:
            given.copy_(flat)

    def __getitem__(self, move: Move) -> Tensor:
        return self._views[id(move)]


def view(flat: Tensor, end: End, size: Sequence[int]) -> Tensor:
    """The elements of a contiguous tensor that an end means."""
    return torch.as_strided(flat, size, end.stride, flat.storage_offset() + end.offset)


def copy(targets: Sequence[Tensor], sources: Sequence[Tensor], shifts: Sequence[float]) -> None:
    """Copy each source to its target. A cast, or a shift, is computed in float32 (or wider) and rounded once."""
    plain = [k for k, shift in enumerate(shifts) if not shift]
    if plain:
        many: Any = torch
        many._foreach_copy_([targets[k] for k in plain], [sources[k] for k in plain])
    for target, source, shift in zip(targets, sources, shifts, strict=True):
        if shift:
            target.copy_(source.to(torch.promote_types(source.dtype, torch.float32)) + shift)
