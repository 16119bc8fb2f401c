"""Importance weights for the difference between the engine's and the trainer's log-probs of the same weights.

To add one: write its function and its row in ``MISMATCH``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def truncate(ratio_N: Tensor, cap: float) -> Tensor:
    """``min(cap, ratio)``: Ionides 2008, Truncated Importance Sampling.

    For rollouts: Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training, the TIS term.
    """
    return ratio_N.clamp(max=cap)


def mask(ratio_N: Tensor, cap: float) -> Tensor:
    """The ratio up to ``cap``, 0 beyond it: the upper side of the masking in IcePop, Ling Team 2025, Every Step Evolves
    (arXiv:2510.18855).
    """
    return ratio_N.masked_fill(ratio_N > cap, 0.0)


def off(ratio_N: Tensor, cap: float) -> Tensor:
    """1 for every token."""
    return torch.ones_like(ratio_N)


MISMATCH: dict[str, Callable[[Tensor, float], Tensor]] = {"truncate": truncate, "mask": mask, "off": off}


def mismatch_weights(old_N: Tensor, behaviour_N: Tensor, mode: str, cap: float) -> Tensor:
    """What each token's policy loss is multiplied by, from ``ratio = exp(old - behaviour)``.

    Args:
        old_N: the trainer's log-probs, nats.
        behaviour_N: the engine's log-probs of the same tokens, nats.
        mode: a key of ``MISMATCH``.
        cap: the largest weight, above 0; "off" does not read it.

    Returns:
        Weights ``[N]`` without gradient.
    """
    return MISMATCH[mode]((old_N - behaviour_N).detach().exp(), cap)
