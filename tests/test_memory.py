"""What is left of the machine's memory, and of the control group's."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.memory import available_memory

READ = Path.read_text


def test_memory_is_a_plausible_number_of_bytes() -> None:
    free = available_memory()
    assert free is None or 2**20 < free < 2**50


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"meminfo": "MemTotal: 9 kB\nMemAvailable:    5 kB\n"}, 5 * 1024),
        ({"meminfo": "MemAvailable: 5 kB\n", "memory.max": "max", "memory.current": "1", "memory.stat": ""}, 5 * 1024),
        (
            {
                "meminfo": "MemAvailable: 5 kB\n",
                "memory.max": "4000",
                "memory.current": "3000",
                "memory.stat": "active_file 7\ninactive_file 500\n",
            },
            1500,
        ),
        ({"memory.max": "4000", "memory.current": "3000", "memory.stat": ""}, 1000),
        ({}, None),
    ],
)
def test_the_smallest_bound_counts_and_cached_files_give_way(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, str], free: int | None
) -> None:
    def read(path: Path, *arguments: str) -> str:
        if path.parent not in (Path("/proc"), Path("/sys/fs/cgroup")):
            return READ(path, *arguments)
        if path.name not in files:
            raise FileNotFoundError(path)
        return files[path.name]

    monkeypatch.setattr(Path, "read_text", read)
    assert available_memory() == free
