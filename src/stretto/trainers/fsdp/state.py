"""The trainer's weights and optimizer state: views, files and moves."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from stretto.trainers.fsdp.policy import Policy

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def checkpoint_tensors(policy: Policy) -> Mapping[str, Tensor]:
    """The model's own tensors by checkpoint name; tied copies are left out.

    Taken while they are sharded, they are the same objects for good: a pass only hides them behind gathered ones.
    """
    model: Any = policy.model
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    return {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in tied}


def save(directory: Path, policy: Policy, optimizer: torch.optim.Optimizer, counters: dict[str, int]) -> None:
    """Write weights, optimizer and counters with torch.distributed.checkpoint."""
    fresh = not optimizer.state
    model, optim = get_state_dict(policy, optimizer, options=_OPTIONS)
    if fresh:  # torch has made the missing state by an empty step, and counted it
        for slots in optimizer.state.values():
            slots["step"].zero_()
    written = {"model": model, "optimizer": optim, "counters": counters}
    with _causes():
        state_dict_saver.save(written, checkpoint_id=directory, no_dist=not dist.is_initialized())


def load(directory: Path, policy: Policy, optimizer: torch.optim.Optimizer, counters: dict[str, int]) -> dict[str, int]:
    """Read what `save` wrote into the policy and the optimizer, resharding it; returns the counters."""
    model, optim = get_state_dict(policy, optimizer, options=_OPTIONS)
    read: dict[str, Any] = {"model": model, "optimizer": optim, "counters": dict(counters)}
    try:
        with _causes():
            state_dict_loader.load(read, checkpoint_id=directory, no_dist=not dist.is_initialized())
    except Exception as error:
        raise ValueError(
            f"cannot read the checkpoint {directory}: {type(error).__name__}: {error}; "
            "remove that directory to resume from an earlier one"
        ) from error
    set_state_dict(
        policy, optimizer, model_state_dict=read["model"], optim_state_dict=read["optimizer"], options=_OPTIONS
    )
    return read["counters"]


@contextmanager
def _causes() -> Iterator[None]:
    """Raise what went wrong on a rank itself: torch wraps it in an exception that no `except Exception` catches.

    That a single process needs no process group is what we mean, and no cause for torch's warning.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """What the optimizer keeps of every weight; counters are no such tensors."""
    for slots in optimizer.state.values():
        yield from (tensor for tensor in slots.values() if isinstance(tensor, Tensor) and tensor.ndim)
