"""Whether an engine holds what it was sent: a part of the plan is sent again and compared where it arrives."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from stretto.sync.execute import Execution, Tensors
from stretto.sync.links import Link
from stretto.sync.plan import Plan
from stretto.sync.windows import Part, windows
from stretto.world import local_part

SAMPLE_BYTES = 2**26
"""Bytes of a sample, unless one tensor is larger."""


def sample_of(plan: Plan, number: int) -> Part:
    """The part to compare the `number`-th time: one after another, all of the target's tensors get their turn."""
    parts = windows(plan, SAMPLE_BYTES)
    return parts[number % len(parts)]


@torch.no_grad()
def differing(
    part: Part, process: int, rank: int, held: Mapping[str, Tensor], *, link: Link | None, source: Tensors
) -> list[str]:
    """Receive a part beside the tensors that `rank` holds, by local name; returns those that have other bits.

    `source` are the tensors of this process's ranks of the source, if it has any.
    """
    mine = {name: local_part(held[name].detach()) for name in part.plan.target.local(rank) if name in part.names}
    # Rows that only pad a vocabulary are never sent: they are what they were.
    arrived = {name: tensor.clone() for name, tensor in mine.items()}
    execution = Execution(part.plan, process, lambda: source, lambda: {rank: arrived}, link=link)
    execution.run()
    execution.verify()
    return [name for name, tensor in mine.items() if not torch.equal(_bits(tensor), _bits(arrived[name]))]


def _bits(tensor: Tensor) -> Tensor:
    """Bytes: a NaN is itself, and zeros of two signs differ."""
    return tensor.contiguous().view(-1).view(torch.uint8)
