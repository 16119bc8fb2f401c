"""Llama: grouped-query attention and a gated MLP; small ones use the embedding as the head."""

from __future__ import annotations

from typing import Any

from stretto.models.blocks import attention, embedding, final_norm, gated_mlp, head_copy, heads, norms
from stretto.models.language import WeightMap, layers
from stretto.models.registry import family


@family("LlamaConfig")
def llama(c: Any) -> WeightMap:
    """LlamaForCausalLM."""
    if c.mlp_bias:
        raise ValueError("llama: a model with mlp_bias needs a map of its own")
    layer = [*norms(), *attention(bias=c.attention_bias, output_bias=c.attention_bias), *gated_mlp()]
    return WeightMap(
        family="llama",
        sizes={"v": c.vocab_size, "f": c.intermediate_size, **heads(c)},
        rows=(*embedding(tied=c.tie_word_embeddings), *layers(c.num_hidden_layers, layer), final_norm()),
        layer_count=c.num_hidden_layers,
        dropped=head_copy(tied=c.tie_word_embeddings),
        megatron=None if c.attention_bias else {},
    )
