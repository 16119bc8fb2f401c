"""Digests of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from stretto.sync.parcels.manifest import digest_of

_THREADS = 8


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The digest of each tensor's bytes (on CPU)."""
    with ThreadPoolExecutor(_THREADS) as pool:  # hashing lets go of the interpreter's lock
        return dict(zip(tensors, pool.map(_digest, tensors.values()), strict=True))


def _digest(tensor: Tensor) -> str:
    return digest_of(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
