"""Keys and values of what is being generated: one row per group for prompts, one row per sample for responses.

A group's prompt is computed once and read by all its samples. Attention over (prompt, own tokens) is done in two parts
that are joined by their log-sum-exps, so that nothing is copied per sample.
Letters: G groups, N samples, H query heads, K kv heads, R = H / K, P prompt tokens, T response tokens, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

_FIRST_RESPONSE_CAPACITY = 64


@dataclass
class Slab:
    """Keys and values of one layer, [rows, K, tokens, D] each; rows ``< used`` are live."""

    keys: Tensor
    values: Tensor

    @classmethod
    def zeros(cls, rows: int, heads: int, tokens: int, size: int, like: Tensor) -> Slab:
        """Memory of `like`'s dtype and device. Zeros, since a masked value is multiplied by 0 and must not be NaN."""
        shape = (rows, heads, tokens, size)
        return cls(like.new_zeros(shape), like.new_zeros(shape))

    def move(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` of row `source` over row `target`."""
        for tensor in (self.keys, self.values):
            tensor[target, :, :tokens] = tensor[source, :, :tokens]

    def grown(self, tokens: int) -> Slab:
        """A copy with room for `tokens` a row."""
        rows, heads, old, size = self.keys.shape
        new = Slab.zeros(rows, heads, tokens, size, self.keys)
        new.keys[:, :, :old] = self.keys
        new.values[:, :, :old] = self.values
        return new


@dataclass
class PrefillStep:
    """Attention of whole prompts that were concatenated into one row; fills rows `first_row...` of the prompt slabs."""

    slabs: dict[int, Slab]
    first_row: int
    gather_GP: Tensor
    scatter_M: Tensor
    rows: int
    capacity: int

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """[1, heads, M, D] of M concatenated prompt tokens -> [1, M, H, D]."""
        query_GHPD, key_GKPD, value_GKPD = (
            x[0].transpose(0, 1)[self.gather_GP].transpose(1, 2) for x in (query, key, value)
        )
        if layer not in self.slabs:
            self.slabs[layer] = Slab.zeros(self.rows, key.shape[1], self.capacity, key.shape[-1], key)
        slab, groups, length = self.slabs[layer], *self.gather_GP.shape
        slab.keys[self.first_row : self.first_row + groups, :, :length] = key_GKPD
        slab.values[self.first_row : self.first_row + groups, :, :length] = value_GKPD
        out_GHPD = torch.nn.functional.scaled_dot_product_attention(
            query_GHPD, key_GKPD, value_GKPD, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        return out_GHPD.transpose(1, 2).flatten(0, 1)[self.scatter_M][None]


@dataclass
class DecodeStep:
    """Attention of one new token of every live sample."""

    prompts: dict[int, Slab]
    responses: dict[int, Slab]
    rows: int
    capacity: int
    prompt_mask_GP: Tensor
    own_length_N: Tensor
    own_mask_NT: Tensor
    gather_GM: Tensor
    scatter_N: Tensor
    arange_N: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.arange_N = torch.arange(len(self.own_length_N), device=self.own_length_N.device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """[1, heads, N, D] of N samples' newest token -> [1, N, H, D]."""
        query_NKRD = query[0].transpose(0, 1).unflatten(1, (key.shape[1], -1))
        own = self._store(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
        own_out, own_lse = _attend(query_NKRD, *own, self.own_mask_NT, scaling)

        groups, members = self.gather_GM.shape
        slab, length = self.prompts[layer], self.prompt_mask_GP.shape[1]
        # [G, M, K, R, D] -> [G, K, M * R, D]: the samples of a group are more queries of the same keys.
        query_GKXD = query_NKRD[self.gather_GM].transpose(1, 2).flatten(2, 3)
        shared = slab.keys[:groups, :, :length], slab.values[:groups, :, :length]
        out_GKXD, lse_GKX = _attend(query_GKXD, *shared, self.prompt_mask_GP, scaling)
        prompt_out = out_GKXD.unflatten(2, (members, -1)).transpose(1, 2).flatten(0, 1)[self.scatter_N]
        prompt_lse = lse_GKX.unflatten(2, (members, -1)).transpose(1, 2).flatten(0, 1)[self.scatter_N]

        share = torch.sigmoid(prompt_lse - own_lse)[..., None]
        return (own_out + (prompt_out - own_out) * share).flatten(1, 2).to(query.dtype)[None]

    def _store(self, layer: int, key_NKD: Tensor, value_NKD: Tensor) -> tuple[Tensor, Tensor]:
        count, length = self.own_mask_NT.shape
        slab = self.responses.get(layer)
        if slab is None:
            first = min(self.capacity, _FIRST_RESPONSE_CAPACITY)
            slab = self.responses[layer] = Slab.zeros(self.rows, key_NKD.shape[1], first, key_NKD.shape[2], key_NKD)
        if length > slab.keys.shape[2]:
            slab = self.responses[layer] = slab.grown(min(self.capacity, max(length, 2 * slab.keys.shape[2])))
        slab.keys[self.arange_N, :, self.own_length_N] = key_NKD
        slab.values[self.arange_N, :, self.own_length_N] = value_NKD
        return slab.keys[:count, :, :length], slab.values[:count, :, :length]


def _attend(
    query_BKXD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, mask_BT: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """Attention output [B, K, X, D] and log-sum-exp [B, K, X] of the scores, both float32, over unmasked keys."""
    scores = (query_BKXD @ key_BKTD.transpose(-1, -2)).float().mul_(scaling)
    scores.masked_fill_(~mask_BT[:, None, None], -torch.inf)
    lse = scores.logsumexp(-1)
    weights = scores.sub_(lse[..., None]).exp_()
    return (weights.to(value_BKTD.dtype) @ value_BKTD).float(), lse
