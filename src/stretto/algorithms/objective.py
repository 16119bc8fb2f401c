"""The loss of a micro-batch, put together from the tables as the configuration says."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from torch import Tensor

from stretto.algorithms.kl import KL_ESTIMATORS, k3
from stretto.algorithms.mismatch import mismatch_weights
from stretto.algorithms.policy import LOSSES
from stretto.algorithms.stats import Stats, merge, summarise, to_metrics
from stretto.config.sections import AlgorithmConfig

__all__ = ["Objective", "Stats", "TokenBatch", "merge", "to_metrics"]


@dataclass(frozen=True)
class TokenBatch:
    """The loss tokens of a micro-batch, one value a token: every tensor is ``[N]``, N = 0 included; log-probs in nats.

    ``current`` (and ``entropy``) carry the gradient. With ``old_logprobs = "behaviour"`` only the mismatch metrics read
    ``old``. ``weights`` come from :func:`stretto.algorithms.aggregation.token_weights`.
    """

    current: Tensor
    old: Tensor
    behaviour: Tensor
    advantages: Tensor
    weights: Tensor
    entropy: Tensor | None = None
    reference: Tensor | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            tensor = getattr(self, field.name)
            if tensor is None:
                continue
            assert tensor.shape == self.current.shape, f"{field.name} is {tensor.shape}, not {self.current.shape}"
            # An `old` that still hangs on the model would cancel the gradient of the ratio without a word.
            assert field.name in ("current", "entropy") or not tensor.requires_grad, f"{field.name} is not detached"
        assert self.current.dim() == 1


class Objective:
    """``sum_N weights * (policy * mismatch + kl_coef * kl - entropy_coef * entropy)``.

    A sum and not a mean: micro-batches and ranks add up to the loss of the optimizer step.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self._config = config
        self._uses_behaviour = config.old_logprobs == "behaviour"
        self._mismatch = "off" if self._uses_behaviour else config.mismatch
        self._cap = math.inf if self._mismatch == "off" else config.mismatch_cap

    @property
    def needs_reference(self) -> bool:
        """True if the loss reads the log-probs of the reference model."""
        return self._config.kl_coef > 0

    @property
    def needs_entropy(self) -> bool:
        """True if the loss reads the entropy, which then has to carry a gradient."""
        return self._config.entropy_coef > 0

    @property
    def dense(self) -> bool:
        """True if a sample of zero advantage still adds to the loss."""
        return self.needs_reference or self.needs_entropy

    def __call__(self, tokens: TokenBatch) -> tuple[Tensor, Stats]:
        """The loss (0-dim, differentiable, 0 for no tokens) and what to report about the tokens."""
        config = self._config
        policy_N, clipped_N = LOSSES[config.loss](
            tokens.current,
            self._denominator(tokens),
            tokens.advantages,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
        )
        mismatch_N = mismatch_weights(tokens.old, tokens.behaviour, self._mismatch, self._cap)
        loss_N = policy_N * mismatch_N
        if self.needs_reference:
            assert tokens.reference is not None, "kl_coef > 0 needs the reference log-probs"
            kl_N = KL_ESTIMATORS[config.kl_estimator](tokens.current, tokens.reference)
            loss_N = loss_N + config.kl_coef * kl_N
        if self.needs_entropy:
            assert tokens.entropy is not None, "entropy_coef > 0 needs the entropy"
            loss_N = loss_N - config.entropy_coef * tokens.entropy
        return (tokens.weights * loss_N).sum(), self._stats(tokens, clipped_N, mismatch_N)

    def _denominator(self, tokens: TokenBatch) -> Tensor:
        return tokens.behaviour if self._uses_behaviour else tokens.old

    def _stats(self, tokens: TokenBatch, clipped_N: Tensor, mismatch_N: Tensor) -> Stats:
        ratio_N = (tokens.current.detach() - self._denominator(tokens)).exp()
        difference_N = (tokens.old - tokens.behaviour).abs()
        means = {
            "train/clip_fraction": clipped_N,
            "train/ratio_mean": ratio_N,
            # KL(behaviour || old): the engine sampled the tokens. Clamped: CUDA's expm1 may be off in the last place.
            "mismatch/kl": k3(tokens.behaviour.double(), tokens.old.double()).clamp(min=0),
            "mismatch/logprob_diff_mean": difference_N,
            "mismatch/weight_mean": mismatch_N,
            "mismatch/capped_fraction": (tokens.old - tokens.behaviour).exp() > self._cap,
        }
        if tokens.reference is not None:
            estimator = KL_ESTIMATORS[self._config.kl_estimator]
            means["train/kl_reference"] = estimator(tokens.current.detach().double(), tokens.reference.double())
        if tokens.entropy is not None:
            means["train/entropy"] = tokens.entropy
        maxima = {"train/ratio_max_deviation": (ratio_N - 1).abs(), "mismatch/logprob_diff_max": difference_N}
        return summarise(means, maxima)
