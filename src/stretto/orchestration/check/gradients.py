"""A trainer's gradient as tensors of its layout, and in the coordinates of the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stretto.orchestration.check.compare import without_shift
from stretto.sync.files import export
from stretto.sync.layouts import checkpoint_layout
from stretto.trainers.updates import plan_updates
from stretto.types import Batch
from stretto.world import World, local_part


def local_gradient(trainer: Any, batch: Batch) -> dict[str, Tensor]:
    """This rank's gradient of one update over the whole batch, by the layout's local names; the weights stay.

    All ranks call, each with its share. What no gradient reaches (buffers) has zeros.
    """
    megatron = hasattr(trainer, "_chunks")
    if megatron:
        batch = _together(trainer, batch)
        _finish_on_every_replica(trainer)
    (update,) = plan_updates(batch, trainer._config, trainer._objective, trainer._replicas)
    trainer._accumulate(batch, update, None)
    if megatron:
        del trainer._optimizer.finish_gradient
    found = {name: _gradient(tensor) for name, tensor in trainer.weights().items()}
    trainer._clear()
    return found


def _together(trainer: Any, batch: Batch) -> Batch:
    """The shares of a replica's ranks."""
    shares = trainer._groups.over_replica(batch)
    return Batch([r for s in shares for r in s.rollouts], [a for s in shares for a in s.advantages])


def _finish_on_every_replica(trainer: Any) -> None:
    """A distributed optimizer needs each replica's part of the gradient alone; here all of it is looked at."""
    from megatron.core.distributed import finalize_model_grads

    trainer._optimizer.finish_gradient = lambda: finalize_model_grads(trainer._chunks, force_all_reduce=True)


def _gradient(tensor: Any) -> Tensor:
    found = getattr(tensor, "main_grad", None)
    found = tensor.grad if found is None else found
    if found is None:
        return torch.zeros_like(local_part(tensor.detach()), dtype=torch.float32)
    return local_part(found.detach()).float().clone()


def write_gradient(trainer: Any, gradient: Mapping[str, Tensor], directory: Path, world: World) -> None:
    """Write a gradient to files as if it were the weights. All ranks call; the first one writes."""
    layout = without_shift(trainer.layout())
    target = without_shift(checkpoint_layout(layout.atoms, "float32"))
    if world.first:
        directory.mkdir()
    export(directory, layout, target, world.rank, lambda: gradient, world.device)
    world.barrier()
