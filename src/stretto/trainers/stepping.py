"""What is alike in every trainer: a batch in optimizer steps, bad steps skipped, metrics over all samples."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from stretto.algorithms.objective import Objective, Stats, to_metrics
from stretto.config.run import RunConfig
from stretto.data.batching import slot_offsets
from stretto.errors import RunError
from stretto.trainers.base import StepReport
from stretto.trainers.schedule import learning_rate
from stretto.trainers.updates import Replicas, Update, plan_updates
from stretto.types import Batch, Rollout


class SteppingTrainer(ABC):
    """A trainer's optimizer steps, on top of what a backend can do with one: gradient, norm, update.

    `replicas` are those among whom the samples are shared out.
    """

    def __init__(self, config: RunConfig, replicas: Replicas):
        self._config, self._settings = config, config.trainer
        self._replicas = replicas
        self._objective = Objective(config.algorithm)
        self._updates = 0
        self._bad_in_a_row = 0

    @abstractmethod
    def _policy_logprobs(self, rollouts: Sequence[Rollout]) -> Tensor:
        """Flat log-probs of the rollouts' loss tokens from the current weights."""

    @abstractmethod
    def _accumulate(self, batch: Batch, update: Update, old: Tensor | None) -> tuple[float, Stats]:
        """The update's loss over all replicas and this replica's stats; leaves the gradient, summed over replicas."""

    @abstractmethod
    def _clip(self) -> float:
        """Scale the gradient down to `trainer.clip_grad` and return the global norm that it had, equal on all ranks."""

    @abstractmethod
    def _apply(self, rate: float) -> None:
        """Move the weights along the gradient."""

    @abstractmethod
    def _clear(self) -> None:
        """Forget the gradient."""

    @abstractmethod
    def _take_gradient(self) -> dict[str, Tensor]:
        """This rank's part of the gradient by the layout's local names, summed over replicas on every rank."""

    def gradient(self, batch: Batch) -> tuple[float, dict[str, Tensor]]:
        """Loss and gradient of a batch as one update, before clipping; the weights stay. All ranks call together.

        The gradient has the layout of the weights: it can be gathered through the same plan. Buffers have none.
        """
        (update,) = plan_updates(batch, self._config, self._objective, self._replicas)
        loss, _ = self._accumulate(batch, update, None)
        found = self._take_gradient()
        self._clear()
        return loss, found

    def logprobs(self, rollouts: Sequence[Rollout]) -> list[tuple[float, ...]]:
        """See the contract."""
        flat = self._policy_logprobs(rollouts).tolist()
        return [tuple(flat[a:b]) for a, b in pairwise(slot_offsets(rollouts))]

    def step(self, batch: Batch) -> StepReport:
        """See the contract. Raises RunError after `max_bad_steps` non-finite updates in a row."""
        updates = plan_updates(batch, self._config, self._objective, self._replicas)
        old = None
        if len(updates) > 1 and self._config.algorithm.old_logprobs == "trainer":
            old = self._policy_logprobs(batch.rollouts)
        return _combine([self._update(batch, update, old) for update in updates])

    def _update(self, batch: Batch, update: Update, old: Tensor | None) -> StepReport:
        """One optimizer step."""
        loss, stats = self._accumulate(batch, update, old)
        norm = self._clip()
        rate = learning_rate(self._settings, self._updates, self._config.steps * self._settings.updates_per_batch)
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite:
            self._apply(rate)
            self._updates += 1
            self._bad_in_a_row = 0
        self._clear()
        if not finite:
            self._count_bad(loss, norm)
        metrics = {
            "train/loss": loss,
            "train/grad_norm": norm,
            "train/lr": rate,
            "train/active_share": update.active_share,
        }
        skipped = () if finite else {batch.rollouts[index].group_id for index in update.indices}
        return StepReport(metrics | self._over_replicas(stats), int(finite), int(not finite), frozenset(skipped))

    def _count_bad(self, loss: float, norm: float) -> None:
        self._bad_in_a_row += 1
        if self._bad_in_a_row >= self._settings.max_bad_steps:
            raise RunError(
                f"{self._bad_in_a_row} optimizer steps in a row had a non-finite loss ({loss}) or gradient norm "
                f"({norm}) and were skipped; lower trainer.lr, or resume from an earlier checkpoint"
            )

    def _over_replicas(self, stats: Stats) -> dict[str, float]:
        """The metrics of all replicas' tokens; one wait for the device each for the sums and the maxima."""
        sums = self._replicas.sum(torch.stack([*stats.sums.values()]).tolist())
        maxima = self._replicas.max(torch.stack([*stats.maxima.values()]).tolist())
        return to_metrics(Stats(_named(stats.sums, sums), _named(stats.maxima, maxima)))

    def _counters(self) -> dict[str, int]:
        return {"updates": self._updates, "bad_in_a_row": self._bad_in_a_row}

    def _set_counters(self, counters: dict[str, int]) -> None:
        self._updates, self._bad_in_a_row = counters["updates"], counters["bad_in_a_row"]


def _named(names: Iterable[str], values: Sequence[float]) -> dict[str, Tensor]:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in zip(names, values, strict=True)}


def _combine(reports: Sequence[StepReport]) -> StepReport:
    """Means over the updates of a batch, maxima where the name says so, and the last learning rate."""
    metrics: dict[str, Any] = {}
    for name in dict.fromkeys(name for report in reports for name in report.metrics):
        values = [report.metrics[name] for report in reports if name in report.metrics]
        if name == "train/lr":
            metrics[name] = values[-1]
        else:
            metrics[name] = max(values) if name.endswith(("_max", "_max_deviation")) else sum(values) / len(values)
    skipped = frozenset(group for report in reports for group in report.skipped_groups)
    return StepReport(metrics, sum(r.updates for r in reports), sum(r.bad_updates for r in reports), skipped)
