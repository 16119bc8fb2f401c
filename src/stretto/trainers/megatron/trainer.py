"""The Megatron trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from stretto.algorithms.objective import Stats, merge
from stretto.config.run import RunConfig
from stretto.data.batching import MicroBatch, slot_offsets
from stretto.models.checkpoint import load_config, stored_dtype
from stretto.sync.binding import check_tensors, dtype_name
from stretto.sync.coordinates import atoms_of
from stretto.sync.files import CheckpointFiles, load
from stretto.sync.layout import Atoms, Layout
from stretto.sync.layouts import checkpoint_layout, megatron_layout
from stretto.trainers.base import StepReport
from stretto.trainers.export import export
from stretto.trainers.groups import DataParallel, Groups
from stretto.trainers.megatron import optimizer, parallel, state
from stretto.trainers.megatron.build import build_model
from stretto.trainers.megatron.passes import Passes, prepare
from stretto.trainers.offload import HostMemory
from stretto.trainers.precision import compute_dtype
from stretto.trainers.stepping import SteppingTrainer
from stretto.trainers.tokens import FlatTokens
from stretto.trainers.updates import Update
from stretto.types import Batch, Rollout
from stretto.world import World


class MegatronTrainer(SteppingTrainer):
    """Meets :class:`~stretto.trainers.base.Trainer` on Megatron-Core, cut over the world as `sizes` says.

    `directory` is the checkpoint that the run starts from; it is also the reference model when the loss has a KL term.
    One trainer a process: it makes Megatron's groups, which `parallel.stop` takes down. Raises ValueError when the
    sizes fit neither the world nor the model, or the checkpoint's family has no map or no model in Megatron-Core.
    """

    def __init__(self, directory: Path, config: RunConfig, world: World):
        atoms = atoms_of(directory, config.model.map)
        self._directory, self._world, self._sizes = directory, world, parallel.sizes_of(config, world.size)
        self._hf_config: Any = load_config(directory)
        self._dtype = compute_dtype(config.trainer, world)
        self._layout = self._layout_of(atoms)
        parallel.start(self._sizes, world, seed=config.seed, phase_s=config.rollout.timeout_s)
        self._groups = _groups(world.device)
        super().__init__(config, self._groups.replicas)
        build = self._builder(atoms.weights.megatron or {}, config.trainer.sequence_parallel)
        self._models = build()
        self._weights: Mapping[str, Tensor] | None = None
        self._check_built()
        self._fill(self._models)
        self._chunks = optimizer.wrap(self._models)
        self._optimizer = optimizer.Stepper(self._chunks, config.trainer, self._dtype)
        self._host = HostMemory(world.device)
        self._passes = self._passes_of(self._chunks)
        self._reference: Passes | None = None
        if self._objective.needs_reference:
            reference = build()
            self._fill(reference)
            self._reference = self._passes_of(reference)

    def _layout_of(self, atoms: Atoms) -> Layout:
        """The trainer's layout; refuses what it cannot carry, before any group is made."""
        return megatron_layout(atoms, dtype_name(self._dtype), self._sizes)

    def _check_built(self) -> None:
        check_tensors(self._layout, self._world.rank, self.weights())

    def _builder(self, options: Mapping[str, Any], sequence_parallel: bool) -> Any:
        def build() -> list[Any]:
            models = build_model(
                self._hf_config,
                self._sizes,
                options,
                dtype=self._dtype,
                device=self._world.device,
                sequence_parallel=sequence_parallel,
                recompute=self._settings.activation_checkpointing,
            )
            prepare(models[0].config)
            return models

        return build

    def _passes_of(self, chunks: Sequence[Any]) -> Passes:
        vocabulary = self._hf_config.get_text_config().vocab_size
        return Passes(chunks, self._sizes, self._groups, vocabulary, self._settings.logit_chunk_tokens)

    def _fill(self, models: Sequence[Any]) -> None:
        """Read this rank's boxes of the checkpoint; the padding of the vocabulary, which no box covers, is zero."""
        source, tensors = checkpoint_layout(self._layout.atoms, stored_dtype(self._directory)), local_tensors(models)
        with torch.no_grad():
            for tensor in tensors.values():
                tensor.zero_()
        with CheckpointFiles(self._directory) as files:
            load(files, source, self._layout, self._world.rank, tensors)

    def weights(self) -> Mapping[str, Tensor]:
        """See the contract: Megatron's local names, after `vp<chunk>.` when the rank has several chunks."""
        if self._weights is None:  # Megatron's parameters stay the same objects; finding them takes milliseconds
            self._weights = local_tensors(self._models)
        return self._weights

    def layout(self) -> Layout:
        """See the contract."""
        return self._layout

    def logprobs(self, rollouts: Sequence[Rollout]) -> list[tuple[float, ...]]:
        """See the contract. A replica's ranks put their shares together and each gets back its own."""
        shares = self._groups.over_replica(list(rollouts))
        start = sum(len(share) for share in shares[: self._groups.place])
        found = super().logprobs([rollout for share in shares for rollout in share])
        return found[start : start + len(rollouts)]

    def step(self, batch: Batch) -> StepReport:
        """See the contract. Raises RunError after `max_bad_steps` non-finite updates in a row."""
        report = super().step(self._together(batch))
        own = {rollout.group_id for rollout in batch.rollouts}
        return StepReport(report.metrics, report.updates, report.bad_updates, report.skipped_groups & own)

    def gradient(self, batch: Batch) -> tuple[float, dict[str, Tensor]]:
        """See `SteppingTrainer.gradient`."""
        self._optimizer.everywhere = True
        try:
            return super().gradient(self._together(batch))
        finally:
            self._optimizer.everywhere = False

    def _take_gradient(self) -> dict[str, Tensor]:
        found = {name: getattr(tensor, "main_grad", None) for name, tensor in self.weights().items()}
        return {name: gradient.clone() for name, gradient in found.items() if gradient is not None}

    def _together(self, batch: Batch) -> Batch:
        """The shares of a replica's ranks, on each of them."""
        shares = self._groups.over_replica(batch)
        return Batch(
            [rollout for share in shares for rollout in share.rollouts],
            [advantage for share in shares for advantage in share.advantages],
        )

    def _policy_logprobs(self, rollouts: Sequence[Rollout]) -> Tensor:
        return self._flat_logprobs(self._passes, rollouts, range(len(rollouts)))

    def _flat_logprobs(self, passes: Passes, rollouts: Sequence[Rollout], indices: Sequence[int]) -> Tensor:
        """Flat log-probs on every rank (slots of rollouts that were not asked for stay NaN)."""
        flat = torch.full((slot_offsets(rollouts)[-1],), torch.nan, device=self._world.device, dtype=torch.float64)

        def keep(micro: MicroBatch, logprobs_N: Tensor, _: Tensor) -> Tensor:
            flat[micro.slot_N] = logprobs_N.double()
            return logprobs_N.sum()

        if micro_batches := self._cut(passes, rollouts, indices):
            passes.run(micro_batches, keep, backward=False)
        return self._groups.tensor_from_last_stage(flat)

    def _cut(self, passes: Passes, rollouts: Sequence[Rollout], indices: Sequence[int]) -> list[MicroBatch]:
        return passes.cut_alike(rollouts, indices, self._settings.micro_batch_tokens, self._replicas)

    def _accumulate(self, batch: Batch, update: Update, old: Tensor | None) -> tuple[float, Stats]:
        """Sum the loss and its gradient over the update's micro-batches; both reach every stage."""
        reference = None
        if self._reference is not None:
            reference = self._flat_logprobs(self._reference, batch.rollouts, update.indices)
        tokens = FlatTokens.of(batch, update.weights, old, reference)
        micro_batches = self._cut(self._passes, batch.rollouts, update.active)
        backward = bool(micro_batches)
        if not backward:
            # No sample has an advantage: the gradient stays exactly zero, and passes forward alone are for the report.
            micro_batches = self._cut(self._passes, batch.rollouts, update.indices) or self._passes.fillers()
        found: list[tuple[Tensor, Stats]] = []

        def lose(micro: MicroBatch, current_N: Tensor, entropy_N: Tensor) -> Tensor:
            if not self._objective.needs_entropy:
                entropy_N = entropy_N.detach()
            loss, stats = self._objective(tokens.at(micro.slot_N, current_N, entropy_N))
            found.append((loss.detach().double(), stats))
            return loss

        self._passes.run(micro_batches, lose, backward=backward)
        if backward:
            self._optimizer.finish_gradient()
        loss, stats = self._from_last_stage(found)
        return self._replicas.sum([loss if backward else 0.0])[0], stats

    def _from_last_stage(self, found: Sequence[tuple[Tensor, Stats]]) -> tuple[float, Stats]:
        """The sum of the micro-batches' losses and stats, which only the last stage has."""
        said = None
        if found:
            losses, stats = zip(*found, strict=True)
            merged = reduce(merge, stats)
            sums, maxima = ({name: float(v) for name, v in part.items()} for part in (merged.sums, merged.maxima))
            said = float(torch.stack(losses).sum()), sums, maxima
        loss, sums, maxima = self._groups.from_last_stage(said)
        return loss, Stats(
            *({name: torch.tensor(v, dtype=torch.float64) for name, v in p.items()} for p in (sums, maxima))
        )

    def _clip(self) -> float:
        # Ranks sum the squares in their own order; all must come to the same decision, and report the same number.
        return self._world.from_first(self._optimizer.clip())

    def _apply(self, rate: float) -> None:
        self._optimizer.apply(rate)

    def _clear(self) -> None:
        self._optimizer.clear()

    def offload(self) -> None:
        """See the contract."""
        self._host.take(self._optimizer.own_tensors())

    def onload(self) -> None:
        """See the contract."""
        self._host.give_back(self._optimizer.own_tensors())

    def save(self, directory: Path) -> None:
        """See the contract."""
        state.save(directory, self._models, self._optimizer, self._counters())

    def load(self, directory: Path) -> None:
        """See the contract."""
        self._set_counters(state.load(directory, self._models, self._optimizer))

    def export(self, directory: Path, dtype: torch.dtype) -> None:
        """See the contract."""
        export(directory, self._layout, self.weights, dtype, self._directory, self._world)


def local_tensors(models: Sequence[Any]) -> Mapping[str, Tensor]:
    """Parameters and persistent buffers by local name, after `vp<chunk>.` when there are several chunks."""
    return {
        f"vp{chunk}.{name}" if len(models) > 1 else name: tensor
        for chunk, model in enumerate(models)
        for name, tensor in model.state_dict(keep_vars=True).items()
        if isinstance(tensor, Tensor)
    }


def _groups(device: torch.device) -> Groups:
    """Megatron's, after `parallel.start`."""
    return Groups(
        device=device,
        tensor=parallel_state.get_tensor_model_parallel_group(),
        pipeline=parallel_state.get_pipeline_model_parallel_group(),
        replica=parallel_state.get_model_parallel_group(),
        replicas=DataParallel(parallel_state.get_data_parallel_group(), device),
    )
