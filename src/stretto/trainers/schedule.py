"""The learning rate as a function of the optimizer step alone, so that it needs no state."""

from __future__ import annotations

import math

from stretto.config.sections import TrainerConfig


def learning_rate(config: TrainerConfig, update: int, total_updates: int) -> float:
    """Learning rate of optimizer step `update` (from 0): linear warm-up, then constant, linear or cosine decay.

    The first step has ``lr / warmup_steps``. A decay starts at ``lr`` and would reach ``lr * min_lr_ratio`` one step
    after the last, so that no step of a run is idle. Cosine: Loshchilov
    and Hutter 2017 (arXiv:1608.03983), eq. 5, without restarts.
    """
    if update < config.warmup_steps:
        return config.lr * (update + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    done = (update - config.warmup_steps) / max(1, total_updates - config.warmup_steps)
    done = min(1.0, done)
    shape = 1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * shape)
