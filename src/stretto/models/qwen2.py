"""Qwen2: Llama with a bias on queries, keys and values."""

from __future__ import annotations

from typing import Any

from stretto.models.blocks import attention, embedding, final_norm, gated_mlp, head_copy, heads, norms
from stretto.models.language import WeightMap, layers
from stretto.models.registry import family


@family("Qwen2Config")
def qwen2(c: Any) -> WeightMap:
    """Qwen2ForCausalLM."""
    layer = [*norms(), *attention(bias=True), *gated_mlp()]
    return WeightMap(
        family="qwen2",
        sizes={"v": c.vocab_size, "f": c.intermediate_size, **heads(c)},
        rows=(*embedding(tied=c.tie_word_embeddings), *layers(c.num_hidden_layers, layer), final_norm()),
        layer_count=c.num_hidden_layers,
        dropped=head_copy(tied=c.tie_word_embeddings),
        megatron={"add_qkv_bias": True},
    )
