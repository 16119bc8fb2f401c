"""Rows that many families share, written once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stretto.models.language import Held, Piece, Row, row

VLLM_EXPERTS = {"mlp.experts.w": "mlp.experts.routed_experts.w"}
"""How vLLM spells the stacked experts."""


def heads(c: Any) -> dict[str, int]:
    """Sizes of grouped-query attention: g kv groups of q queries each, heads of d."""
    kv = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
    d = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    return {"h": c.hidden_size, "g": kv, "q": c.num_attention_heads // kv, "d": d}


def embedding(*, tied: bool, prefix: str = "model.", head: str = "lm_head.weight") -> list[Row]:
    """The embedding and the head, which are one tensor when tied."""
    embed = Piece(f"{prefix}embed_tokens.weight", "v h")
    rows = [row(embed, megatron="embedding.word_embeddings.weight", stage="first")]
    if tied:
        return [*rows, row(embed, megatron="output_layer.weight", stage="last", tied=True)]
    return [*rows, row(Piece(head, "v h"), megatron="output_layer.weight", stage="last")]


def head_copy(*, tied: bool) -> tuple[str, ...]:
    """Names that a tied model's files may have though nothing reads them: a second copy of the embedding."""
    return ("lm_head.weight",) if tied else ()


def final_norm(*, prefix: str = "model.", add: float = 0.0) -> Row:
    """The norm after the last layer."""
    return row(
        Piece(f"{prefix}norm.weight", "h"), megatron=Held("decoder.final_layernorm.weight", add=add), stage="last"
    )


def norms(*, add: float = 0.0, latent: bool = False, experts: bool = False) -> list[Row]:
    """The norms before attention and before the MLP.

    Transformer Engine holds a norm in the linear layer behind it, but not before latent attention or before experts.
    """
    attention_te = "input_layernorm.weight" if latent else "self_attention.linear_qkv.layer_norm_weight"
    mlp_te = "pre_mlp_layernorm.weight" if experts else "mlp.linear_fc1.layer_norm_weight"
    return [
        row(
            Piece("input_layernorm.weight", "h"),
            megatron=Held("input_layernorm.weight", add=add),
            te=Held(attention_te, add=add),
        ),
        row(
            Piece("post_attention_layernorm.weight", "h"),
            megatron=Held("pre_mlp_layernorm.weight", add=add),
            te=Held(mlp_te, add=add),
        ),
    ]


def attention(*, bias: bool = False, output_bias: bool = False, qk_norm: bool = False, add: float = 0.0) -> list[Row]:
    """Grouped-query attention. Megatron keeps each kv group together; engines keep q, k and v apart in one tensor."""
    rows = [
        row(
            Piece("self_attn.q_proj.weight", "(g q d) h"),
            Piece("self_attn.k_proj.weight", "(g d) h"),
            Piece("self_attn.v_proj.weight", "(g d) h"),
            megatron=Held("self_attention.linear_qkv.weight", per="g"),
            engine=Held("self_attn.qkv_proj.weight"),
        ),
        row(Piece("self_attn.o_proj.weight", "h (g q d)"), megatron="self_attention.linear_proj.weight"),
    ]
    if bias:
        rows += [
            row(
                Piece("self_attn.q_proj.bias", "(g q d)"),
                Piece("self_attn.k_proj.bias", "(g d)"),
                Piece("self_attn.v_proj.bias", "(g d)"),
                megatron=Held("self_attention.linear_qkv.bias", per="g"),
                engine=Held("self_attn.qkv_proj.bias"),
            )
        ]
    if output_bias:
        rows += [row(Piece("self_attn.o_proj.bias", "h"), megatron="self_attention.linear_proj.bias")]
    if qk_norm:
        rows += [
            row(Piece("self_attn.q_norm.weight", "d"), megatron=Held("self_attention.q_layernorm.weight", add=add)),
            row(Piece("self_attn.k_norm.weight", "d"), megatron=Held("self_attention.k_layernorm.weight", add=add)),
        ]
    return rows


def gated_mlp(name: str = "mlp", *, rows: str = "f", megatron: str = "mlp") -> list[Row]:
    """gate, up and down; Megatron and the engines hold gate and up in one tensor."""
    return [
        row(
            Piece(f"{name}.gate_proj.weight", f"{rows} h"),
            Piece(f"{name}.up_proj.weight", f"{rows} h"),
            megatron=Held(f"{megatron}.linear_fc1.weight"),
            engine=Held(f"{name}.gate_up_proj.weight"),
        ),
        row(Piece(f"{name}.down_proj.weight", f"h {rows}"), megatron=f"{megatron}.linear_fc2.weight"),
    ]


def router() -> Row:
    """The router, whole on every rank."""
    return row(Piece("mlp.gate.weight", "e h"), megatron="mlp.router.weight", cut=False)


def experts() -> list[Row]:
    """Routed experts: files and Megatron have a tensor each, transformers and the engines stack them."""
    return [
        row(
            Piece("mlp.experts.{e}.gate_proj.weight", "m h"),
            Piece("mlp.experts.{e}.up_proj.weight", "m h"),
            megatron=Held("mlp.experts.local_experts.{e}.linear_fc1.weight"),
            grouped=Held("mlp.experts.linear_fc1.weight{e}"),
            memory=Held("mlp.experts.gate_up_proj"),
            engine=Held("mlp.experts.w13_weight"),
        ),
        row(
            Piece("mlp.experts.{e}.down_proj.weight", "h m"),
            megatron="mlp.experts.local_experts.{e}.linear_fc2.weight",
            grouped="mlp.experts.linear_fc2.weight{e}",
            memory="mlp.experts.down_proj",
            engine="mlp.experts.w2_weight",
        ),
    ]


def only(one: Row, *sides: str) -> Row:
    """The row for some sides alone: for a weight whose dtype is fixed on some sides and free on others."""
    return replace(one, held={side: held for side, held in one.held.items() if side in sides})
