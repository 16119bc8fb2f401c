"""Saving and loading through Megatron's distributed checkpoint: each rank its part, on any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import torch as strategies
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch.distributed.checkpoint import FileSystemWriter, state_dict_saver

_METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
"""Optimizer state in the shapes of the weights, so that another number of ranks can read it."""


class _InThisProcess(strategies.TorchDistSaveShardedStrategy):
    """Megatron's format written by the ranks themselves.

    Its own writer forks children and keeps a server for their answers, which would outlive a killed rank.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Write the sharded part; collective."""
        by_key = strategies._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)[
            0
        ]
        state_dict_saver.save(
            strategies.mcore_to_pyt_state_dict(by_key, False),
            storage_writer=FileSystemWriter(checkpoint_dir),
            planner=strategies.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def save(directory: Path, models: Sequence[Any], optimizer: Any, counters: Mapping[str, int]) -> None:
    """Write weights, optimizer, random generators and counters into an existing empty directory."""
    states = _states(models, optimizer, loading=False)
    states |= {"counters": dict(counters), "ranks": dist.get_world_size(), "random": _sharded(_generators())}
    dist_checkpointing.save(states, str(directory), _InThisProcess(), content_metadata=dict(_METADATA))


def load(directory: Path, models: Sequence[Any], optimizer: Any) -> dict[str, int]:
    """Read what `save` wrote into the models and the optimizer; returns the counters.

    The random generators are restored if as many ranks load as saved: each has its own. Nothing in training draws from
    them. Raises ValueError when the checkpoint cannot be read.
    """
    try:
        same_ranks = dist_checkpointing.load_common_state_dict(str(directory))["ranks"] == dist.get_world_size()
        states = _states(models, optimizer, loading=True)
        if same_ranks:
            states["random"] = _sharded(_generators())
        read = dist_checkpointing.load(states, str(directory))
    except Exception as error:
        raise ValueError(
            f"cannot read the checkpoint {directory}: {type(error).__name__}: {error}; "
            "remove that directory to resume from an earlier one"
        ) from error
    for name, model in _named(models):
        model.load_state_dict(read[name])
    _load_optimizer(optimizer, read["optimizer"])
    if same_ranks:
        _restore(read["random"])
    return read["counters"]


def _load_optimizer(optimizer: Any, read: dict[Any, Any]) -> None:
    """Give Megatron's optimizers, of which experts have one of their own, what was read.

    Megatron's reader of this format takes torch's step counts for tensors like the moments, and would leave one count
    shared by all weights: so they are put aside, and each weight gets its own.
    """
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    for place, part in enumerate(parts):
        held = read if len(parts) == 1 else read[place]
        moments = held.pop("param_state")
        part.load_state_dict(held)
        steps = {parameter: slots.pop("step") for parameter, slots in part.state.items() if "step" in slots}
        part.load_parameter_state_from_fully_reshardable(moments)
        for parameter, step in steps.items():
            part.state[parameter]["step"] = step.clone()


def _states(models: Sequence[Any], optimizer: Any, *, loading: bool) -> dict[str, Any]:
    states: dict[str, Any] = {
        name: model.sharded_state_dict(metadata=dict(_METADATA)) for name, model in _named(models)
    }
    states["optimizer"] = optimizer.sharded_state_dict(dict(states), is_loading=loading, metadata=dict(_METADATA))
    return states


def _named(models: Sequence[Any]) -> list[tuple[str, Any]]:
    """The models under the names by which Megatron's optimizer finds them."""
    return [("model" if len(models) == 1 else f"model{chunk}", model) for chunk, model in enumerate(models)]


def _generators() -> dict[str, Any]:
    return {"cpu": torch.get_rng_state(), "megatron": get_cuda_rng_tracker().get_states()}


def _sharded(generators: dict[str, Any]) -> ShardedObject:
    return ShardedObject("random", generators, (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)


def _restore(generators: dict[str, Any]) -> None:
    torch.set_rng_state(generators["cpu"])
    get_cuda_rng_tracker().set_states(generators["megatron"])
