"""How much memory is left here."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path


def available_memory() -> int | None:
    """Bytes this process may still take: what the machine has left, within the limit of its control group.

    None where the system does not say.
    """
    bounds: list[int] = []
    with suppress(OSError):  # not Linux
        table = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        bounds += [int(table[1]) * 1024] if table else []
    with suppress(OSError, ValueError):  # no control group, or one without a limit ("max")
        group = Path("/sys/fs/cgroup")
        used = int((group / "memory.current").read_text())
        # What the kernel caches of files counts as used, but gives way.
        cached = re.search(r"(?m)^inactive_file (\d+)$", (group / "memory.stat").read_text())
        used -= int(cached[1]) if cached else 0
        bounds.append(int((group / "memory.max").read_text()) - used)
    return min(bounds, default=None)
