"""What the loss tells about its tokens, kept so that parts of a batch add up to the whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TOKENS = "tokens"
"""The key in ``Stats.sums`` of the number of loss tokens, which every other sum is divided by."""


@dataclass(frozen=True)
class Stats:
    """Sums over loss tokens and maxima of absolute values, by metric name; float64, 0-dim, without gradient.

    Over ranks: add up ``sums`` and take the maximum of ``maxima``. Both have the same keys on every rank, also for a
    batch of no tokens, as long as all ranks give (or leave out) the same optional tensors.
    """

    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]


def summarise(means: dict[str, Tensor], maxima: dict[str, Tensor]) -> Stats:
    """Stats of per-token values ``[N]``: those to be averaged, and those (never negative) whose largest is kept."""
    some_N = next(iter(means.values()))
    count = some_N.new_full((), some_N.numel(), dtype=torch.float64)
    return Stats(
        sums={TOKENS: count} | {name: values_N.detach().double().sum() for name, values_N in means.items()},
        maxima={name: _largest(values_N.detach().double()) for name, values_N in maxima.items()},
    )


def _largest(values_N: Tensor) -> Tensor:
    return values_N.amax() if values_N.numel() else values_N.new_zeros(())


def merge(first: Stats, second: Stats) -> Stats:
    """Stats of the tokens of both; associative and commutative up to rounding."""
    assert first.sums.keys() == second.sums.keys(), "parts of a batch report the same sums"
    assert first.maxima.keys() == second.maxima.keys(), "parts of a batch report the same maxima"
    return Stats(
        sums={name: value + second.sums[name] for name, value in first.sums.items()},
        maxima={name: torch.maximum(value, second.maxima[name]) for name, value in first.maxima.items()},
    )


def to_metrics(stats: Stats) -> dict[str, float]:
    """Means over the loss tokens and the maxima, by metric name; nothing at all when there were no tokens."""
    names = [*stats.sums, *stats.maxima]
    values = torch.stack([*stats.sums.values(), *stats.maxima.values()]).tolist()  # one wait for the device
    metrics = dict(zip(names, values, strict=True))
    tokens = metrics.pop(TOKENS)
    if tokens == 0:
        return {}
    return {name: value / tokens if name in stats.sums else value for name, value in metrics.items()}
