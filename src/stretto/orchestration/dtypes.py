"""The type of the engine's weights."""

from __future__ import annotations

import torch

from stretto.config import RunConfig
from stretto.world import World


def engine_dtype(config: RunConfig, world: World) -> torch.dtype:
    """The dtype of the engine's weights."""
    if config.engine.dtype == "auto":
        return torch.bfloat16 if world.device.type == "cuda" else torch.float32
    return getattr(torch, config.engine.dtype)
