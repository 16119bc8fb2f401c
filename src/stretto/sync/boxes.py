"""Boxes, as arrays [boxes, factors] of first indices and lengths: which meet, and cutting large ones."""

from __future__ import annotations

import numpy as np

from stretto.sync.layout import Ints, Layout


def meeting(start: Ints, size: Ints, other_start: Ints, other_size: Ints) -> tuple[Ints, Ints]:
    """All pairs of a box and one of the others that have elements in common, as two arrays of places."""
    stop, other_stop = start + size, other_start + other_size
    meet = np.ones((len(start), len(other_start)), dtype=bool)
    for factor in range(start.shape[1]):
        meet &= start[:, None, factor] < other_stop[None, :, factor]
        meet &= other_start[None, :, factor] < stop[:, None, factor]
    box, other = np.nonzero(meet)
    return box, other


def repeated(count: Ints) -> tuple[Ints, Ints]:
    """For rows that stand for so many each: the row of every one, and its number within the row."""
    row = np.repeat(np.arange(len(count)), count)
    return row, np.arange(len(row)) - np.repeat(count.cumsum() - count, count)


def divided(start: Ints, size: Ints, limit: Ints) -> tuple[Ints, Ints, Ints]:
    """Cut each box into nearly equal parts of at most `limit` elements (one number a box), along its outer factors.

    Returns which box every part is of, and the parts.
    """
    row = np.arange(len(start))
    for factor in range(start.shape[1]):
        inner = size[:, factor + 1 :].prod(axis=1)
        parts = -(-size[:, factor] // np.maximum(1, limit[row] // inner))
        if (parts == 1).all():
            continue
        of, index = repeated(parts)
        row, start, size, parts = row[of], start[of], size[of], parts[of]
        low, high = (size[:, factor] * edge // parts for edge in (index, index + 1))
        start[:, factor] += low
        size[:, factor] = high - low
    return row, start, size


def members(layout: Layout, holders: Ints) -> tuple[Ints, Ints]:
    """Every rank of each of some groups of `layout`: the place in `holders`, and the rank."""
    count = np.array([len(group) for group in layout.groups], dtype=np.int64)
    row, inside = repeated(count[holders])
    return row, np.concatenate(layout.groups)[(count.cumsum() - count)[holders][row] + inside]
