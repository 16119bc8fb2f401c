"""Gemma: Llama's layers with norms centred at zero, and embeddings times the root of the hidden size."""

from __future__ import annotations

from typing import Any

from stretto.models.blocks import attention, embedding, final_norm, gated_mlp, head_copy, heads, norms
from stretto.models.language import WeightMap, layers
from stretto.models.registry import family


@family("GemmaConfig")
def gemma(c: Any) -> WeightMap:
    """GemmaForCausalLM. A norm multiplies by 1 + its weight; Megatron holds that sum, every other side the weight."""
    layer = [*norms(add=1.0), *attention(bias=c.attention_bias, output_bias=c.attention_bias), *gated_mlp()]
    return WeightMap(
        family="gemma",
        sizes={"v": c.vocab_size, "f": c.intermediate_size, **heads(c)},
        rows=(*embedding(tied=c.tie_word_embeddings), *layers(c.num_hidden_layers, layer), final_norm(add=1.0)),
        layer_count=c.num_hidden_layers,
        dropped=head_copy(tied=c.tie_word_embeddings),
        megatron=None if c.attention_bias else {"scale_embeddings": True},
    )
