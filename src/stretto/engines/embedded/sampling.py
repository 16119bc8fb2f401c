"""Drawing tokens: a sample's randomness depends on its seed and position alone, never on its neighbours."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.engines.seeds import mixed

_BLOCK = 128


@dataclass(frozen=True)
class Draws:
    """Per-row sampling parameters on the engine's device: temperature, filters (or None) and one uniform each."""

    temperature_N: Tensor
    greedy_N: Tensor
    uniform_N: Tensor
    top_p_N: Tensor | None = None
    top_k_N: Tensor | None = None
    min_p_N: Tensor | None = None


def uniforms(seeds_N: np.ndarray, positions_N: np.ndarray) -> np.ndarray:
    """One float64 in [0, 1) per row, a pure function of (seed, position)."""
    return (mixed(seeds_N, positions_N) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw(logits_NV: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """Token ids [N] and their log-probs [N] (float32): ``log_softmax(logits / T)`` before any filter."""
    scaled_NV = logits_NV.float() / draws.temperature_N[:, None]
    top_N = scaled_NV.amax(-1)
    mass_NV = (scaled_NV - top_N[:, None]).exp_()
    log_total_N = mass_NV.sum(-1).log_()
    ids_N = inverse_cdf(_filtered(mass_NV, draws), draws.uniform_N)
    if bool(draws.greedy_N.any()):
        ids_N = torch.where(draws.greedy_N, scaled_NV.argmax(-1), ids_N)
    chosen_N = scaled_NV.gather(-1, ids_N[:, None])[:, 0]
    return ids_N, (chosen_N - top_N) - log_total_N


def inverse_cdf(mass_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """The first index whose cumulative mass exceeds ``uniform * total``; never an index without mass.

    Two levels, blocks then one block, so that the vocabulary is read once and summed in blocks: a running float32 sum
    over 150,000 entries would be both slow and biased.
    """
    width = mass_NV.shape[-1]
    blocks_NBK = F.pad(mass_NV, (0, -width % _BLOCK)).unflatten(-1, (-1, _BLOCK))
    cumulative_NB = blocks_NBK.sum(-1).double().cumsum(-1)
    total_N = cumulative_NB[:, -1]
    target_N = torch.minimum(uniform_N * total_N, torch.nextafter(total_N, torch.zeros_like(total_N)))
    block_N = (cumulative_NB <= target_N[:, None]).sum(-1)
    inner_NK = blocks_NBK[torch.arange(len(block_N), device=block_N.device), block_N].double().cumsum(-1)
    end_N = cumulative_NB.gather(-1, block_N[:, None])[:, 0]
    before_N = torch.where(block_N > 0, cumulative_NB.gather(-1, (block_N - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    share_N = ((target_N - before_N) / (end_N - before_N)).clamp(0, 1 - 2.0**-40)
    return block_N * _BLOCK + (inner_NK <= (share_N * inner_NK[:, -1])[:, None]).sum(-1)


def _filtered(mass_NV: Tensor, draws: Draws) -> Tensor:
    """The mass that survives top-k, then top-p (of what is left), then min-p (relative to the likeliest)."""
    if draws.min_p_N is None or draws.top_k_N is None or draws.top_p_N is None:
        return mass_NV
    ordered_NV, index_NV = mass_NV.sort(-1, descending=True)
    rank_V = torch.arange(mass_NV.shape[-1], device=mass_NV.device)
    top_k_N = torch.where(draws.top_k_N > 0, draws.top_k_N, mass_NV.shape[-1])
    ordered_NV = torch.where(rank_V < top_k_N[:, None], ordered_NV, 0.0)
    before_NV = ordered_NV.double().cumsum(-1) - ordered_NV
    keep_NV = before_NV < draws.top_p_N[:, None] * ordered_NV.double().sum(-1, keepdim=True)
    keep_NV &= ordered_NV >= draws.min_p_N[:, None] * ordered_NV[:, :1]
    return torch.zeros_like(mass_NV).scatter(-1, index_NV, torch.where(keep_NV, ordered_NV, 0.0))
