"""Which samples each optimizer step of a batch reads, and the weight that each of their tokens carries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stretto.algorithms.aggregation import token_weights
from stretto.algorithms.objective import Objective
from stretto.config.run import RunConfig
from stretto.types import Batch


class Replicas(Protocol):
    """Those among whom the samples are shared out, each with its own; collective methods, called by all of them."""

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over replicas."""
        ...

    def max(self, values: Sequence[float]) -> list[float]:
        """Element-wise maximum over replicas."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Every replica's (picklable) value, in order."""
        ...


@dataclass(frozen=True)
class Update:
    """One optimizer step: its samples on this replica, those that need a backward pass, and each one's token weight.

    `weights` is indexed like the batch's rollouts (0 outside the update). `active_share` is over all replicas.
    """

    indices: Sequence[int]
    active: Sequence[int]
    weights: Sequence[float]
    active_share: float


def plan_updates(batch: Batch, config: RunConfig, objective: Objective, replicas: Replicas) -> list[Update]:
    """Split the batch by whole groups into `trainer.updates_per_batch` optimizer steps, each with its own totals."""
    parts = config.trainer.updates_per_batch
    # Counted over all replicas, so that an update holds the same groups however they are shared out.
    everywhere = replicas.gather([rollout.group_id for rollout in batch.rollouts])
    groups = {group_id: place for place, group_id in enumerate(sorted({one for ids in everywhere for one in ids}))}
    split = [
        [i for i, rollout in enumerate(batch.rollouts) if groups[rollout.group_id] * parts // len(groups) == part]
        for part in range(parts)
    ]
    return [_update(batch, indices, config, objective, replicas) for indices in split]


def _update(
    batch: Batch, indices: Sequence[int], config: RunConfig, objective: Objective, replicas: Replicas
) -> Update:
    lengths = [batch.rollouts[i].loss_tokens for i in indices]
    # A sample without advantage adds nothing to a loss without other terms, whatever its ratio: it costs no pass.
    active = [i for i in indices if objective.dense or batch.advantages[i] != 0]
    tokens, sequences, working = replicas.sum([sum(lengths), len(indices), len(active)])
    weights = [0.0] * len(batch.rollouts)
    if tokens:
        values = token_weights(
            config.algorithm.aggregation,
            lengths,
            total_tokens=int(tokens),
            total_sequences=int(sequences),
            constant_length=config.algorithm.constant_length or config.rollout.max_new_tokens,
        )
        for index, value in zip(indices, values, strict=True):
            weights[index] = value
    return Update(indices, active, weights, working / sequences if sequences else 0.0)
