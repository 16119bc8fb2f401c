"""Saving and loading through Megatron's distributed checkpoint: each rank its part, on any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory, is_main_replica
from megatron.core.dist_checkpointing.strategies import torch as strategies
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from stretto.trainers.megatron.optimizer import Stepper


class _InThisProcess(strategies.TorchDistSaveShardedStrategy):
    """Megatron's format written by the ranks themselves.

    Its own writer forks children and keeps a server for their answers, which would outlive a killed rank.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Write the sharded part; collective."""
        by_key, *_ = strategies._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        state_dict_saver.save(
            strategies.mcore_to_pyt_state_dict(by_key, False),
            storage_writer=FileSystemWriter(checkpoint_dir),
            planner=strategies.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def save(directory: Path, models: Sequence[Any], stepper: Stepper, counters: Mapping[str, int]) -> None:
    """Write weights, optimizer, random generators and counters into an existing empty directory."""
    states = _weights(models)
    states["optimizer"] = _gathered(_held(stepper, states))
    states |= {"counters": dict(counters), "ranks": dist.get_world_size(), "random": _sharded(_generators())}
    dist_checkpointing.save(states, str(directory), _InThisProcess())


def load(directory: Path, models: Sequence[Any], stepper: Stepper) -> dict[str, int]:
    """Read what `save` wrote into the models and the optimizer; returns the counters.

    The random generators are restored if as many ranks load as saved: each has its own. Nothing in training draws from
    them. Raises ValueError when the checkpoint cannot be read.
    """
    states = _weights(models)
    held = _held(stepper, states)
    states["optimizer"] = _expected(held)
    try:
        same_ranks = dist_checkpointing.load_common_state_dict(str(directory))["ranks"] == dist.get_world_size()
        if same_ranks:
            states["random"] = _sharded(_generators())
        read: Any = dist_checkpointing.load(states, str(directory))
    except Exception as error:
        raise ValueError(
            f"cannot read the checkpoint {directory}: {type(error).__name__}: {error}; "
            "remove that directory to resume from an earlier one"
        ) from error
    for name, model in _named(models):
        model.load_state_dict(read[name])
    for index, one in enumerate(held):
        for slot in one.slots:
            one.fill(slot, read["optimizer"][f"{index}.{slot}"])
    stepper.set_count(read["counters"]["updates"])
    if same_ranks:
        _restore(read["random"])
    return read["counters"]


class _Held(NamedTuple):
    """What the optimizer has for a weight: float32 `slots` of this replica's `part` of it, None where that is empty.

    `sharded` says where the weight lies in the model; the replicas of `group` hold the other parts.
    """

    weight: Tensor
    sharded: Any
    slots: Mapping[str, Tensor | None]
    part: slice
    group: Any

    def at(self, slot: str, whole: Tensor) -> Any:
        """The checkpoint's entry of a slot with these values, which have the shape of the weight."""
        value = {"key": f"optimizer.{slot}.{self.sharded.key}", "data": whole.view(self.weight.shape)}
        dtype = {} if isinstance(self.sharded, ShardedTensorFactory) else {"dtype": torch.float32}
        return replace(self.sharded, **value, **dtype)

    def gather(self, slot: str) -> Tensor:
        """The slot of the whole weight, in host memory; collective over replicas."""
        whole = torch.zeros(self.weight.numel(), dtype=torch.float32, device=self.weight.device)
        own = self.slots[slot]
        if own is not None:
            whole[self.part] = own.detach()
        dist.all_reduce(whole, group=self.group)
        return whole.cpu()

    def fill(self, slot: str, whole: Tensor) -> None:
        """Take this replica's part of the whole slot."""
        own = self.slots[slot]
        if own is not None:
            own.detach().copy_(whole.flatten()[self.part])


def _held(stepper: Stepper, states: Mapping[str, Any]) -> list[_Held]:
    """Of every weight of this rank, in an order that is the same on all replicas.

    Megatron can write its optimizer in the shapes of the weights itself (`fully_reshardable`), but 0.16.1 miscounts the
    padding between weights in its buffers, and cannot read back the step counts of torch's AdamW.
    """
    sharded = {id(one.data): one for one in nested_values(dict(states)) if getattr(one, "data", None) is not None}
    found = []
    for optimizer in stepper.parts():
        own = _own_parts(optimizer)
        for weight in (weight for buffer in optimizer.buffers for weight in buffer.param_index_map):
            names = ("exp_avg", "exp_avg_sq") if weight.dtype == torch.float32 else ("exp_avg", "exp_avg_sq", "param")
            has = optimizer._get_main_param_and_optimizer_states(weight) if weight in own else {}
            slots = {name: has.get(name) for name in names}
            part = own.get(weight, slice(0))
            found.append(_Held(weight, sharded[id(weight)], slots, part, optimizer.data_parallel_group))
    return found


def _own_parts(optimizer: Any) -> dict[Tensor, slice]:
    """The weights that this replica's optimizer steps, and which of their (flat) elements."""
    return {
        weight: slice(place["param"].start, place["param"].end)
        for buffer in optimizer.gbuf_ranges
        for buckets in buffer.values()
        for bucket in buckets
        for weight, place in bucket["param_map"].items()
    }


def _gathered(held: Sequence[_Held]) -> dict[str, Any]:
    """What this rank writes of the optimizer: of replicated weights, one rank writes for all."""
    found = {}
    for index, one in enumerate(held):
        for slot in one.slots:
            whole = one.gather(slot)
            if is_main_replica(one.sharded.replica_id):
                found[f"{index}.{slot}"] = one.at(slot, whole)
    return found


def _expected(held: Sequence[_Held]) -> dict[str, Any]:
    """What this rank reads of the optimizer."""
    return {
        f"{index}.{slot}": one.at(slot, torch.zeros(one.weight.shape))
        for index, one in enumerate(held)
        for slot in one.slots
    }


def _weights(models: Sequence[Any]) -> dict[str, Any]:
    return {name: model.sharded_state_dict() for name, model in _named(models)}


def _named(models: Sequence[Any]) -> list[tuple[str, Any]]:
    return [(f"model{chunk}", model) for chunk, model in enumerate(models)]


def _generators() -> dict[str, Any]:
    tracker: Any = get_cuda_rng_tracker()
    return {"cpu": torch.get_rng_state(), "megatron": tracker.get_states()}


def _sharded(generators: dict[str, Any]) -> ShardedObject:
    return ShardedObject("random", generators, (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)


def _restore(generators: dict[str, Any]) -> None:
    torch.set_rng_state(generators["cpu"])
    tracker: Any = get_cuda_rng_tracker()
    tracker.set_states(generators["megatron"])
