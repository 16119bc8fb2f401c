"""Keys and values of what is being generated: one row per group for prompts, one row per sample for responses.

A group's prompt is computed once and read by all its samples: the scores of (prompt, own tokens) come from two products
and meet in one softmax, so that no key or value is copied per sample.
Letters: G groups, N samples, H query heads, K kv heads, R = H / K, P prompt tokens, T response tokens, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

_FIRST_RESPONSE_CAPACITY = 64


@dataclass
class Slab:
    """Keys and values of one layer, [rows, K, tokens, D] each (D of values may differ); rows ``< used`` are live."""

    keys: Tensor
    values: Tensor

    @classmethod
    def zeros(cls, rows: int, tokens: int, key: Tensor, value: Tensor) -> Slab:
        """Memory for heads like those of `key` and `value`, whose second axis are heads.

        Zeros, since a masked value is multiplied by 0 and must not be NaN.
        """
        return cls(*(one.new_zeros(rows, one.shape[1], tokens, one.shape[-1]) for one in (key, value)))

    def move(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` of row `source` over row `target`."""
        for tensor in (self.keys, self.values):
            tensor[target, :, :tokens] = tensor[source, :, :tokens]

    def grown(self, tokens: int) -> Slab:
        """A copy with room for `tokens` a row."""
        rows, _, old, _ = self.keys.shape
        new = Slab.zeros(rows, tokens, self.keys, self.values)
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
            self.slabs[layer] = Slab.zeros(self.rows, self.capacity, key, value)
        slab, groups, length = self.slabs[layer], *self.gather_GP.shape
        slab.keys[self.first_row : self.first_row + groups, :, :length] = key_GKPD
        slab.values[self.first_row : self.first_row + groups, :, :length] = value_GKPD
        out_GHPD = torch.nn.functional.scaled_dot_product_attention(
            query_GHPD, key_GKPD, value_GKPD, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        return out_GHPD.transpose(1, 2).flatten(0, 1)[self.scatter_M][None]


@dataclass
class DecodeStep:
    """Attention of one new token of every live sample.

    Sample n is member `member_N[n]` of group `group_N[n]`; `gather_GM` is the inverse (any sample where there is none).
    `bias_NL` is 0 for the P prompt and T own tokens that exist, and minus infinity elsewhere; L = P + T.
    """

    prompts: dict[int, Slab]
    responses: dict[int, Slab]
    rows: int
    capacity: int
    prompt_tokens: int
    own_length_N: Tensor
    bias_NL: Tensor
    group_N: Tensor
    member_N: Tensor
    gather_GM: Tensor
    arange_N: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.arange_N = torch.arange(len(self.own_length_N), device=self.own_length_N.device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """[1, heads, N, D] of N samples' newest token -> [1, N, H, D]."""
        own_keys, own_values = self._store(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
        prompt = self.prompts[layer]
        shared = (slice(len(self.gather_GM)), slice(None), slice(self.prompt_tokens))
        query_NKRD = query[0].transpose(0, 1).unflatten(1, (key.shape[1], -1))
        scores_NKRL = torch.cat(
            (
                self._by_sample(self._by_group(query_NKRD) @ prompt.keys[shared].transpose(-1, -2)),
                query_NKRD @ own_keys.transpose(-1, -2),
            ),
            dim=-1,
        )
        scores_NKRL = scores_NKRL.float().mul_(scaling).add_(self.bias_NL[:, None, None])
        weights_NKRL = scores_NKRL.softmax(-1).to(query.dtype)
        prompt_NKRP, own_NKRT = weights_NKRL.split((self.prompt_tokens, own_keys.shape[2]), dim=-1)
        out_NKRD = self._by_sample(self._by_group(prompt_NKRP) @ prompt.values[shared]) + own_NKRT @ own_values
        return out_NKRD.flatten(1, 2)[None]

    def _by_group(self, x_NKRZ: Tensor) -> Tensor:
        """[N, K, R, Z] -> [G, K, M * R, Z]: the samples of a group are more queries of the same keys."""
        return x_NKRZ[self.gather_GM].transpose(1, 2).flatten(2, 3)

    def _by_sample(self, x_GKXZ: Tensor) -> Tensor:
        """Inverse of `_by_group`."""
        return x_GKXZ.unflatten(2, (self.gather_GM.shape[1], -1))[self.group_N, :, self.member_N]

    def _store(self, layer: int, key_NKD: Tensor, value_NKD: Tensor) -> tuple[Tensor, Tensor]:
        count, length = len(self.bias_NL), self.bias_NL.shape[1] - self.prompt_tokens
        slab = self.responses.get(layer)
        if slab is None:
            first = min(self.capacity, _FIRST_RESPONSE_CAPACITY)
            slab = self.responses[layer] = Slab.zeros(self.rows, first, key_NKD, value_NKD)
        if length > slab.keys.shape[2]:
            slab = self.responses[layer] = slab.grown(min(self.capacity, max(length, 2 * slab.keys.shape[2])))
        slab.keys[self.arange_N, :, self.own_length_N] = key_NKD
        slab.values[self.arange_N, :, self.own_length_N] = value_NKD
        return slab.keys[:count, :, :length], slab.values[:count, :, :length]
