"""Qwen3-Next: layers of gated linear attention and of gated full attention, with routed experts and a shared one.

Every norm is centred at zero but the one inside linear attention. Megatron-Core has linear attention with Transformer
Engine alone, and one setting for all norms: there the odd one is held less one.
"""

from __future__ import annotations

from typing import Any

from stretto.models.blocks import (
    VLLM_EXPERTS,
    embedding,
    experts,
    final_norm,
    gated_mlp,
    head_copy,
    heads,
    only,
    router,
)
from stretto.models.language import SIDES, Held, Piece, Row, WeightMap, layers, row
from stretto.models.registry import family

_LIKE_FILES = ("checkpoint", "memory", "engine")
_FUSED = ("te", "grouped")


@family("Qwen3NextConfig")
def qwen3_next(c: Any) -> WeightMap:
    """Qwen3NextForCausalLM. The layer that predicts a second token (mtp) is dropped, as transformers does."""
    if c.attention_bias:
        raise ValueError(
            "qwen3_next with attention_bias has no weight map; set it to false if the files have no biases"
        )
    kinds: dict[tuple[bool, bool], list[int]] = {}
    for n, mixer in enumerate(c.layer_types):
        routed = n not in c.mlp_only_layers and (n + 1) % c.decoder_sparse_step == 0
        kinds.setdefault((mixer == "linear_attention", routed), []).append(n)
    return WeightMap(
        family="qwen3_next",
        sizes={
            "v": c.vocab_size,
            "f": c.intermediate_size,
            "e": c.num_experts,
            "m": c.moe_intermediate_size,
            "s": c.shared_expert_intermediate_size,
            **heads(c),
            **linear_heads(c),
        },
        rows=(
            *embedding(tied=c.tie_word_embeddings),
            *(one for kind, numbers in kinds.items() for one in layers(numbers, _layer(*kind))),
            final_norm(),
        ),
        spelled={"vllm": VLLM_EXPERTS},
        layer_count=c.num_hidden_layers,
        dropped=("mtp.*", *head_copy(tied=c.tie_word_embeddings)),
        megatron={
            "qk_layernorm": True,
            "layernorm_zero_centered_gamma": True,
            "attention_output_gate": True,
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": [int(mixer == "linear_attention") for mixer in c.layer_types],
            "linear_conv_kernel_dim": c.linear_conv_kernel_dim,
            "linear_key_head_dim": c.linear_key_head_dim,
            "linear_value_head_dim": c.linear_value_head_dim,
            "linear_num_key_heads": c.linear_num_key_heads,
            "linear_num_value_heads": c.linear_num_value_heads,
        },
    )


def linear_heads(c: Any) -> dict[str, int]:
    """Sizes of linear attention: a key heads, value heads of each, the dimensions of both, the convolution's taps."""
    return {
        "a": c.linear_num_key_heads,
        "values": c.linear_num_value_heads // c.linear_num_key_heads,
        "key": c.linear_key_head_dim,
        "value": c.linear_value_head_dim,
        "taps": c.linear_conv_kernel_dim,
    }


def _layer(linear: bool, routed: bool) -> list[Row]:
    mixer = linear_attention() if linear else gated_attention()
    before_mixer = "self_attention.in_proj" if linear else "self_attention.linear_qkv"
    shared = gated_mlp("mlp.shared_expert", rows="s", megatron="mlp.shared_experts")
    shared_gate = row(
        Piece("mlp.shared_expert_gate.weight", "1 h"), megatron="mlp.shared_experts.gate_weight", cut=False
    )
    return [
        row(Piece("input_layernorm.weight", "h"), te=f"{before_mixer}.layer_norm_weight"),
        *mixer,
        row(
            Piece("post_attention_layernorm.weight", "h"),
            te="pre_mlp_layernorm.weight" if routed else "mlp.linear_fc1.layer_norm_weight",
        ),
        *([router(), *experts(), *shared, shared_gate] if routed else gated_mlp()),
    ]


def gated_attention() -> list[Row]:
    """The rows of q_proj are each head's query and then its gate; Megatron has a group's queries before its gates."""
    return [
        row(
            Piece("self_attn.q_proj.weight", "(g q 2 d) h"),
            Piece("self_attn.k_proj.weight", "(g d) h"),
            Piece("self_attn.v_proj.weight", "(g d) h"),
            te=Held("self_attention.linear_qkv.weight", per="g", order="2 q d"),
            engine=Held("self_attn.qkv_proj.weight"),
        ),
        row(Piece("self_attn.o_proj.weight", "h (g q d)"), te="self_attention.linear_proj.weight"),
        row(Piece("self_attn.q_norm.weight", "d"), te="self_attention.q_layernorm.weight"),
        row(Piece("self_attn.k_norm.weight", "d"), te="self_attention.k_layernorm.weight"),
    ]


def linear_attention() -> list[Row]:
    """A gated delta net. Files keep a key head's projections together; Megatron has them part by part."""
    qkvz, ba = "linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight"
    query, key = (Piece(f"{qkvz}[{part}]", "(a key) h") for part in ("query", "key"))
    value, gate = (Piece(f"{qkvz}[{part}]", "(a values value) h") for part in ("value", "gate"))
    beta, alpha = (Piece(f"{ba}[{part}]", "(a values) h") for part in ("beta", "alpha"))
    conv = "linear_attn.conv1d.weight"
    return [
        only(row(query, key, value, gate, checkpoint=Held(qkvz, per="a")), *_LIKE_FILES),
        only(row(beta, alpha, checkpoint=Held(ba, per="a")), *_LIKE_FILES),
        only(row(query, key, value, gate, beta, alpha, te=Held("self_attention.in_proj.weight")), *_FUSED),
        row(
            Piece(f"{conv}[query]", "(a key) 1 taps"),
            Piece(f"{conv}[key]", "(a key) 1 taps"),
            Piece(f"{conv}[value]", "(a values value) 1 taps"),
            checkpoint=Held(conv),
            te=Held("self_attention.conv1d.weight"),
        ),
        only(row(Piece("linear_attn.A_log", "(a values)", dtype="float32")), "engine"),
        only(
            row(Piece("linear_attn.A_log", "(a values)"), te="self_attention.A_log"),
            *(side for side in SIDES if side != "engine"),
        ),
        row(Piece("linear_attn.dt_bias", "(a values)"), te="self_attention.dt_bias"),
        row(Piece("linear_attn.norm.weight", "value"), te=Held("self_attention.out_norm.weight", add=-1.0)),
        row(Piece("linear_attn.out_proj.weight", "h (a values value)"), te="self_attention.out_proj.weight"),
    ]
