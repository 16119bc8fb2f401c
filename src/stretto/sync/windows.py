"""Parts of a plan, for those who cannot have the whole model in memory beside the one that they serve."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.sync.layout import LocalTensor
from stretto.sync.plan import Plan

WINDOW_BYTES = 2**28
"""Bytes of a window, unless one tensor is larger."""


@dataclass(frozen=True)
class Part:
    """The part of a plan that fills the target's tensors `names`."""

    names: list[str]
    plan: Plan


def parts_of(plan: Plan, *, windowed: bool) -> list[Part]:
    """The plan as one part, or in windows. Sender and receiver cut alike and run the parts in turn."""
    if windowed:
        return windows(plan, WINDOW_BYTES)
    return [Part([name for one in plan.target.tensors for name in one.names()], plan)]


def windows(plan: Plan, most_bytes: int) -> list[Part]:
    """Parts that fill at most `most_bytes` each, unless one tensor is larger, in the target's order."""
    groups: list[list[LocalTensor]] = [[]]
    used = 0
    for tensor in plan.target.tensors:
        if groups[-1] and used + tensor.bytes > most_bytes:
            groups.append([])
            used = 0
        groups[-1].append(tensor)
        used += tensor.bytes
    return [
        Part([name for one in group for name in one.names()], plan.only({one.name for one in group}))
        for group in groups
    ]
