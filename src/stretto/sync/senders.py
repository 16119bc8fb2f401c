"""Who sends a box that several ranks hold."""

from __future__ import annotations

import numpy as np

from stretto.sync.boxes import members
from stretto.sync.layout import Ints, Layout


class _Owners:
    """The ranks that hold each box of the source, over all shards that are that box."""

    def __init__(self, source: Layout, of_shard: Ints):
        boxes = int(of_shard.max(initial=-1)) + 1
        order = np.argsort(of_shard, kind="stable")
        edges = np.searchsorted(of_shard[order], np.arange(boxes + 1))
        self.first_shard = order[edges[:-1]]
        self.is_several = np.diff(edges) > 1
        self.several = {int(box): order[edges[box] : edges[box + 1]] for box in np.nonzero(self.is_several)[0]}
        self.ranks: list[Ints] = list(source.groups)
        self.group = source.shards.holders[self.first_shard].copy()
        known: dict[bytes, int] = {ranks.tobytes(): place for place, ranks in enumerate(self.ranks)}
        for box, shards in self.several.items():
            ranks = np.unique(np.concatenate([source.groups[g] for g in source.shards.holders[shards]]))
            place = known.setdefault(ranks.tobytes(), len(self.ranks))
            if place == len(self.ranks):
                self.ranks.append(ranks)
            self.group[box] = place


def choose(source: Layout, of_shard: Ints, box: Ints, sizes: Ints, source_at: Ints, process: Ints) -> tuple[Ints, Ints]:
    """The source rank and source shard of each send.

    `box` [sends] with `sizes` in bytes goes to `process`; `source_at` are the processes of the source's ranks. One that
    holds the box sends to itself. Otherwise the holders share the bytes so that the load of the busiest stays as
    low as the boxes that fewer ranks hold allow: groups are served from the smallest to the largest, each filled up to
    an even level.
    """
    owners = _Owners(source, of_shard)
    group = owners.group[box]
    processes = int(max(source_at.max(initial=0), process.max(initial=0)) + 1)
    here = np.full((len(owners.ranks), processes), -1, dtype=np.int64)
    for place, ranks in enumerate(owners.ranks):
        here[place, source_at[ranks[::-1]]] = ranks[::-1]
    rank = here[group, process]
    load = np.zeros(source.ranks)
    away = np.nonzero(rank < 0)[0]
    away = away[np.argsort(group[away], kind="stable")]
    edges = np.searchsorted(group[away], np.arange(len(owners.ranks) + 1))
    for place in sorted(range(len(owners.ranks)), key=lambda one: len(owners.ranks[one])):
        sends = away[edges[place] : edges[place + 1]]
        if len(sends):
            rank[sends] = _share(owners.ranks[place], sizes[sends], load)
    return rank, _shards(source, owners, box, rank)


def _share(ranks: Ints, sizes: Ints, load: np.ndarray) -> Ints:
    """Give each send to one of `ranks`, filling them up to one level; adds to `load`."""
    total = sizes.sum()
    level = np.sort(load[ranks])
    heights = np.array([(total + level[: k + 1].sum()) / (k + 1) for k in range(len(level))])
    filled = int(np.nonzero(heights >= level)[0].max())
    room = np.maximum(0.0, heights[filled] - load[ranks])
    edges = np.cumsum(room)
    middle = np.cumsum(sizes) - sizes / 2
    place = np.minimum(np.searchsorted(edges, middle * (edges[-1] / max(1, total))), len(ranks) - 1)
    load[ranks] += np.bincount(place, weights=sizes, minlength=len(ranks))
    return ranks[place]


def _shards(source: Layout, owners: _Owners, box: Ints, rank: Ints) -> Ints:
    """Which of the source's shards a rank reads a box from."""
    shard = owners.first_shard[box].copy()
    choice = np.nonzero(owners.is_several[box])[0]
    if len(choice):
        candidates = np.concatenate([*owners.several.values()])
        boxes = np.repeat([*owners.several], [len(shards) for shards in owners.several.values()])
        row, holder = members(source, source.shards.holders[candidates])
        key = boxes[row] * source.ranks + holder
        order = np.argsort(key, kind="stable")
        shard[choice] = candidates[row[order]][np.searchsorted(key[order], box[choice] * source.ranks + rank[choice])]
    return shard


def bound(source: Layout, of_shard: Ints, box: Ints, sizes: Ints) -> float:
    """Lower bound in bytes on the busiest sender: whatever the sharing, some rank of a set sends its even part.

    The sets are each group of holders with all that its ranks alone hold, and each set of ranks whose groups touch.
    """
    owners = _Owners(source, of_shard)
    group = owners.group[box]
    weight = np.bincount(group, weights=sizes, minlength=len(owners.ranks))
    used = [place for place in range(len(owners.ranks)) if weight[place]]
    sets = [set(map(int, owners.ranks[place])) for place in used]
    best = 0.0
    for whole in [*sets, *_touching(sets)]:
        inside = sum(weight[place] for place, ranks in zip(used, sets, strict=True) if ranks <= whole)
        best = max(best, inside / len(whole))
    return best


def _touching(sets: list[set[int]]) -> list[set[int]]:
    """Unions of the sets that have ranks in common."""
    unions: list[set[int]] = []
    for one in sets:
        joined = set(one)
        apart = []
        for other in unions:
            if joined & other:
                joined |= other
            else:
                apart.append(other)
        unions = [*apart, joined]
    return unions
