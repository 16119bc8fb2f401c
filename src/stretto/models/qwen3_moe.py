"""Qwen3-MoE: Qwen3 with routed experts, in all layers or in some."""

from __future__ import annotations

from typing import Any

from stretto.models.blocks import (
    VLLM_EXPERTS,
    attention,
    embedding,
    experts,
    final_norm,
    gated_mlp,
    head_copy,
    heads,
    norms,
    router,
)
from stretto.models.language import WeightMap, layers
from stretto.models.registry import family


@family("Qwen3MoeConfig")
def qwen3_moe(c: Any) -> WeightMap:
    """Qwen3MoeForCausalLM."""
    every = range(c.num_hidden_layers)
    routed = [n for n in every if n not in c.mlp_only_layers and (n + 1) % c.decoder_sparse_step == 0]
    dense = [n for n in every if n not in routed]
    attend = attention(bias=c.attention_bias, output_bias=c.attention_bias, qk_norm=True)
    return WeightMap(
        family="qwen3_moe",
        sizes={
            "v": c.vocab_size,
            "f": c.intermediate_size,
            "e": c.num_experts,
            "m": c.moe_intermediate_size,
            **heads(c),
        },
        rows=(
            *embedding(tied=c.tie_word_embeddings),
            *layers(dense, [*norms(), *attend, *gated_mlp()]),
            *(layers(routed, [*norms(experts=True), *attend, router(), *experts()]) if routed else ()),
            final_norm(),
        ),
        layer_count=c.num_hidden_layers,
        dropped=head_copy(tied=c.tie_word_embeddings),
        megatron=None if c.attention_bias else {"qk_layernorm": True},
        spelled={"vllm": VLLM_EXPERTS},
    )
