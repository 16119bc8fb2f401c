"""DeepSeek-V3, and what is built like it: latent attention, dense first layers, then routed and shared experts."""

from __future__ import annotations

from typing import Any

from stretto.models.blocks import (
    VLLM_EXPERTS,
    embedding,
    experts,
    final_norm,
    gated_mlp,
    head_copy,
    norms,
    only,
    router,
)
from stretto.models.language import MEGATRON_SIDES, Held, Piece, Row, WeightMap, layers, row
from stretto.models.registry import family


@family("DeepseekV3Config")
def deepseek_v3(c: Any) -> WeightMap:
    """DeepseekV3ForCausalLM. Layers behind the last in the files, which predict further tokens, are dropped."""
    if c.attention_bias:
        raise ValueError(
            "deepseek_v3 with attention_bias has no weight map; set it to false if the files have no biases"
        )
    every, first = range(c.num_hidden_layers), c.first_k_dense_replace or 0
    dense, routed = every[:first], every[first:]
    shared = gated_mlp("mlp.shared_experts", rows="s", megatron="mlp.shared_experts")
    mixture = [*scored_router(), *experts(), *(shared if c.n_shared_experts else [])]
    attend = latent_attention(compressed_queries=c.q_lora_rank is not None)
    return WeightMap(
        family="deepseek_v3",
        sizes={
            "v": c.vocab_size,
            "h": c.hidden_size,
            "f": c.intermediate_size,
            "e": c.n_routed_experts,
            "m": c.moe_intermediate_size,
            "s": c.moe_intermediate_size * (c.n_shared_experts or 0),
            **latent_heads(c),
        },
        rows=(
            *embedding(tied=c.tie_word_embeddings),
            *layers(dense, [*norms(latent=True), *attend, *gated_mlp()]),
            *(layers(routed, [*norms(latent=True, experts=True), *attend, *mixture]) if routed else ()),
            final_norm(),
        ),
        layer_count=c.num_hidden_layers,
        dropped=(
            *head_copy(tied=c.tie_word_embeddings),
            *(f"model.layers.{c.num_hidden_layers + n}.*" for n in range(c.num_nextn_predict_layers or 0)),
        ),
        megatron={
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_dtype": "fp32",
        },
        spelled={"vllm": {"fused_qkv_a_proj_with_mqa": "fused_qkv_a_proj", **VLLM_EXPERTS}},
    )


def latent_heads(c: Any) -> dict[str, int]:
    """Sizes of latent attention: n heads; a head's query, its key with its value, its value; the latents."""
    nope, rope, value = c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
    return {
        "n": c.num_attention_heads,
        "query": nope + rope,
        "keyvalue": nope + value,
        "value": value,
        "qlatent": c.q_lora_rank or 0,
        "latent": c.kv_lora_rank,
        "latentrope": c.kv_lora_rank + rope,
    }


def latent_attention(*, compressed_queries: bool) -> list[Row]:
    """Projections down to the latents are whole on every rank; those up from them are cut by heads."""
    down = Piece("self_attn.kv_a_proj_with_mqa.weight", "latentrope h")
    to = "self_attention."
    if compressed_queries:
        queries = [
            row(
                Piece("self_attn.q_a_proj.weight", "qlatent h"),
                down,
                megatron=[Held(f"{to}linear_q_down_proj.weight"), Held(f"{to}linear_kv_down_proj.weight")],
                engine=Held("self_attn.fused_qkv_a_proj_with_mqa.weight"),
                cut=False,
            ),
            row(
                Piece("self_attn.q_a_layernorm.weight", "qlatent"),
                megatron=f"{to}q_layernorm.weight",
                te=f"{to}linear_q_up_proj.layer_norm_weight",
            ),
            row(Piece("self_attn.q_b_proj.weight", "(n query) qlatent"), megatron=f"{to}linear_q_up_proj.weight"),
        ]
    else:
        queries = [
            row(Piece("self_attn.q_proj.weight", "(n query) h"), megatron=f"{to}linear_q_proj.weight"),
            row(down, megatron=f"{to}linear_kv_down_proj.weight", cut=False),
        ]
    return [
        *queries,
        row(
            Piece("self_attn.kv_a_layernorm.weight", "latent"),
            megatron=f"{to}kv_layernorm.weight",
            te=f"{to}linear_kv_up_proj.layer_norm_weight",
        ),
        row(Piece("self_attn.kv_b_proj.weight", "(n keyvalue) latent"), megatron=f"{to}linear_kv_up_proj.weight"),
        row(Piece("self_attn.o_proj.weight", "h (n value)"), megatron=f"{to}linear_proj.weight"),
    ]


def scored_router() -> list[Row]:
    """The router and the bias of its choice. transformers has and saves both in float32, whatever the rest is in."""
    wide = row(Piece("mlp.gate.weight", "e h", dtype="float32"), cut=False)
    bias = Piece("mlp.gate.e_score_correction_bias", "e", dtype="float32", buffer=True)
    return [
        only(wide, "checkpoint", "memory"),
        only(router(), *MEGATRON_SIDES, "engine"),
        row(bias, megatron="mlp.router.expert_bias", cut=False),
    ]
