"""The forecast for the Megatron trainer, from its layout."""

from __future__ import annotations

from math import ceil, prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from stretto.config.run import RunConfig
from stretto.engines.embedded.model import build_module
from stretto.models.checkpoint import load_config
from stretto.models.language import Row
from stretto.orchestration.dtypes import engine_dtype
from stretto.orchestration.footprint.engine import rollout_phase, transfer_buffers
from stretto.orchestration.footprint.probe import Probe
from stretto.orchestration.footprint.shapes import PROCESS_BYTES, Cut, Footprint, Slabs
from stretto.sync.binding import dtype_name
from stretto.sync.coordinates import atoms_of
from stretto.sync.layout import Atoms, Layout
from stretto.sync.layouts import checkpoint_layout, megatron_layout, replica_layout
from stretto.sync.parallel import MegatronSizes
from stretto.trainers.megatron import require_megatron
from stretto.trainers.megatron.parallel import sizes_of
from stretto.trainers.precision import compute_dtype
from stretto.world import World

_MEGATRON_BYTES = 80 * 2**20
"""What importing Megatron-Core adds to a process."""
_FLOAT32 = 4
_COPIES = 1.25
"""Megatron's local layers keep the query and the MLP's up half once more than transformers: at most a quarter of what
is kept inside a block."""


def replicas(config: RunConfig, ranks: int) -> int:
    """How many share out the samples among `ranks` processes.

    Raises ValueError, the trainer's own, when its sizes do not make up the processes or it is not installed.
    """
    return ranks if config.trainer.backend == "fsdp" else _sizes(config, ranks).dp


def megatron_footprint(
    directory: Path, config: RunConfig, world: World, largest: Slabs, micro: Cut
) -> Footprint | None:
    """See `stretto.orchestration.footprint.footprint`. Of the pipeline's stages, it is that with the most."""
    sizes, atoms = _sizes(config, world.size), atoms_of(directory, config.model.map)
    if atoms.weights.megatron is None and config.trainer.names == "bridge":
        return None
    dtype = compute_dtype(config.trainer, world)
    _check(directory, config, sizes, dtype)
    layout = megatron_layout(atoms, dtype_name(dtype), sizes)
    probe = Probe(build_module(directory), dtype, repeat=False)
    rollout = rollout_phase(config, probe, largest, engine_dtype(config, world))
    stages = [_Stage.of(layout, stage, sizes) for stage in range(sizes.pp)]
    forecasts = [
        Footprint(
            _standing(config, world, layout, stage, dtype),
            rollout,
            _training(config, sizes, micro, probe, stage, dtype),
            _update(config, world, atoms, stage, dtype),
        )
        for stage in stages
    ]
    return max(forecasts, key=lambda one: one.total)


def _sizes(config: RunConfig, ranks: int) -> MegatronSizes:
    require_megatron()
    return sizes_of(config, ranks)


def _check(directory: Path, config: RunConfig, sizes: MegatronSizes, dtype: torch.dtype) -> None:
    """Raise ValueError for what the trainer refuses beyond its sizes."""
    from stretto.trainers.megatron.provider import run_settings

    if config.trainer.names == "raw":
        parallel = config.trainer.sequence_parallel
        run_settings(load_config(directory), sizes, dtype=dtype, sequence_parallel=parallel, recompute=False)


class _Stage(NamedTuple):
    """What the first rank of a pipeline stage holds; its others hold as much."""

    number: int
    layers: float
    """The share of the model's layers."""
    held: int
    """Bytes of the weights."""
    learns: int
    """Values with a gradient."""
    optimizes: int
    """Those among them whose optimizer state is here."""
    most: int
    """Values of the largest of its tensors."""

    @classmethod
    def of(cls, layout: Layout, stage: int, sizes: MegatronSizes) -> _Stage:
        """Data-parallel ranks share the optimizer, those with the same experts the experts' (Rajbhandari et al. 2020,
        ZeRO, arXiv:1910.02054, section 5.1)."""
        atoms, rank = layout.atoms, stage * sizes.tp * sizes.dp
        kind = layout.kind(rank)
        experts = {piece for row in atoms.weights.rows if _is_expert(row) for piece in row.pieces}
        dense = expert = most = 0
        # Any shard of a tensor says what it is.
        for index, shard in zip(*np.unique(layout.shards.tensor, return_index=True), strict=True):
            tensor, piece = layout.tensors[index], atoms.pieces[layout.shards.atom[shard]]
            if tensor.kind != kind or piece.buffer:
                continue
            values = prod(tensor.shape) * (1 if tensor.count is None else tensor.count)
            dense, expert = (dense, expert + values) if piece in experts else (dense + values, expert)
            most = max(most, prod(tensor.shape))
        optimizes = ceil(dense / sizes.dp) + ceil(expert / (sizes.edp if sizes.ep > 1 else sizes.dp))
        held = sizes.layers(atoms.weights.layer_count)[stage]
        share = sum(map(len, held)) / atoms.weights.layer_count
        return cls(stage, share, layout.local_bytes(rank), dense + expert, optimizes, most)


