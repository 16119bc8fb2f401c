"""The groups of ranks of a trainer that cuts its model over several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class DataParallel:
    """The ranks with the same part of the model, one of every replica: `stretto.trainers.updates.Replicas`."""

    group: Any
    device: torch.device

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over replicas."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """Element-wise maximum over replicas."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Sequence[float], operation: Any) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, operation, group=self.group)
        return tensor.tolist()

    def gather(self, value: Any) -> list[Any]:
        """Every replica's (picklable) value, in order."""
        return _gather(value, self.group)


@dataclass(frozen=True)
class Groups:
    """This rank's: `tensor` shares each layer, `pipeline` has the stages in order, `replica` holds one whole model."""

    device: torch.device
    tensor: Any
    pipeline: Any
    replica: Any
    replicas: DataParallel

    @property
    def place(self) -> int:
        """This rank's place in its replica."""
        return dist.get_rank(self.replica)

    def over_replica(self, value: Any) -> list[Any]:
        """The (picklable) value of every rank of this replica, in the order of `place`."""
        return _gather(value, self.replica)

    def from_last_stage(self, value: Any) -> Any:
        """What the last stage says (picklable)."""
        box = [value]
        dist.broadcast_object_list(box, src=self._last, group=self.pipeline)
        return box[0]

    def tensor_from_last_stage(self, tensor: Tensor) -> Tensor:
        """The last stage's values, in place."""
        dist.broadcast(tensor, src=self._last, group=self.pipeline)
        return tensor

    @property
    def _last(self) -> int:
        return dist.get_global_rank(self.pipeline, dist.get_world_size(self.pipeline) - 1)


def _gather(value: Any, group: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
