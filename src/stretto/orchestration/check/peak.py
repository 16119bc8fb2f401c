"""The most memory of a part of a check."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import torch

from stretto.orchestration.measure import peak_memory
from stretto.world import World

_STATUS = Path("/proc/self/status")


def begin_peak(world: World) -> None:
    """Forget the highest mark so far, where the system lets one."""
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(world.device)
        return
    with suppress(OSError):  # not Linux, or not allowed: then the mark is that of the whole process
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(world: World) -> float:
    """The most bytes that any rank had since `begin_peak`."""
    return peak_memory(world)


def resident_bytes() -> int | None:
    """What this process has in memory now; None where the system does not say."""
    with suppress(OSError):
        return int(re.findall(r"^VmRSS:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)[0]) * 1024
    return None
