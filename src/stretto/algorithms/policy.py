"""Policy losses per token. To add one: write its function and its row in ``LOSSES``."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor


class PolicyLoss(Protocol):
    """The signature of every row of ``LOSSES``: log-probs ``[N]`` -> loss ``[N]`` and which tokens were clipped."""

    def __call__(
        self,
        current_N: Tensor,
        old_N: Tensor,
        advantages_N: Tensor,
        *,
        clip_low: float,
        clip_high: float,
        dual_clip: float | None,
    ) -> tuple[Tensor, Tensor]: ...


def ppo_clip(
    current_N: Tensor,
    old_N: Tensor,
    advantages_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> tuple[Tensor, Tensor]:
    """``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`` with ``r = exp(current - old)``.

    Schulman et al. 2017, PPO (arXiv:1707.06347), eq. 7; the two bounds of their own are Yu et al. 2025, DAPO
    (arXiv:2503.14476), section 3.1, eq. 10. With ``dual_clip = c`` and A < 0 the objective is at least ``c A``: Ye et
    al. 2020, Mastering Complex Control in MOBA Games (arXiv:1912.09729), eq. 5.

    Args:
        current_N: log-probs that carry the gradient, nats.
        old_N: log-probs of the policy that the ratio divides by, nats.
        advantages_N: one advantage a token.
        clip_low: in (0, 1].
        clip_high: above 0.
        dual_clip: above 1, or None for no bound.

    Returns:
        The loss ``[N]``, and a bool ``[N]`` that is True where a bound took the token's gradient away.
    """
    # The pessimistic minimum leaves one side of the ratio bounded: above for A >= 0, below for A < 0, where the dual
    # clip bounds the other side too. Bounding the logarithm keeps 0 * inf out of the value and of the gradient.
    negative_N = advantages_N < 0
    low_N = torch.zeros_like(advantages_N).masked_fill(negative_N, 1 - clip_low).log()
    high_N = torch.full_like(advantages_N, 1 + clip_high).masked_fill(negative_N, dual_clip or math.inf).log()
    log_ratio_N = current_N - old_N
    ratio_N = torch.clamp(log_ratio_N, low_N, high_N).exp()
    clipped_N = ((log_ratio_N < low_N) | (log_ratio_N > high_N)) & (advantages_N != 0)
    return -advantages_N * ratio_N, clipped_N


LOSSES: dict[str, PolicyLoss] = {"ppo_clip": ppo_clip}
