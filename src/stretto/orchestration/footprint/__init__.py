"""What one process of a run will hold in memory at most, from shapes alone: nothing is loaded, nothing computed."""

from __future__ import annotations

from pathlib import Path

from stretto.config.run import RunConfig
from stretto.orchestration.footprint.fsdp import fsdp_footprint
from stretto.orchestration.footprint.megatron import megatron_footprint, replicas
from stretto.orchestration.footprint.shapes import Cut, Footprint, Slabs, passes, slabs
from stretto.world import World

__all__ = ["Cut", "Footprint", "Slabs", "footprint", "passes", "replicas", "slabs"]


def footprint(directory: Path, config: RunConfig, world: World, largest: Slabs, micro: Cut) -> Footprint | None:
    """Forecast for a process of `world` that generates into the slabs `largest` and trains in micro-batches `micro`.

    Of the ranks that differ it is the one with the most. None when the layout is unknown: with bridge names, of a
    family that has no weight map for Megatron-Core. Raises ValueError when the embedded engine cannot serve the model,
    or the trainer cannot cut it as it is told to.
    """
    forecast = fsdp_footprint if config.trainer.backend == "fsdp" else megatron_footprint
    return forecast(directory, config, world, largest, micro)
