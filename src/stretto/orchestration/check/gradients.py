"""A trainer's gradient as tensors of its layout, and in the coordinates of the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from stretto.orchestration.check.compare import of_gradients
from stretto.sync.files import export
from stretto.sync.layout import Layout
from stretto.sync.layouts import checkpoint_layout
from stretto.trainers import Trainer
from stretto.trainers.stepping import SteppingTrainer
from stretto.types import Batch
from stretto.world import World, local_part


def local_gradient(trainer: Trainer, batch: Batch) -> dict[str, Tensor]:
    """This rank's gradient of one update over the whole batch, by the layout's local names; the weights stay.

    All ranks call, each with its share. What no gradient reaches (buffers, experts without a token) has zeros.
    """
    assert isinstance(trainer, SteppingTrainer), "both trainers are"
    _, found = trainer.gradient(batch)
    zeros = {
        name: torch.zeros_like(local_part(tensor.detach()), dtype=torch.float32)
        for name, tensor in trainer.weights().items()
        if name not in found
    }
    return {name: tensor.float() for name, tensor in found.items()} | zeros


def write_gradient(layout: Layout, gradient: Mapping[str, Tensor], directory: Path, world: World) -> None:
    """Write a gradient, by the layout of its weights, to files as if it were them. All ranks call; the first writes."""
    layout = of_gradients(layout)
    target = of_gradients(checkpoint_layout(layout.atoms, "float32"))
    if world.first:
        directory.mkdir()
    export(directory, layout, target, world.rank, lambda: gradient, world.device)
    world.barrier()
