"""Optimizer state that waits in host memory while the device's memory is somebody else's."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from stretto.world import local_part


class HostMemory:
    """Page-locked host memory for the tensors of one device, kept from turn to turn: locking pages takes seconds.

    A tensor that is away is a tensor in host memory, and stays the same object: it can be saved from there.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._hosts: dict[int, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()  # else what a sharded tensor gives is only a view of its local part
    def take(self, tensors: Iterable[Tensor]) -> int:
        """Move tensors (of sharded ones the local part) to host memory; returns the bytes that moved."""
        if self._device.type != "cuda":
            return 0
        moved = [(tensor, self._host_of(tensor)) for tensor in map(local_part, tensors) if tensor.is_cuda]
        for tensor, host in moved:
            host.copy_(tensor, non_blocking=True)
        torch.cuda.synchronize(self._device)
        for tensor, host in moved:
            tensor.data = host
        return sum(host.nbytes for _, host in moved)

    @torch.no_grad()
    def give_back(self, tensors: Iterable[Tensor]) -> int:
        """Move them to the device again; returns the bytes that moved."""
        if self._device.type != "cuda":
            return 0
        moved = [tensor for tensor in map(local_part, tensors) if not tensor.is_cuda]
        for tensor in moved:
            tensor.data = tensor.data.to(self._device, non_blocking=True)
        torch.cuda.synchronize(self._device)
        return sum(tensor.nbytes for tensor in moved)

    def _host_of(self, tensor: Tensor) -> Tensor:
        known = self._hosts.get(id(tensor))
        if known is None or known[0] is not tensor or known[1].shape != tensor.shape:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            known = self._hosts[id(tensor)] = (tensor, host)
        return known[1]
