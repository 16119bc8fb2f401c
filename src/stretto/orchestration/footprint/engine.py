"""What is there beside the trainer: the embedded engine or a server, and the buffers between the two."""

from __future__ import annotations

from math import ceil
from pathlib import Path

import torch

from stretto.config.run import RunConfig
from stretto.engines.embedded.model import build_module
from stretto.orchestration.dtypes import engine_dtype
from stretto.orchestration.footprint.probe import Probe
from stretto.orchestration.footprint.shapes import ServerFootprint, Slabs
from stretto.sync.binding import dtype_name
from stretto.sync.coordinates import atoms_of
from stretto.sync.layouts import EngineSizes, engine_layout
from stretto.world import World

_SERVER_BYTES = {"cuda": 4 * 2**30, "cpu": 2**30}
"""What a server takes beside weights, keys and values: a context or libraries, graphs, and what a pass needs."""


def rollout_phase(config: RunConfig, probe: Probe, largest: Slabs, serve: torch.dtype) -> dict[str, int]:
    """Keys and values of the slabs, and logits; a server has them in memory of its own."""
    if config.engine.backend != "embedded":
        return {}
    return {
        "KV cache": largest.tokens * probe.kv_values * serve.itemsize,
        "engine logits": _sampling_values(largest, probe.vocabulary) * torch.float32.itemsize,
    }


def _sampling_values(largest: Slabs, vocabulary: int) -> int:
    """Of each live response: the head's output, the scaled logits, their exponentials and a padded copy; of each
    prompt, the logits of its first response token.
    """
    return (4 * largest.rows + largest.group_rows) * vocabulary


def transfer_buffers(config: RunConfig, held_values: int, serve: torch.dtype, *, moves: bool) -> int:
    """Bytes of the buckets of a publication; `moves`: bytes go from one trainer process to another.

    Two on their way out and two on their way in, of a quarter of sync.extra_mib each; one each way where all that a
    process holds (`held_values`) fits into it. What a process and a server both see has all of sync.extra_mib.
    """
    if config.engine.backend != "embedded":
        return config.sync.extra_mib * 2**20
    bucket, most = config.sync.extra_mib * 2**20 // 4, held_values * serve.itemsize
    return 2 * (most if most <= bucket else 2 * bucket) if moves else 0


def server_footprint(
    directory: Path, config: RunConfig, world: World, largest: Slabs, device_bytes: int
) -> ServerFootprint:
    """What the server of a process of `world` takes on each of its devices, which have `device_bytes` to give.

    `largest` are the responses that the processes of one server have together. Raises ValueError for sizes that do not
    divide the model.
    """
    serve, tp = engine_dtype(config, world), config.engine.tp
    layout = engine_layout(
        atoms_of(directory, config.model.map), dtype_name(serve), EngineSizes(config.engine.backend, tp=tp)
    )
    token = ceil(Probe(build_module(directory), serve, repeat=False).kv_values * serve.itemsize / tp)
    longest = largest.prompt_tokens + largest.response_tokens
    weights, rest = layout.local_bytes(0), _SERVER_BYTES[world.device.type]
    counts_rest = config.engine.backend == "vllm"
    engine = config.engine
    share = engine.vllm.get("gpu_memory_utilization") if counts_rest else engine.sglang.get("mem_fraction_static")
    pool = None if share is None else max(0, int(share * device_bytes) - weights - counts_rest * rest)
    return ServerFootprint(weights, largest.rows * longest * token, longest * token, rest, counts_rest, pool)
