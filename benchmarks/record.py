"""Keeping a result: what was measured, on what, with which versions, at which commit."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("torch", "transformers", "trl", "sglang", "vllm", "megatron-core", "stretto")


def write_result(name: str, data: dict[str, Any], results: Path | None = None) -> Path:
    """Write `data` with date, machine, versions and commit to `results/<name>.json`; returns its path.

    $STRETTO_RESULTS names another directory than benchmarks/results.
    """
    path = _path(name, results)
    path.parent.mkdir(parents=True, exist_ok=True)
    where = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
    }
    path.write_text(json.dumps(where | data, indent=1) + "\n")
    return path


def earlier_result(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What `write_result` wrote under `name` when its `settings` were the same: a measurement in parts goes on there.

    Empty when there is none.
    """
    path = _path(name, None)
    found = json.loads(path.read_text()) if path.is_file() else {}
    return found if found.get("settings") == settings else {}


def _path(name: str, results: Path | None) -> Path:
    return (results or Path(os.environ.get("STRETTO_RESULTS", RESULTS))) / f"{name}.json"


def machine() -> dict[str, Any]:
    """The processor, its cores, memory in GiB, and the GPUs."""
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"cpu": _cpu_model(), "cores": os.cpu_count(), "memory_gib": round(memory, 1), "gpus": gpus}


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that matter; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def commit() -> str | None:
    """The commit that was measured, with `+changes` when files differ from it; None outside a clone."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        revision = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changes = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return revision.stdout.strip() + ("+changes" if changes.stdout.strip() else "")