def _is_expert(row: Row) -> bool:
    return row.cut and any("e" in piece.factors for piece in row.pieces)


def _standing(config: RunConfig, world: World, layout: Layout, stage: _Stage, dtype: torch.dtype) -> dict[str, int]:
    """Gradients add up in float32 buffers that stay. The optimizer has two moments, and weights of its own beside those
    of another dtype. The buffers' padding, less than 64 values a tensor, is left out.
    """
    serve = engine_dtype(config, world)
    own = 2 if dtype == torch.float32 else 3
    moves = config.trainer.names == "raw" and any(len(group) < layout.ranks for group in layout.groups)
    embedded = config.engine.backend == "embedded"
    return {
        "process": PROCESS_BYTES + _MEGATRON_BYTES,
        "weights": stage.held,
        "gradients": stage.learns * _FLOAT32,
        "optimizer": stage.optimizes * own * _FLOAT32,
        "reference": stage.held if config.algorithm.kl_coef > 0 else 0,
        "engine weights": replica_layout(layout.atoms, dtype_name(serve), 1).local_bytes(0) if embedded else 0,
        "transfer buffers": transfer_buffers(config, stage.learns, serve, moves=moves),
    }


def _training(
    config: RunConfig, sizes: MegatronSizes, micro: Cut, probe: Probe, stage: _Stage, dtype: torch.dtype
) -> dict[str, int]:
    """A weight's gradient is whole before it is added to the buffer, twice where chunks of the head add up."""
    last = stage.number == sizes.pp - 1
    loss_tokens = min(config.trainer.logit_chunk_tokens, micro.loss_tokens)
    return {
        "weight's gradient": 2 * stage.most * dtype.itemsize,
        "activations": _activations(config, sizes, micro, probe, stage) * dtype.itemsize,
        # The scaled logits, what the maximum leaves of them, their exponentials, and the gradients of both.
        "logits chunk": 5 * loss_tokens * ceil(probe.vocabulary / sizes.tp) * _FLOAT32 if last else 0,
    }


def _activations(config: RunConfig, sizes: MegatronSizes, micro: Cut, probe: Probe, stage: _Stage) -> int:
    """Values that a stage keeps for the backward passes of the micro-batches under way.

    Tensor parallelism cuts what is inside a layer's blocks, sequence parallelism also the stream between them:
    Korthikanti et al. 2022 (arXiv:2205.05198), sections 4.1 and 4.2. Layers count alike, and experts are taken to get
    equally many tokens.
    """
    trainer = config.trainer
    length = ceil(micro.length / sizes.tp) * sizes.tp if trainer.sequence_parallel else micro.length
    whole = 1 / sizes.tp if trainer.sequence_parallel else 1.0
    kept = probe.stream_values * whole + _COPIES * (probe.saved_values - probe.stream_values) / sizes.tp
    batches = under_way(sizes, stage.number, ceil(micro.passes / trainer.updates_per_batch))
    if trainer.activation_checkpointing:
        inputs = probe.hidden * probe.layers * stage.layers * whole
        return ceil(micro.rows * length * (inputs * batches + kept / probe.layers))
    return ceil(micro.rows * length * kept * stage.layers * batches)


def under_way(sizes: MegatronSizes, stage: int, passes: int) -> float:
    """Of `passes` micro-batches, how many a stage has been through forward and not yet back; of chunks, their share.

    One forward, one backward, after a warm-up that fills the stages behind: Narayanan et al. 2021 (arXiv:2104.04473),
    section 2.2. The interleaved schedule warms up with two passes for each of them, and all chunks but one.
    """
    behind = sizes.pp - stage - 1
    if sizes.vpp == 1:
        return min(passes, behind + 1)
    rounds = ceil(passes / sizes.pp) * sizes.pp
    return min(rounds * sizes.vpp, 2 * behind + (sizes.vpp - 1) * sizes.pp + 1) / sizes.vpp


def _update(config: RunConfig, world: World, atoms: Atoms, stage: _Stage, dtype: torch.dtype) -> dict[str, int]:
    """On CUDA, torch's AdamW takes the roots of all second moments at once. The bridge gathers a tensor at a time."""
    bridge = config.trainer.names == "bridge"
    tensors = checkpoint_layout(atoms, dtype_name(dtype)).tensors if bridge else ()
    return {
        "roots of moments": stage.optimizes * _FLOAT32 if world.device.type == "cuda" else 0,
        "gathered tensor": 2 * max((prod(tensor.shape) for tensor in tensors), default=0) * dtype.itemsize,
    }
