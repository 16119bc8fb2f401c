"""The FSDP2 trainer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from stretto.algorithms.objective import Objective, Stats, merge, to_metrics
from stretto.config.run import RunConfig
from stretto.data.batching import MicroBatch, cut, filler, slot_offsets
from stretto.errors import RunError
from stretto.sync.layout import Layout, layout_of
from stretto.trainers.base import StepReport
from stretto.trainers.fsdp import state
from stretto.trainers.fsdp.build import build_optimizer, build_policy
from stretto.trainers.fsdp.plan import Update, plan_updates
from stretto.trainers.schedule import learning_rate
from stretto.trainers.tokens import FlatTokens
from stretto.types import Batch, Rollout
from stretto.world import World, whole


class FSDPTrainer:
    """Meets :class:`~stretto.trainers.base.Trainer` for Hugging Face models.

    `directory` is the checkpoint that the run starts from; it is also the reference model when the loss has a KL term.
    """

    def __init__(self, directory: Path, config: RunConfig, world: World):
        self._config, self._settings = config, config.trainer
        self._world = world
        self._directory = directory
        self._policy = build_policy(directory, config.trainer, world)
        self._optimizer = build_optimizer(self._policy, config.trainer)
        self._objective = Objective(config.algorithm)
        self._reference = build_policy(directory, config.trainer, world) if self._objective.needs_reference else None
        self._updates = 0
        self._bad_in_a_row = 0

    def weights(self) -> Mapping[str, Tensor]:
        """See the contract."""
        return state.checkpoint_tensors(self._policy)

    def layout(self) -> Layout:
        """See the contract."""
        return layout_of(self.weights().items())

    def logprobs(self, rollouts: Sequence[Rollout]) -> list[tuple[float, ...]]:
        """See the contract."""
        flat = self._logprobs(self._policy, rollouts, range(len(rollouts))).tolist()
        offsets = slot_offsets(rollouts)
        return [tuple(flat[a:b]) for a, b in pairwise(offsets)]

    def step(self, batch: Batch) -> StepReport:
        """See the contract. Raises RunError after `max_bad_steps` non-finite updates in a row."""
        updates = plan_updates(batch, self._config, self._objective, self._world)
        old = None
        if len(updates) > 1 and self._config.algorithm.old_logprobs == "trainer":
            old = self._logprobs(self._policy, batch.rollouts, range(len(batch.rollouts)))
        reports = [self._update(batch, update, old) for update in updates]
        return _combine(reports)

    def _update(self, batch: Batch, update: Update, old: Tensor | None) -> StepReport:
        """One optimizer step."""
        loss, stats = self._accumulate(batch, update, old)
        norm = float(whole(nn.utils.clip_grad_norm_(self._policy.parameters(), self._settings.clip_grad)))
        rate = learning_rate(self._settings, self._updates, self._config.steps * self._settings.updates_per_batch)
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite:
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
            self._updates += 1
            self._bad_in_a_row = 0
        self._optimizer.zero_grad(set_to_none=True)
        if not finite:
            self._count_bad(loss, norm)
        metrics = {
            "train/loss": loss,
            "train/grad_norm": norm,
            "train/lr": rate,
            "train/active_share": update.active_share,
        }
        skipped = () if finite else {batch.rollouts[index].group_id for index in update.indices}
        return StepReport(metrics | self._over_ranks(stats), int(finite), int(not finite), frozenset(skipped))

    def _counters(self) -> dict[str, int]:
        return {"updates": self._updates, "bad_in_a_row": self._bad_in_a_row}

    def _count_bad(self, loss: float, norm: float) -> None:
        self._bad_in_a_row += 1
        if self._bad_in_a_row >= self._settings.max_bad_steps:
            raise RunError(
                f"{self._bad_in_a_row} optimizer steps in a row had a non-finite loss ({loss}) or gradient norm "
                f"({norm}) and were skipped; lower trainer.lr, or resume from an earlier checkpoint"
            )

    def _accumulate(self, batch: Batch, update: Update, old: Tensor | None) -> tuple[float, Stats]:
        """Sum the loss and its gradient over the update's micro-batches; every rank makes the same number of passes."""
        reference = None
        if self._reference is not None:
            reference = self._logprobs(self._reference, batch.rollouts, update.indices)
        tokens = FlatTokens.of(batch, update.weights, old, reference)
        micro_batches, passes = self._cut(batch.rollouts, update.active)
        total, stats = torch.zeros((), dtype=torch.float64, device=self._world.device), None
        for micro in micro_batches:
            loss, part = self._loss(tokens, micro)
            (loss * self._world.size).backward()  # sharded gradients are averaged over ranks; the loss is a sum
            total += loss.detach().double()
            stats = part if stats is None else merge(stats, part)
        if not passes:
            stats = self._without_gradient(tokens, batch.rollouts, update)
        assert stats is not None
        return self._world.sum([float(total)])[0], stats

    def _loss(self, tokens: FlatTokens, micro: MicroBatch) -> tuple[Tensor, Stats]:
        current_N, entropy_N = self._policy(micro)
        if not self._objective.needs_entropy:
            # Its graph would keep the logits of every chunk, recomputed, until the backward pass ends.
            entropy_N = entropy_N.detach()
        return self._objective(tokens.at(micro.slot_N, current_N, entropy_N))

    @torch.no_grad()
    def _without_gradient(self, tokens: FlatTokens, rollouts: Sequence[Rollout], update: Update) -> Stats:
        """No sample has an advantage: a gradient of exactly zero, and a pass forward alone for what is reported."""
        for parameter in self._policy.parameters():
            parameter.grad = torch.zeros_like(parameter)
        micro_batches = self._cut(rollouts, update.indices)[0] or [filler().to(self._world.device)]
        stats = reduce(merge, (self._loss(tokens, micro)[1] for micro in micro_batches))
        self._reshard(self._policy)
        return stats

    def _reshard(self, policy: nn.Module) -> None:
        """After a pass without a backward: else the root stays gathered, deaf to an optimizer step before the next."""
        if isinstance(policy, FSDPModule):
            policy.reshard()

    @torch.no_grad()
    def _logprobs(self, policy: nn.Module, rollouts: Sequence[Rollout], indices: Sequence[int]) -> Tensor:
        """Flat log-probs (slots of rollouts that were not asked for stay NaN)."""
        flat = torch.full((slot_offsets(rollouts)[-1],), torch.nan, device=self._world.device, dtype=torch.float64)
        for micro in self._cut(rollouts, indices)[0]:
            flat[micro.slot_N] = policy(micro)[0].double()
        self._reshard(policy)
        return flat

    def _cut(self, rollouts: Sequence[Rollout], indices: Sequence[int]) -> tuple[list[MicroBatch], int]:
        """This rank's micro-batches, filled up to the largest number on any rank, and that number."""
        settings = self._settings
        parts = cut(rollouts, indices, batching=settings.batching, micro_batch_tokens=settings.micro_batch_tokens)
        passes = int(self._world.max([len(parts)])[0])
        parts += [filler()] * (passes - len(parts))
        return [part.to(self._world.device) for part in parts], passes

    def _over_ranks(self, stats: Stats) -> dict[str, float]:
        """The metrics of all ranks' tokens; one wait for the device each for the sums and the maxima."""
        sums = self._world.sum(torch.stack([*stats.sums.values()]).tolist())
        maxima = self._world.max(torch.stack([*stats.maxima.values()]).tolist())
        return to_metrics(Stats(_named(stats.sums, sums), _named(stats.maxima, maxima)))

    def offload(self) -> None:
        """See the contract."""
        state.move_optimizer(self._optimizer, torch.device("cpu"))

    def onload(self) -> None:
        """See the contract."""
        state.move_optimizer(self._optimizer, self._world.device)

    def save(self, directory: Path) -> None:
        """See the contract."""
        state.save(directory, self._policy, self._optimizer, self._counters())

    def load(self, directory: Path) -> None:
        """See the contract."""
        read = state.load(directory, self._policy, self._optimizer, self._counters())
        self._updates, self._bad_in_a_row = read["updates"], read["bad_in_a_row"]

    def export(self, directory: Path, dtype: torch.dtype) -> None:
        """See the contract."""
        state.export(directory, self._policy, dtype, self._directory, self._world)


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
