"""Whether one side can fill the other: every element read, every element written, once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches

import numpy as np

from stretto.sync.layout import Ints, Layout

_SHOWN = 20


def check_atoms(source: Layout, target: Layout) -> None:
    """Raise ValueError unless both sides have the same pieces of the checkpoint; both lists of names are in the message."""
    has, wants = (set(np.unique(layout.shards.atom).tolist()) for layout in (source, target))
    names = source.atoms.names
    unwritten, unread = sorted(wants - has), sorted(has - wants)
    lines = [
        *differences("nothing fills the target's", [names[a] for a in unwritten], [names[a] for a in has]),
        *differences("nothing reads the source's", [names[a] for a in unread], [names[a] for a in wants]),
    ]
    if lines:
        _refuse(source, target, lines)


def check_source(source: Layout, atom: Ints, start: Ints, size: Ints) -> None:
    """Raise ValueError unless the distinct boxes of each atom are disjoint and together the whole of it."""
    sizes = source.atoms.sizes
    volume = np.bincount(atom, weights=size.prod(axis=1), minlength=len(sizes))
    held = np.bincount(atom, minlength=len(sizes)) > 0
    wrong = np.nonzero(held & (volume != sizes.prod(axis=1)))[0]
    lines = [
        f"{source.atoms.names[a]}: its ranks hold {int(volume[a])} of {int(sizes[a].prod())} elements" for a in wrong
    ]
    edges = np.searchsorted(atom, np.arange(len(sizes) + 1))
    lines += [
        f"{source.atoms.names[a]}: two of its boxes overlap"
        for a in np.nonzero(np.diff(edges) > 1)[0]
        if _overlap(start[edges[a] : edges[a + 1]], size[edges[a] : edges[a + 1]])
    ]
    if lines:
        raise ValueError(f"{source.title} does not hold the model once:\n  " + "\n  ".join(_some(lines)))


def _overlap(start: Ints, size: Ints) -> bool:
    stop = start + size
    meet = (np.minimum(stop[:, None], stop[None]) > np.maximum(start[:, None], start[None])).all(axis=2)
    return bool(meet.sum() > len(start))


def check_filled(source: Layout, target: Layout, shard: Ints, size: Ints) -> None:
    """Raise ValueError unless the pieces of every target shard add up to it, and the shards of a rank to its tensors.

    Pieces come from disjoint boxes, so equal volumes mean that every element is written once. Rows of padding are nobody's.
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
    shards, lines = target.shards, []
    padded = {s for s, atom in enumerate(shards.atom) if "v" in target.atoms.pieces[atom].factors}
    skip = np.array([s in padded for s in range(len(shards.atom))], dtype=bool)
    numel = np.array([np.prod(one.shape) * (1 if one.count is None else one.count) for one in target.tensors])
    kinds = np.array([one.kind for one in target.tensors])
    for kind, ranks in enumerate(target.classes):
        held = np.array([ranks[0] in group for group in target.groups])[shards.holders] & (kinds[shards.tensor] == kind)
        filled = np.bincount(shards.tensor[held], weights=shards.volume[held], minlength=len(numel))
        loose = np.bincount(shards.tensor[held & skip], minlength=len(numel)) > 0
        wrong = (kinds == kind) & np.where(loose, filled > numel, filled != numel)
        lines += [
            f"{target.tensors[t].name}: {int(filled[t])} of {int(numel[t])} elements are written"
            for t in np.nonzero(wrong)[0]
        ]
    return lines


def differences(what: str, names: Sequence[str], candidates: Iterable[str]) -> list[str]:
    """A line for each name, with its nearest candidate."""
    known = list(candidates)
    return [f"{what} {name}{_nearest(name, known)}" for name in names]


def _nearest(name: str, candidates: Collection[str]) -> str:
    near = get_close_matches(name, candidates, n=1)
    return f" (nearest there: {near[0]})" if near else ""


def _some(lines: Sequence[str]) -> list[str]:
    left = len(lines) - _SHOWN
    return [*lines[:_SHOWN], *([f"... and {left} more"] if left > 0 else [])]


def _refuse(source: Layout, target: Layout, lines: Sequence[str]) -> None:
    raise ValueError(f"{source.title} does not fill {target.title}:\n  " + "\n  ".join(_some(lines)))
