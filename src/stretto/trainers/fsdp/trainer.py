"""The FSDP2 trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from stretto.algorithms.objective import Stats, merge
from stretto.config.run import RunConfig
from stretto.data.batching import MicroBatch, cut, filler, slot_offsets
from stretto.models.checkpoint import odd_layers
from stretto.sync.binding import check_tensors, dtype_name
from stretto.sync.coordinates import atoms_of
from stretto.sync.layout import Layout
from stretto.sync.layouts import fsdp_layout
from stretto.trainers.export import export
from stretto.trainers.fsdp import state
from stretto.trainers.fsdp.build import build_optimizer, build_policy, master_dtype
from stretto.trainers.offload import HostMemory
from stretto.trainers.stepping import SteppingTrainer
from stretto.trainers.tokens import FlatTokens
from stretto.trainers.updates import Update
from stretto.types import Batch, Rollout
from stretto.world import World, local_part, whole


class FSDPTrainer(SteppingTrainer):
    """Meets :class:`~stretto.trainers.base.Trainer` for Hugging Face models.

    `directory` is the checkpoint that the run starts from; it is also the reference model when the loss has a KL term.
    """

    def __init__(self, directory: Path, config: RunConfig, world: World):
        super().__init__(config, world)
        self._world = world
        self._directory = directory
        self._policy = build_policy(directory, config.trainer, world)
        self._weights = state.checkpoint_tensors(self._policy)
        self._odd = bool(odd_layers(self._policy.model.config))
        self._optimizer = build_optimizer(self._policy, config.trainer)
        self._host = HostMemory(world.device)
        self._reference = build_policy(directory, config.trainer, world) if self._objective.needs_reference else None
        master = dtype_name(master_dtype(config.trainer, world))
        self._layout = fsdp_layout(atoms_of(directory, config.model.map), master, world.size)
        check_tensors(self._layout, world.rank, self.weights())

    def weights(self) -> Mapping[str, Tensor]:
        """See the contract."""
        return self._weights

    def layout(self) -> Layout:
        """See the contract."""
        return self._layout

    def _policy_logprobs(self, rollouts: Sequence[Rollout]) -> Tensor:
        return self._logprobs(self._policy, rollouts, range(len(rollouts)))

    def _clip(self) -> float:
        return float(whole(nn.utils.clip_grad_norm_(self._policy.parameters(), self._settings.clip_grad)))

    def _apply(self, rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()

    def _clear(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def _take_gradient(self) -> dict[str, Tensor]:
        gradients = {name: tensor.grad for name, tensor in self.weights().items()}
        return {name: local_part(gradient).clone() for name, gradient in gradients.items() if gradient is not None}

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
        batching = "packed" if settings.packed and not self._odd else "padded"
        parts = cut(rollouts, indices, batching=batching, micro_batch_tokens=settings.micro_batch_tokens)
        passes = int(self._world.max([len(parts)])[0])
        parts += [filler()] * (passes - len(parts))
        return [part.to(self._world.device) for part in parts], passes

    def offload(self) -> None:
        """See the contract."""
        self._host.take(state.optimizer_tensors(self._optimizer))

    def onload(self) -> None:
        """See the contract."""
        self._host.give_back(state.optimizer_tensors(self._optimizer))

    def save(self, directory: Path) -> None:
        """See the contract."""
        state.save(directory, self._policy, self._optimizer, self._counters())

    def load(self, directory: Path) -> None:
        """See the contract."""
        self._set_counters(state.load(directory, self._policy, self._optimizer, self._counters()))

    def export(self, directory: Path, dtype: torch.dtype) -> None:
        """See the contract."""
        export(directory, self._layout, self.weights, dtype, self._directory, self._world)
