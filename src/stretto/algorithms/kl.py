"""Per-token estimators of KL(current || reference) from tokens that *current* sampled.

John Schulman 2020, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html), with ``r = reference / current``.
To add one: write its function and its row in ``KL_ESTIMATORS``.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def k1(current_N: Tensor, reference_N: Tensor) -> Tensor:
    """``-log r``, ``[N] -> [N]`` in nats: unbiased, of either sign.

    Its gradient is that of the current log-prob alone, whose expectation is 0: as a loss it adds noise, not a pull.
    """
    return current_N - reference_N


def k2(current_N: Tensor, reference_N: Tensor) -> Tensor:
    """``(log r)^2 / 2``, ``[N] -> [N]`` in nats: biased, never negative; its gradient is unbiased on-policy."""
    return (reference_N - current_N).square() / 2


def k3(current_N: Tensor, reference_N: Tensor) -> Tensor:
    """``r - 1 - log r``, ``[N] -> [N]`` in nats: unbiased, never negative; DeepSeekMath (arXiv:2402.03300), eq. 4.

    As a loss its expected gradient is that of KL(reference || current).
    """
    log_r_N = reference_N - current_N
    return log_r_N.expm1() - log_r_N  # r - 1 would lose every digit of a small log r in float32


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
