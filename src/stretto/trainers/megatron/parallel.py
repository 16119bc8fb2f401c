"""Megatron's parallel groups: made from our sizes, and taken down."""

from __future__ import annotations

import importlib.util
import math
from contextlib import suppress

import torch
import torch.distributed as dist

from stretto.config.run import RunConfig
from stretto.sync.parallel import MegatronSizes
from stretto.trainers.megatron import cpu, require_megatron
from stretto.world import World, ensure_group

_LEAST_MINUTES = 10


def sizes_of(config: RunConfig, ranks: int) -> MegatronSizes:
    """The run's parallel sizes on `ranks` processes: what tensor and pipeline parallelism leave is data parallel.

    Raises ValueError when the sizes do not divide the processes.
    """
    trainer = config.trainer
    if ranks % (trainer.tp * trainer.pp):
        raise ValueError(
            f"trainer.tp = {trainer.tp} x trainer.pp = {trainer.pp} does not divide the {ranks} processes of the run; "
            f"start a multiple of {trainer.tp * trainer.pp} with torchrun"
        )
    return MegatronSizes(
        tp=trainer.tp,
        pp=trainer.pp,
        vpp=trainer.vpp,
        ep=trainer.ep,
        etp=trainer.etp,
        dp=ranks // (trainer.tp * trainer.pp),
        pp_layers=trainer.pp_layers,
        te=transformer_engine(),
    )


def start(sizes: MegatronSizes, world: World, *, seed: int = 0, phase_s: float = 0.0) -> None:
    """Make Megatron's process groups in its default rank order, and seed its model-parallel generators.

    Every rank calls it, once; `stop` undoes it. A collective waits for `phase_s` seconds and ten minutes. torch's own
    generator of the CPU is left as it was. Beside NCCL there are gloo groups for objects; on gloo the groups themselves
    serve. Raises ValueError when the sizes do not make up the world.
    """
    if sizes.ranks != world.size:
        raise ValueError(
            f"megatron: tp x pp x dp = {sizes.tp} x {sizes.pp} x {sizes.dp} = {sizes.ranks} ranks, and there are "
            f"{world.size} processes; start {sizes.ranks} or change the sizes"
        )
    require_megatron()
    cpu.enable()
    ensure_group(world, phase_s)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        virtual_pipeline_model_parallel_size=sizes.vpp if sizes.vpp > 1 else None,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=sizes.etp,
        distributed_timeout_minutes=_LEAST_MINUTES + math.ceil(phase_s / 60),
        create_gloo_process_groups=dist.get_backend() == "nccl",
    )
    state = torch.get_rng_state()
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    torch.set_rng_state(state)


def stop() -> None:
    """End the groups that `start` made. The world's own group stays; `leave_world` ends it.

    Megatron would only forget them (before 0.19), and each has threads (gloo) or buffers (NCCL) of its own.
    """
    from megatron.core import parallel_state

    made = dict.fromkeys(filter(None, getattr(parallel_state, "_global_process_group_list", None) or ()))
    parallel_state.destroy_model_parallel()
    for group in made:
        with suppress(ValueError):  # ended by Megatron itself
            dist.destroy_process_group(group)


def transformer_engine() -> bool:
    """Whether Megatron's layers are Transformer Engine's: where it is installed, on CUDA (written, not run)."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None
