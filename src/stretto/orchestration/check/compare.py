"""Holding tensors against each other: a rank's against what its layout reads of a checkpoint, files against files."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto.sync.files import CheckpointFiles
from stretto.sync.fill import Filler, Read
from stretto.sync.layout import Layout
from stretto.world import local_part


def scratch(filler: Filler, tensors: Mapping[str, Tensor], read: Read) -> dict[str, Tensor]:
    """Tensors like `tensors`, filled anew; NaN where the checkpoint has nothing (padded rows of the vocabulary)."""
    made = {name: torch.full_like(local_part(one.detach()), torch.nan) for name, one in tensors.items()}
    filler.fill(made, read)
    return made


def same(found: Tensor, expected: Tensor, *, rounded: bool = False) -> bool:
    """Whether the values are bitwise equal wherever `expected` is not NaN; to a rounding of float32 when `rounded`."""
    known = ~expected.isnan()
    if rounded:
        return bool(torch.isclose(found[known].float(), expected[known].float(), rtol=1e-6, atol=1e-6).all())
    return bool((found == expected)[known].all())


def shifted_tensors(layout: Layout) -> set[str]:
    """Names of local tensors whose values are not the checkpoint's own: there a round trip may round."""
    moved = np.unique(layout.shards.tensor[layout.shards.add != 0])
    return {name for index in moved for name in layout.tensors[index].names()}


def of_gradients(layout: Layout) -> Layout:
    """The same boxes of gradients: float32, and nothing is added to them."""
    shards = layout.shards._replace(add=np.zeros_like(layout.shards.add))
    return replace(layout, shards=shards, tensors=tuple(replace(one, dtype="float32") for one in layout.tensors))


def checkpoint_names(layout: Layout, local: str) -> list[str]:
    """Pieces of the checkpoint that a local tensor (of any rank) holds; numbered ones have their number in braces."""
    indices = [index for index, one in enumerate(layout.tensors) if local in one.names()]
    atoms = np.unique(layout.shards.atom[np.isin(layout.shards.tensor, indices)])
    return [layout.atoms.names[atom] for atom in atoms]


def as_held(value: Tensor, holder: Layout, files: Layout, name: str) -> Tensor:
    """The value that a tensor of the checkpoint has after `holder` held it in its own dtype, in float32."""
    index = next(index for index, one in enumerate(files.tensors) if name in one.names())
    atoms = np.unique(files.shards.atom[files.shards.tensor == index])
    rows = np.nonzero(np.isin(holder.shards.atom, atoms))[0]
    adds = {float(add) for add in holder.shards.add[rows]}
    dtypes = {holder.tensors[tensor].dtype for tensor in holder.shards.tensor[rows]}
    if len(adds) != 1 or len(dtypes) != 1:
        return value.float()
    (add,), (dtype,) = adds, dtypes
    held = value.float() + add if add else value
    return held.to(getattr(torch, dtype)).float() - add


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """A hash of each tensor's bytes, dtype and shape."""
    return {name: _digest(tensor) for name, tensor in tensors.items()}


def _digest(tensor: Tensor) -> str:
    held = local_part(tensor.detach()).contiguous().cpu()
    total = hashlib.blake2b(f"{held.dtype}{tuple(held.shape)}".encode(), digest_size=16)
    total.update(held.flatten().view(torch.uint8).numpy().data)
    return total.hexdigest()


class FileTensors(Mapping[str, Tensor]):
    """A checkpoint's tensors, read when they are looked at."""

    def __init__(self, files: CheckpointFiles):
        self._files = files

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._files.where:
            raise KeyError(name)
        return self._files.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files.where)

    def __len__(self) -> int:
        return len(self._files.where)


def first_named(text: str, names: Collection[str]) -> str | None:
    """The name that occurs first in a message; the longest of those that begin there."""
    found = [(text.find(name), -len(name), name) for name in names if name in text]
    return min(found)[2] if found else None


def relative(found: Any, expected: Any) -> float:
    """Largest difference of two lists of numbers, relative to the mean size of the second."""
    difference = np.abs(np.asarray(found) - np.asarray(expected))
    return float(difference.max() / np.abs(expected).mean()) if np.isfinite(difference).all() else float("inf")
