"""Whether an engine holds what it was sent: a part of the plan is sent again and compared where it arrives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from stretto.sync.execute import Execution, Tensors
from stretto.sync.links import Link
from stretto.sync.plan import Plan
from stretto.sync.windows import Part, parts_of, windows
from stretto.world import local_part

SAMPLE_BYTES = 2**26
"""Bytes of a sample, unless one tensor is larger."""


def sample_of(plan: Plan, number: int | None) -> Part:
    """The part to compare the `number`-th time: one after another, all of the target's tensors get their turn.

    None: all of it.
    """
    if number is None:
        return parts_of(plan, windowed=False)[0]
    parts = windows(plan, SAMPLE_BYTES)
    return parts[number % len(parts)]


@torch.no_grad()
def differing(
    part: Part, process: int, rank: int, held: Mapping[str, Tensor], *, link: Link | None, source: Tensors
) -> list[str]:
    """Receive a part beside the tensors that `rank` holds, by local name; returns those that have other bits.

    What the engine has packed and given up cannot be compared: log-probs tell of that.
    `source` are the tensors of this process's ranks of the source, if it has any.
    """
    specs = {name: spec for name, spec in part.plan.target.local(rank).items() if name in part.names}
    mine = {name: local_part(held[name].detach()) for name in specs}
    packed = {name for name, (shape, _) in specs.items() if given_up(mine[name], shape)}
    # Rows that only pad a vocabulary are never sent: they are what they were.
    arrived = {name: mine[name].new_empty(specs[name][0]) if name in packed else mine[name].clone() for name in specs}
    execution = Execution(part.plan, process, lambda: source, lambda: {rank: arrived}, link=link)
    execution.run()
    execution.verify()
    compared = [name for name in specs if name not in packed]
    return [name for name in compared if not torch.equal(_bits(mine[name]), _bits(arrived[name]))]


def given_up(tensor: Tensor, shape: Sequence[int]) -> bool:
    """Whether an engine has emptied a parameter of this shape, since it computes with a packed copy alone."""
    return tensor.numel() == 0 and 0 not in shape


def _bits(tensor: Tensor) -> Tensor:
    """Bytes: a NaN is itself, and zeros of two signs differ."""
    return tensor.contiguous().view(-1).view(torch.uint8)
