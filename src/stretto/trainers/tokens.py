"""The loss tokens of a batch as flat arrays, from which micro-batches pick theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.algorithms.objective import TokenBatch
from stretto.types import Batch, Rollout


@dataclass(frozen=True)
class FlatTokens:
    """One float64 value per loss token of the batch, in the order of `slot_offsets`."""

    behaviour: Tensor
    advantages: Tensor
    weights: Tensor
    old: Tensor | None
    reference: Tensor | None

    @classmethod
    def of(cls, batch: Batch, weights: Sequence[float], old: Tensor | None, reference: Tensor | None) -> FlatTokens:
        """Flatten the batch; `weights` has one value a rollout, `old` and `reference` are flat already."""
        lengths = torch.tensor([rollout.loss_tokens for rollout in batch.rollouts], dtype=torch.long)
        behaviour = [value for rollout in batch.rollouts for value in _kept(rollout)]
        return cls(
            behaviour=torch.tensor(behaviour, dtype=torch.float64),
            advantages=torch.tensor(batch.advantages, dtype=torch.float64).repeat_interleave(lengths),
            weights=torch.tensor(weights, dtype=torch.float64).repeat_interleave(lengths),
            old=old,
            reference=reference,
        )

    def at(self, slot_N: Tensor, current_N: Tensor, entropy_N: Tensor) -> TokenBatch:
        """The loss's view of the tokens in `slot_N`, in the dtype and on the device of the current log-probs."""

        def pick(flat: Tensor) -> Tensor:
            return flat[slot_N.to(flat.device)].to(current_N.device, current_N.dtype)

        return TokenBatch(
            current=current_N,
            # With a single optimizer step, the policy that is being updated is the one that it is compared with.
            old=current_N.detach() if self.old is None else pick(self.old),
            behaviour=pick(self.behaviour),
            advantages=pick(self.advantages),
            weights=pick(self.weights),
            entropy=entropy_N,
            reference=None if self.reference is None else pick(self.reference),
        )


def _kept(rollout: Rollout) -> list[float]:
    """The engine's log-probs of the loss tokens: what lies under the mask never gets further."""
    return [value for value, keep in zip(rollout.logprobs_T, rollout.loss_mask_T, strict=True) if keep]
