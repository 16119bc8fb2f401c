"""Buckets over a process group that joins processes of different programs: trainer ranks and engine ranks.

Each of them has a default group of its own, so this one is made by hand, from a store that the trainer serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from stretto.sync.links.base import Work
from stretto.sync.links.group import GroupLink


class JoinedLink(GroupLink):
    """Process numbers are ranks of a new group, which all of them make together; `address` is its store's.

    Raises RuntimeError when not everyone joins within `timeout_s`.
    """

    def __init__(
        self,
        device: torch.device,
        number: int,
        count: int,
        address: tuple[str, int],
        extra_bytes: int,
        *,
        timeout_s: float,
        store: TCPStore | None = None,
    ):
        super().__init__(device, None, extra_bytes)
        timeout = timedelta(seconds=timeout_s)
        self._store = store or TCPStore(*address, world_size=None, is_master=False, timeout=timeout)
        self._joined: Any = _group(device, self._store, number, count, timeout)

    def start(
        self, slot: int, out: tuple[int, Sequence[Tensor]] | None, into: tuple[int, Sequence[Tensor]] | None
    ) -> list[Work]:
        """See :class:`~stretto.sync.links.base.Link`."""
        nccl = self._device.type == "cuda"
        if nccl:
            self._joined._start_coalescing(self._device)
        works = []
        for way, act in ((out, self._joined.send), (into, self._joined.recv)):
            if way is not None:
                peer, messages = way
                works += [act([message], peer, 0) for message in messages]
        return [self._joined._end_coalescing(self._device)] if nccl else works

    def close(self) -> None:
        """Leave the group: whoever waits for this process hears of it."""
        if self._joined is not None:
            abort = getattr(self._joined, "abort", None)
            if self._device.type == "cuda" and abort is not None:
                abort()
            self._joined = None


def _group(device: torch.device, store: TCPStore, number: int, count: int, timeout: timedelta) -> Any:
    if device.type == "cuda":
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        return ProcessGroupNCCL(store, number, count, options)
    from torch.distributed import ProcessGroupGloo

    return ProcessGroupGloo(store, number, count, timeout)
