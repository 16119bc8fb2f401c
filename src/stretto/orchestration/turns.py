"""Trainer and server take turns on a device: who gives back which memory, decided from the forecast before a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from stretto.config.sections import MemoryConfig
from stretto.orchestration.footprint import Footprint, ServerFootprint

Release = Literal["nothing", "kv", "all"]

USABLE = 0.95
"""Share of a device that a forecast may fill: allocators keep some of what was freed."""
_GIB = 2**30


@dataclass(frozen=True)
class Turns:
    """`release` is what the server gives back while the trainer works; with `offload` the optimizer's state waits in
    host memory while the server does. `pool` are the bytes of keys and values on each device.

    `share` is what the server is told of that, None when its own options say it. `generating` and `learning` are the
    bytes on a device in both turns.
    """

    release: Release
    offload: bool
    pool: int
    share: float | None
    generating: int
    learning: int

    @property
    def peak(self) -> int:
        """The most that is on a device."""
        return max(self.generating, self.learning)


def decide(process: Footprint, server: ServerFootprint, settings: MemoryConfig, device_bytes: int) -> Turns:
    """The turns that move the least and still fit on a device of `device_bytes`.

    A pool that is ours to choose holds all responses at their longest where that fits, else as many as do. Raises
    ValueError with the numbers when nothing fits.
    """
    limit = int(device_bytes * USABLE)
    for pool in (server.wanted, None) if server.pool is None else (server.pool,):
        for release, offload in _ways(settings):
            found = _turns(process, server, release, offload, pool, limit)
            if found is not None:
                share = None if server.pool is not None else server.share(found.pool, device_bytes)
                return replace(found, share=share)
    raise ValueError(_refusal(process, server, settings, device_bytes))


def _ways(settings: MemoryConfig) -> Iterator[tuple[Release, bool]]:
    """From the one that moves the least on. Without a released pool there is no use in an offloaded optimizer."""
    every: tuple[tuple[Release, bool], ...] = (
        ("nothing", False),
        ("kv", False),
        ("kv", True),
        ("all", False),
        ("all", True),
    )
    if settings.release == "nothing" and settings.offload == "always":
        every = (("nothing", True),)
    for release, offload in every:
        if settings.release not in ("auto", release):
            continue
        if settings.offload == "auto" or offload == (settings.offload == "always"):
            yield release, offload


def _turns(
    process: Footprint, server: ServerFootprint, release: Release, offload: bool, pool: int | None, limit: int
) -> Turns | None:
    """None when it does not fit. Without a given `pool` it is as large as can be, up to what is wanted."""
    generating = process.generating + server.weights + server.rest
    generating -= process.standing["optimizer"] if offload else 0
    learning = process.learning + server.rest + (0 if release == "all" else server.weights)
    if pool is None:
        room = limit - (max(generating, learning) if release == "nothing" else generating)
        pool = min(server.wanted, room)
        if pool < server.least:
            return None
    generating += pool
    learning += pool if release == "nothing" else 0
    if max(generating, learning) > limit:
        return None
    return Turns(release, offload, pool, None, generating, learning)


def _refusal(process: Footprint, server: ServerFootprint, settings: MemoryConfig, device_bytes: int) -> str:
    parts = {
        "standing, without the optimizer": sum(process.standing.values()) - process.standing["optimizer"],
        "optimizer": process.standing["optimizer"],
        "while training": process.learning - sum(process.standing.values()),
        "engine weights": server.weights,
        "engine keys and values": server.least if server.pool is None else server.pool,
        "engine rest": server.rest,
    }
    numbers = ", ".join(f"{name} {size / _GIB:.1f}" for name, size in parts.items())
    told = [f'memory.{key} = "{getattr(settings, key)}"' for key in ("release", "offload")]
    return (
        f"a step does not fit on a device with {device_bytes / _GIB:.1f} GiB ({USABLE:.0%} of it is counted on), also "
        f"not with {' and '.join(told)}. In GiB: {numbers}. Lower trainer.micro_batch_tokens, engine.max_sequences or "
        "rollout.max_new_tokens, give the server a smaller pool, use more devices, or set memory.refuse = false"
    )
