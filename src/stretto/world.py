"""The processes of one SPMD group: one process, or N started by torchrun, on CPU (gloo) or CUDA (NCCL)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.lifeline import die_with

_MARGIN_S = 600.0
"""Seconds beyond the longest phase that ranks may be apart: loading, saving, exporting."""


class World(NamedTuple):
    """This process's place. Collective methods must be called by every rank.

    They use the default process group; with a `group`, on CPU, that one: a thread that publishes needs its own.
    """

    rank: int
    size: int
    device: torch.device
    group: Any = None

    @property
    def first(self) -> bool:
        """Whether this rank writes the files and speaks to the terminal."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over ranks."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """Element-wise maximum over ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Sequence[float], operation: Any) -> list[float]:
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device="cpu" if self.group else self.device)
        dist.all_reduce(tensor, operation, group=self.group)
        return tensor.tolist()

    def gather(self, value: Any) -> list[Any]:
        """Every rank's (picklable) value, in rank order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def union(self, lines: Sequence[str]) -> list[str]:
        """The lines of all ranks, each once, in alphabetical order."""
        return sorted({line for part in self.gather(lines) for line in part})

    def from_first(self, value: Any) -> Any:
        """The first rank's (picklable) value."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def barrier(self, after: str = "a step of saving") -> None:
        """Wait for every rank. Raises TimeoutError that says after what, and on gloo which rank is missing."""
        if self.size == 1:
            return
        try:
            if self.device.type == "cpu" or self.group:
                dist.monitored_barrier(self.group, wait_all_ranks=True)
            else:
                dist.barrier()
        except RuntimeError as error:
            raise TimeoutError(f"not every rank came through {after}: {error}") from error


def join_world(phase_s: float) -> World:
    """Join the group that torchrun's environment describes, or be alone.

    A collective waits for `phase_s`, the seconds that a rollout phase may take, and a margin.

    A sharded or mixed-precision model needs a process group even for one rank; `ensure_group` makes it.
    """
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    world = World(rank, size, device)
    if size > 1:
        die_with(os.getppid())  # torchrun or Ray, whose death by SIGKILL would leave the ranks running
        ensure_group(world, phase_s)
    return world


def ensure_group(world: World, phase_s: float = 0.0) -> None:
    """Make the default process group if there is none: over torchrun's address, or in this process's memory."""
    if dist.is_initialized():
        return
    deadline = timedelta(seconds=phase_s + _MARGIN_S)
    backend = "nccl" if world.device.type == "cuda" else "gloo"
    if world.size > 1:
        dist.init_process_group(backend, timeout=deadline)
    else:
        store = dist.HashStore()  # type: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=deadline)


def leave_world() -> None:
    """Undo `join_world`."""
    if dist.is_initialized():
        dist.destroy_process_group()


def whole(tensor: Tensor) -> Tensor:
    """The full tensor on every rank: gathered when it is sharded (then all ranks must call), else the tensor itself."""
    gather = getattr(tensor, "full_tensor", None)
    return gather() if gather is not None else tensor


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: its shard when it is sharded, else the tensor itself."""
    shard = getattr(tensor, "to_local", None)
    return shard() if shard is not None else tensor
