"""The dtype that a trainer computes in."""

from __future__ import annotations

import torch

from stretto.config.sections import TrainerConfig
from stretto.world import World


def compute_dtype(config: TrainerConfig, world: World) -> torch.dtype:
    """The dtype of the forward and backward pass."""
    if config.dtype == "auto":
        return torch.bfloat16 if world.device.type == "cuda" else torch.float32
    return getattr(torch, config.dtype)
