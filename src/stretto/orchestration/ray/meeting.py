"""Where the ranks of a group meet: a port that the first of them binds before it is told to the others."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import NamedTuple

from torch._C._distributed_c10d import TCPStore


class Place(NamedTuple):
    """An address that all ranks can reach."""

    host: str
    port: int


class Meeting:
    """Of the first rank: it serves the store that they meet at for as long as this lives."""

    def __init__(self, timeout_s: float):
        import ray

        host = ray.util.get_node_ip_address()
        timeout = timedelta(seconds=timeout_s)
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        self.place = Place(host, self._store.port)


def take_part(place: Place, rank: int, size: int) -> None:
    """Make this process rank `rank` of `size` for :func:`stretto.world.join_world`, as torchrun would have."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK="0",  # Ray shows each process only its own devices
        MASTER_ADDR=place.host,
        MASTER_PORT=str(place.port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the store is served already: every rank is a client of it
    )
