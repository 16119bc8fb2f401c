"""Parts of a plan, for those who cannot have the whole model in memory beside the one that they serve."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.sync.plan import Plan

WINDOW_BYTES = 2**28
"""Bytes of a part, unless one tensor is larger."""


@dataclass(frozen=True)
class Part:
    """The part of a plan that fills the target's tensors `names`."""

    names: list[str]
    plan: Plan


def whole(plan: Plan) -> list[Part]:
    """The plan as one part."""
    return [Part([name for one in plan.target.tensors for name in one.names()], plan)]


def windows(plan: Plan) -> list[Part]:
    """Parts of at most WINDOW_BYTES, in the target's order. Sender and receiver cut alike and run them in turn."""
    groups: list[list[str]] = []
    used = WINDOW_BYTES
    for tensor in plan.target.tensors:
        if used + tensor.bytes > WINDOW_BYTES:
            groups.append([])
            used = 0
        groups[-1].append(tensor.name)
        used += tensor.bytes
    names = {tensor.name: tensor.names() for tensor in plan.target.tensors}
    return [Part([name for one in group for name in names[one]], plan.only(set(group))) for group in groups]
