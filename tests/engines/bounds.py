"""How far an engine's log-probs may be from transformers'."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor


@dataclass(frozen=True)
class Bound:
    """How far log-probs may be from transformers' of the same weights: `each`, the mean distance, the divergence (k3).

    `strays` is the share of tokens that may be chosen otherwise where logits nearly tie.
    """

    each: float = 1e-5
    mean: float = inf
    divergence: float = inf
    strays: float = 0.0

    def check(self, got: Iterable[float], expected: Iterable[float] | Tensor) -> None:
        """Both are of the same tokens, of one response or of several."""
        difference = as_tensor(expected) - as_tensor(got)
        assert difference.isfinite().all()
        assert difference.abs().max() <= self.each
        assert difference.abs().mean() <= self.mean
        assert (difference.exp() - 1 - difference).mean() <= self.divergence

    def allows(self, strays: int, tokens: int) -> bool:
        """Whether so many tokens may be on the wrong side of an edge."""
        return strays <= self.strays * tokens


ROUNDED = Bound(each=inf, mean=0.03, divergence=2e-3, strays=0.1)
"""Of an engine that computes in bfloat16, as the reference then does."""


def as_tensor(numbers: Iterable[float] | Tensor) -> Tensor:
    """[T], float64, on CPU."""
    return torch.as_tensor(numbers if isinstance(numbers, Tensor) else list(numbers)).double().cpu()
