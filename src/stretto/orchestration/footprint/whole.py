"""The forecast of a whole run, from its configuration and the sizes of its data."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from pathlib import Path

from stretto.config.run import RunConfig
from stretto.models.checkpoint import load_config, odd_layers
from stretto.orchestration.footprint.engine import server_footprint
from stretto.orchestration.footprint.fsdp import fsdp_footprint
from stretto.orchestration.footprint.megatron import megatron_footprint, replicas
from stretto.orchestration.footprint.shapes import Cut, Footprint, ServerFootprint, Sizes, Slabs, passes, slabs
from stretto.world import World


@dataclass(frozen=True)
class Forecast:
    """`step` are the responses of a training step that a process generates at a time, `micro` how it trains on them.

    `process` is the trainer's process that holds the most, None when its layout is unknown; `server` is what the
    rollout engine takes beside it, None for one in that process or when the model's layers are unknown.
    """

    step: Slabs
    micro: Cut
    process: Footprint | None = None
    server: ServerFootprint | None = None


def forecast(directory: Path | None, config: RunConfig, world: World, sizes: Sizes, device_bytes: int = 0) -> Forecast:
    """Forecast for a process of `world`, whose device has `device_bytes`; shapes alone without the model's `directory`.

    Raises ValueError for sizes of the trainer that do not make up the processes, and for a model that the embedded
    engine or the trainer cannot take.
    """
    prompts, samples = config.rollout.prompts_per_step, config.rollout.samples_per_prompt
    step = _slabs(config, world, prompts, samples, sizes.longest_train)
    # The processes of a replica put their samples together.
    micro = passes(config, ceil(prompts / replicas(config, world.size)), sizes.longest_train)
    served = config.engine.backend != "embedded"
    if directory is None or (served and odd_layers(load_config(directory))):  # the probe knows full attention alone
        return Forecast(step, micro)
    held = config.data.heldout if sizes.heldout is None else sizes.heldout
    evaluation = _slabs(config, world, held, config.eval.samples, sizes.longest_heldout)
    largest = max(step, evaluation, key=lambda one: one.tokens)
    process = footprint(directory, config, world, largest, micro)
    if not served or config.engine.url is not None:
        return Forecast(step, micro, process)
    return Forecast(step, micro, process, server_footprint(directory, config, world, largest, device_bytes))


def footprint(directory: Path, config: RunConfig, world: World, largest: Slabs, micro: Cut) -> Footprint | None:
    """Forecast for a process of `world` that generates into the slabs `largest` and trains in micro-batches `micro`.

    Of the ranks that differ it is the one with the most. None when the layout is unknown: with bridge names, of a
    family that has no weight map for Megatron-Core. Raises ValueError when the embedded engine cannot serve the model,
    or the trainer cannot cut it as it is told to.
    """
    kind = fsdp_footprint if config.trainer.backend == "fsdp" else megatron_footprint
    return kind(directory, config, world, largest, micro)


def _slabs(config: RunConfig, world: World, prompts: int, samples: int, longest: int) -> Slabs:
    """What one engine generates at a time: a process's share, or that of the processes that share a server."""
    groups = ceil(prompts * config.engine.tp / world.size)
    return slabs(groups, samples, longest, config.rollout.max_new_tokens, config.engine.max_sequences)
