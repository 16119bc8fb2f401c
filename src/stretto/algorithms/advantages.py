"""Group-relative advantages. To add one: write its function and its row in ``ADVANTAGES``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# Sums of the same reward parts in another order differ by a few units in the last place of float64. Such a group has
# no signal, yet dividing by its standard deviation would blow the rounding up to advantages of +-1.
_ROUNDING = 1e-14


def is_constant(rewards_S: Tensor) -> bool:
    """True if the rewards ``[S]`` (float64) of a group are all equal, up to the rounding of their sums."""
    low, high = rewards_S.aminmax()
    return bool(high - low <= _ROUNDING * rewards_S.abs().max())


def _unless_constant(formula: Callable[[Tensor], Tensor], rewards_S: Tensor) -> Tensor:
    rewards_S = rewards_S.double()
    return torch.zeros_like(rewards_S) if is_constant(rewards_S) else formula(rewards_S)


def grpo(rewards_S: Tensor) -> Tensor:
    """``(r - mean) / std`` of one group, ``[S] -> [S]`` in float64; exactly 0 for a group of equal rewards.

    Shao et al. 2024, DeepSeekMath (arXiv:2402.03300), section 4.1.2, outcome supervision. ``std`` is the unbiased one
    (S - 1), as in TRL and verl; unlike theirs it has no added epsilon.
    """
    return _unless_constant(lambda r_S: (r_S - r_S.mean()) / r_S.std(), rewards_S)


def grpo_no_std(rewards_S: Tensor) -> Tensor:
    """``r - mean`` of one group, ``[S] -> [S]`` in float64; exactly 0 for a group of equal rewards.

    Liu et al. 2025, Understanding R1-Zero-Like Training (arXiv:2503.20783), section 3.2, "Dr. GRPO": dividing by the
    standard deviation would weigh questions by how easy or hard they are.
    """
    return _unless_constant(lambda r_S: r_S - r_S.mean(), rewards_S)


def rloo(rewards_S: Tensor) -> Tensor:
    """``r_i - mean of the other S - 1``, ``[S] -> [S]`` in float64; exactly 0 for a group of equal rewards.

    Ahmadian et al. 2024, Back to Basics (arXiv:2402.14740), the RLOO estimator, as ``S / (S - 1) * (r - mean)``.
    """
    return _unless_constant(lambda r_S: (r_S - r_S.mean()) * (len(r_S) / (len(r_S) - 1)), rewards_S)


ADVANTAGES: dict[str, Callable[[Tensor], Tensor]] = {"grpo": grpo, "grpo_no_std": grpo_no_std, "rloo": rloo}


def group_advantages(name: str, rewards: Sequence[float], group_ids: Sequence[int]) -> tuple[list[float], int]:
    """Advantages of many groups at once.

    Args:
        name: a key of ``ADVANTAGES``.
        rewards: one finite reward a sample.
        group_ids: the group of each sample; the samples of a group need not be neighbours.

    Returns:
        One advantage a sample, in the order of ``rewards``, and the number of groups of equal rewards.

    Raises:
        ValueError: a group has only one sample, so there is nothing to be relative to.
    """
    members: dict[int, list[int]] = {}
    for index, group in enumerate(group_ids):
        members.setdefault(group, []).append(index)
    rewards_N = torch.tensor(rewards, dtype=torch.float64)
    assert rewards_N.shape == (len(group_ids),), "one group id per reward"
    assert rewards_N.isfinite().all(), "a failed reward is dropped before it gets here"
    advantages_N = torch.zeros_like(rewards_N)
    constant_groups = 0
    for group, indices in members.items():
        if len(indices) < 2:
            raise ValueError(f"group {group} has one sample; a group-relative advantage needs two: drop that sample")
        constant_groups += is_constant(rewards_N[indices])
        advantages_N[indices] = ADVANTAGES[name](rewards_N[indices])
    return advantages_N.tolist(), constant_groups
