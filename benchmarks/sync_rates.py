"""What `sync.py` compares with: the device's copies, the host link, and SGLang's own update by tensors."""

from __future__ import annotations

import json
import statistics
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import torch

from stretto.engines.server import ServerEngine
from stretto.trainers import Trainer
from stretto.world import local_part

_GIB = 2**30


def copy_rate(device: torch.device) -> float:
    """Bytes a second that one device copy reads and writes."""
    size = _GIB if device.type == "cuda" else _GIB // 16
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / _best(lambda: target.copy_(source))


def host_rates(device: torch.device) -> dict[str, float]:
    """Bytes a second between the device and page-locked host memory."""
    if device.type != "cuda":
        return {}
    host, there = torch.empty(_GIB, dtype=torch.uint8, pin_memory=True), torch.empty(_GIB, dtype=torch.uint8).to(device)
    return {
        "device_to_host_bytes_per_s": _GIB / _best(lambda: host.copy_(there, non_blocking=True)),
        "host_to_device_bytes_per_s": _GIB / _best(lambda: there.copy_(host, non_blocking=True)),
    }


def sglang_update(engine: ServerEngine, trainer: Trainer, repeats: int = 5) -> dict[str, float]:
    """Milliseconds of SGLang's own update: all tensors in one call, by CUDA IPC handles, cast from the trainer's.

    For a trainer whose tensors are those of the checkpoint, whole on this rank.
    """
    from sglang.srt.utils import MultiprocessingSerializer  # type: ignore[import-not-found]
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions  # type: ignore[import-not-found]

    monkey_patch_torch_reductions()
    taken = []
    for _ in range(repeats):
        _call(engine, "/pause_generation", {"mode": "retract"})
        torch.cuda.synchronize()
        begin = time.perf_counter()
        tensors = [(name, local_part(one.detach()).bfloat16()) for name, one in trainer.weights().items()]
        said = MultiprocessingSerializer.serialize(tensors, output_str=True)
        _call(engine, "/update_weights_from_tensor", {"serialized_named_tensors": [said], "flush_cache": True})
        _call(engine, "/continue_generation", {"torch_empty_cache": False})
        taken.append(1000 * (time.perf_counter() - begin))
    return {"sglang_own_update_ms": statistics.median(taken[1:])}


def _call(engine: ServerEngine, path: str, body: dict[str, Any]) -> None:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(engine.base_url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()


def _best(copy: Callable[[], object], repeats: int = 5) -> float:
    seconds = []
    for _ in range(repeats):
        _finish()
        begin = time.perf_counter()
        copy()
        _finish()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
