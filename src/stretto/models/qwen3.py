"""Qwen3: Llama with a norm on every query and key head."""

from __future__ import annotations

from typing import Any

from stretto.models.blocks import attention, embedding, final_norm, gated_mlp, head_copy, heads, norms
from stretto.models.language import WeightMap, layers
from stretto.models.registry import family


@family("Qwen3Config")
def qwen3(c: Any) -> WeightMap:
    """Qwen3ForCausalLM."""
    layer = [*norms(), *attention(bias=c.attention_bias, output_bias=c.attention_bias, qk_norm=True), *gated_mlp()]
    return WeightMap(
        family="qwen3",
        sizes={"v": c.vocab_size, "f": c.intermediate_size, **heads(c)},
        rows=(*embedding(tied=c.tie_word_embeddings), *layers(c.num_hidden_layers, layer), final_norm()),
        layer_count=c.num_hidden_layers,
        dropped=head_copy(tied=c.tie_word_embeddings),
        megatron=None if c.attention_bias else {"qk_layernorm": True},
    )
