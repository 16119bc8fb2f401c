"""Causal attention for Megatron's local layers, through torch's fused kernels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class CausalAttention(torch.nn.Module):
    """Softmax attention over the tokens so far (Vaswani et al. 2017, equation 1); every row starts at its first token.

    Megatron's own local attention keeps the whole score matrix and knows no latent attention, whose keys and values
    differ in width. The arguments are those that Megatron's spec passes; there are no parameters. Padding stands at the
    right of a row, where causality hides it: masks and packed rows are refused.
    """

    def __init__(self, config: Any, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__()
        self.scale = softmax_scale if softmax_scale is not None else config.softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> Tensor:
        """Attend: `query` (S, B, heads, D), `key` (S, B, groups, D), `value` (S, B, groups, V) give (S, B, heads x V).

        The scale is 1 / sqrt(D) unless the config has one.
        """
        if attention_mask is not None or packed_seq_params is not None:
            raise ValueError("megatron's local layers take neither masks nor packed rows; pad rows at the right")
        attended_BHSV = F.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            is_causal=True,
            scale=self.scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return attended_BHSV.permute(2, 0, 1, 3).flatten(2).contiguous()
