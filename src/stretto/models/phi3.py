"""Phi-3: computes as Llama does; its files have q, k and v in one tensor, and gate and up in another."""

from __future__ import annotations

from typing import Any

from stretto.models.blocks import embedding, final_norm, head_copy, heads, norms
from stretto.models.language import Held, Piece, WeightMap, layers, row
from stretto.models.registry import family


@family("Phi3Config")
def phi3(c: Any) -> WeightMap:
    """Phi3ForCausalLM. On disk all of q, then all of k, then all of v; in Megatron one kv group after another."""
    layer = [
        *norms(),
        row(
            Piece("self_attn.qkv_proj.weight[q]", "(g q d) h"),
            Piece("self_attn.qkv_proj.weight[k]", "(g d) h"),
            Piece("self_attn.qkv_proj.weight[v]", "(g d) h"),
            checkpoint=Held("self_attn.qkv_proj.weight"),
            megatron=Held("self_attention.linear_qkv.weight", per="g"),
        ),
        row(Piece("self_attn.o_proj.weight", "h (g q d)"), megatron="self_attention.linear_proj.weight"),
        row(
            Piece("mlp.gate_up_proj.weight[gate]", "f h"),
            Piece("mlp.gate_up_proj.weight[up]", "f h"),
            checkpoint=Held("mlp.gate_up_proj.weight"),
            megatron=Held("mlp.linear_fc1.weight"),
        ),
        row(Piece("mlp.down_proj.weight", "h f"), megatron="mlp.linear_fc2.weight"),
    ]
    return WeightMap(
        family="phi3",
        sizes={"v": c.vocab_size, "f": c.intermediate_size, **heads(c)},
        rows=(*embedding(tied=c.tie_word_embeddings), *layers(c.num_hidden_layers, layer), final_norm()),
        layer_count=c.num_hidden_layers,
        dropped=head_copy(tied=c.tie_word_embeddings),
        megatron={},
    )
