"""Views of local tensors as a program means them, and copying between views."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.sync.binding import unlike
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
        self._seen: dict[tuple[int, str], tuple[Tensor, int]] = {}
        """The contiguous tensors of the last run and where they were."""
        self._copies: list[tuple[Tensor, Tensor]] = []
        self.generation = 0
        """Counts how often a view was made anew: what is kept of views is good while it stays."""

    @torch.no_grad()  # else the local part of a sharded tensor is made anew every time it is asked for
    def bind(self, tensors: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Take the tensors of this run, by rank and name.

        Raises ValueError when one is missing, or has not the shape and the dtype that the layout says.
        """
        self._copies.clear()
        for key in self._ends:
            rank, name = key
            if name not in tensors.get(rank, ()):
                raise ValueError(f"{self._side} has no tensor {name} at rank {rank}")
            tensor = tensors[rank][name]
            # The usual case has to be quick: every tensor of the model passes here at every step.
            given, seen = local_part(tensor), self._seen.get(key)
            if seen is None or seen[0] is not tensor or seen[1] != given.data_ptr():
                self._bind(key, tensor, given.detach())

    def _bind(self, key: tuple[int, str], tensor: Tensor, given: Tensor) -> None:
        self._seen.pop(key, None)
        self._check(key, given)
        flat = given.contiguous()
        if flat.data_ptr() != given.data_ptr():
            self._copies.append((given, flat))
        else:
            self._seen[key] = (tensor, flat.data_ptr())
        if self._bound.get(key) != flat.data_ptr():
            self._views.update({move: view(flat, end, size) for move, end, size in self._ends[key]})
            self._bound[key] = flat.data_ptr()
            self.generation += 1

    def _check(self, key: tuple[int, str], given: Tensor) -> None:
        rank, name = key
        if line := unlike(name, given, self._specs[rank][name]):
            raise ValueError(f"{self._side}: {line}")

    def write_back(self) -> None:
        """Bring what was written into contiguous copies to the tensors themselves."""
        for given, flat in self._copies:
            given.copy_(flat)

    def __getitem__(self, move: Move) -> Tensor:
        return self._views[id(move)]


def view(flat: Tensor, end: End, size: Sequence[int]) -> Tensor:
    """The elements of a contiguous tensor that an end means."""
    return torch.as_strided(flat, size, end.stride, flat.storage_offset() + end.offset)


class Copies:
    """Copies from views to views, sorted once by how they are best made.

    A cast, or a shift, is computed in float32 (or wider) and rounded once.
    """

    def __init__(self, targets: Sequence[Tensor], sources: Sequence[Tensor], shifts: Sequence[float]):
        self._shifted: list[tuple[Tensor, Tensor, float]] = []
        # One strided tensor in a list makes torch copy all of them one by one; contiguous ones alone take one kernel.
        self._flat: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._strided: tuple[list[Tensor], list[Tensor]] = ([], [])
        for target, source, shift in zip(targets, sources, shifts, strict=True):
            if shift:
                self._shifted.append((target, source, shift))
                continue
            pair = self._flat if target.is_contiguous() and source.is_contiguous() else self._strided
            pair[0].append(target)
            pair[1].append(source)

    def run(self) -> None:
        """Make them."""
        together: Any = torch
        for targets, sources in (self._flat, self._strided):
            if targets:
                together._foreach_copy_(targets, sources)
        for target, source, shift in self._shifted:
            target.copy_(source.to(torch.promote_types(source.dtype, torch.float32)) + shift)


def copy(targets: Sequence[Tensor], sources: Sequence[Tensor], shifts: Sequence[float]) -> None:
    """Copy each source to its target, once."""
    Copies(targets, sources, shifts).run()
