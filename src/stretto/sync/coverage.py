"""Whether one side can fill the other: every element read, every element written, once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from itertools import pairwise

import numpy as np

from stretto.sync.boxes import meeting, members
from stretto.sync.layout import Ints, Layout

_SHOWN = 20


def check_atoms(source: Layout, target: Layout) -> None:
    """Raise ValueError unless both sides have the same pieces of the checkpoint; the message has both lists of names.

    No rank may have two tensors of one name.
    """
    has, wants = (set(np.unique(layout.shards.atom).tolist()) for layout in (source, target))
    names = source.atoms.names
    unwritten, unread = sorted(wants - has), sorted(has - wants)
    lines = [
        *differences("nothing fills the target's", [names[a] for a in unwritten], [names[a] for a in has]),
        *differences("nothing reads the source's", [names[a] for a in unread], [names[a] for a in wants]),
        *_twice(source),
        *_twice(target),
    ]
    if lines:
        _refuse(source, target, lines)


def _twice(layout: Layout) -> list[str]:
    """Names that two tensors of a rank have."""
    count = Counter((one.kind, one.name) for one in layout.tensors)
    names = dict.fromkeys(name for (_, name), times in count.items() if times > 1)
    return [f"{layout.title} has two tensors of the name {name}" for name in names]


def check_source(source: Layout, atom: Ints, start: Ints, size: Ints) -> None:
    """Raise ValueError unless the distinct boxes of each atom are disjoint and together the whole of it."""
    sizes = source.atoms.sizes
    volume = np.bincount(atom, weights=size.prod(axis=1), minlength=len(sizes))
    held = np.bincount(atom, minlength=len(sizes)) > 0
    wrong = np.nonzero(held & (volume != sizes.prod(axis=1)))[0]
    lines = [
        f"{source.atoms.names[a]}: its ranks hold {int(volume[a])} of {int(sizes[a].prod())} elements" for a in wrong
    ]
    known: dict[tuple[bytes, bytes], bool] = {}
    for a, (low, high) in enumerate(pairwise(np.searchsorted(atom, np.arange(len(sizes) + 1)))):
        key = start[low:high].tobytes(), size[low:high].tobytes()
        if key not in known:
            boxes = start[low:high], size[low:high]
            known[key] = len(meeting(*boxes, *boxes)[0]) > high - low
        if known[key]:
            lines.append(f"{source.atoms.names[a]}: two of its boxes overlap")
    if lines:
        raise ValueError(f"{source.title} does not hold the model once:\n  " + "\n  ".join(_some(lines)))


def check_filled(source: Layout, target: Layout, shard: Ints, size: Ints) -> None:
    """Raise ValueError unless the pieces of every target shard add up to it, and the shards of a rank to its tensors.

    Pieces come from disjoint boxes, so equal volumes mean that every element is written once. Rows of padding are
    nobody's.
    """
    shards = target.shards
    written = np.bincount(shard, weights=size.prod(axis=1), minlength=len(shards.atom))
    short = np.nonzero(written != shards.volume)[0]
    lines = [
        f"{target.tensors[shards.tensor[s]].name}: {int(written[s])} of {int(shards.volume[s])} elements of "
        f"{target.atoms.names[shards.atom[s]]} are written"
        for s in short
    ]
    lines += _unread(target) + _unfilled(target)
    if lines:
        _refuse(source, target, lines)


def _unread(target: Layout) -> list[str]:
    """Atoms of which the target's distinct boxes are not the whole."""
    shards = target.shards
    boxes = np.unique(np.concatenate([shards.atom[:, None], shards.start, shards.size], axis=1), axis=0)
    volume = boxes[:, 1 + target.atoms.width :].prod(axis=1)
    read = np.bincount(boxes[:, 0], weights=volume, minlength=len(target.atoms.names))
    whole = target.atoms.sizes.prod(axis=1)
    wanted = np.bincount(shards.atom, minlength=len(whole)) > 0
    return [
        f"{target.atoms.names[a]}: {int(read[a])} of {int(whole[a])} elements are read"
        for a in np.nonzero(wanted & (read != whole))[0]
    ]


def _unfilled(target: Layout) -> list[str]:
    """Tensors of which the shards of a rank are not the whole, padded rows of the vocabulary apart."""
    shards, tensors = target.shards, target.tensors
    shard, rank = members(target, shards.holders)
    tensor = shards.tensor[shard]
    key, place = np.unique(tensor * target.ranks + rank, return_inverse=True)
    filled = np.bincount(place, weights=shards.volume[shard], minlength=len(key)).astype(np.int64)
    tensor, rank = key // target.ranks, key % target.ranks
    numel = np.array([math.prod(one.shape) * (1 if one.count is None else one.count) for one in tensors])
    vocabulary = np.array(["v" in piece.factors for piece in target.atoms.pieces])
    padded = np.bincount(shards.tensor[vocabulary[shards.atom]], minlength=len(tensors)) > 0
    wrong = np.nonzero((filled > numel[tensor]) | ((filled < numel[tensor]) & ~padded[tensor]))[0]
    holders = np.array([len(target.classes[one.kind]) for one in tensors])
    left = np.nonzero((np.bincount(tensor, minlength=len(tensors)) < holders) & (numel > 0) & ~padded)[0]
    return [
        *(
            f"{tensors[t].name}: {f} of {numel[t]} elements are written at rank {r}"
            for t, f, r in zip(tensor[wrong], filled[wrong], rank[wrong], strict=True)
        ),
        *(f"{tensors[t].name}: nothing is written at some of its {holders[t]} ranks" for t in left),
    ]


def differences(what: str, names: Sequence[str], candidates: Iterable[str]) -> list[str]:
    """A line for each of the first names, with its nearest candidate, and how many more there are.

    Finding the nearest among the names of thousands of experts takes seconds: only those that are shown are looked up.
    """
    known = list(candidates)
    lines = [f"{what} {name}{_nearest(name, known)}" for name in names[:_SHOWN]]
    return [*lines, *([f"... and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else [])]


def _nearest(name: str, candidates: Collection[str]) -> str:
    near = get_close_matches(name, candidates, n=1)
    return f" (nearest there: {near[0]})" if near else ""


def _some(lines: Sequence[str]) -> list[str]:
    left = len(lines) - _SHOWN
    return [*lines[:_SHOWN], f"... and {left} more"] if left > 1 else list(lines)


def _refuse(source: Layout, target: Layout, lines: Sequence[str]) -> None:
    raise ValueError(f"{source.title} does not fill {target.title}:\n  " + "\n  ".join(_some(lines)))
