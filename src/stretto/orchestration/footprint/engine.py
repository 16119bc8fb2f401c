"""What is there beside the trainer: the embedded engine, and the buffers between the two."""

from __future__ import annotations

import torch

from stretto.config.run import RunConfig
from stretto.orchestration.footprint.probe import Probe
from stretto.orchestration.footprint.shapes import Slabs


def rollout_phase(probe: Probe, largest: Slabs, serve: torch.dtype) -> dict[str, int]:
    """Keys and values of the slabs, and logits."""
    return {
        "KV cache": largest.tokens * probe.kv_values * serve.itemsize,
        "engine logits": _sampling_values(largest, probe.vocabulary) * torch.float32.itemsize,
    }


def _sampling_values(largest: Slabs, vocabulary: int) -> int:
    """Of each live response: the head's output, the scaled logits, their exponentials and a padded copy; of each
    prompt, the logits of its first response token.
    """
    return (4 * largest.rows + largest.group_rows) * vocabulary


def transfer_buffers(config: RunConfig, held_values: int, serve: torch.dtype) -> int:
    """Bytes of the buckets of a publication in which bytes go from one process to another.

    Two on their way out and two on their way in, of a quarter of sync.extra_mib each; one each way where all that a
    process holds (`held_values`) fits into it.
    """
    bucket, most = config.sync.extra_mib * 2**20 // 4, held_values * serve.itemsize
    return 2 * (most if most <= bucket else 2 * bucket)
