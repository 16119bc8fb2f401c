"""Tiny configurations of every family that has a weight map, made so that no two factors of a model have one length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Build = Callable[[], Any]

_GROUPED: dict[str, Any] = {
    "vocab_size": 51,
    "hidden_size": 48,
    "intermediate_size": 28,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
"""g = 2, q = 4, d = 6 (by h / heads), h = 48, f = 28 and an odd vocabulary."""

_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 12, "num_experts_per_tok": 4}

_LATENT: dict[str, Any] = {
    **_GROUPED,
    **_EXPERTS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 10,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 7,
    "qk_rope_head_dim": 2,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "n_shared_experts": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}

_HYBRID: dict[str, Any] = {
    **_GROUPED,
    **_EXPERTS,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 10,
    "num_experts": 16,
    "shared_expert_intermediate_size": 20,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "mlp_only_layers": [0, 1],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 12,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 7,
    "linear_conv_kernel_dim": 2,
}

_VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 18,
    "intermediate_size": 22,
    "num_heads": 2,
    "in_channels": 5,
    "patch_size": 3,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 48,
    "num_position_embeddings": 9,
    "deepstack_visual_indexes": [0, 2],
}

_TEXT: dict[str, Any] = {
    **_GROUPED,
    "head_dim": 10,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 2, 2]},
}


def _config(kind: str, base: dict[str, Any], **changes: Any) -> Build:
    def build() -> Any:
        import transformers

        return getattr(transformers, kind)(**{**base, **changes})

    return build


CASES: dict[str, Build] = {
    "llama": _config("LlamaConfig", _GROUPED, head_dim=10),
    "llama-bias": _config("LlamaConfig", _GROUPED, attention_bias=True),
    "llama-tied": _config("LlamaConfig", _GROUPED, tie_word_embeddings=True),
    "qwen2": _config("Qwen2Config", _GROUPED),
    "qwen2-tied": _config("Qwen2Config", _GROUPED, tie_word_embeddings=True),
    "qwen3": _config("Qwen3Config", _GROUPED, head_dim=10),
    "qwen3-bias": _config("Qwen3Config", _GROUPED, head_dim=10, attention_bias=True),
    "qwen3-tied": _config("Qwen3Config", _GROUPED, head_dim=10, tie_word_embeddings=True),
    "qwen3-moe": _config("Qwen3MoeConfig", _GROUPED | _EXPERTS, head_dim=10, num_experts=16),
    "qwen3-moe-mixed": _config(
        "Qwen3MoeConfig",
        _GROUPED | _EXPERTS,
        head_dim=10,
        num_experts=16,
        num_hidden_layers=5,
        decoder_sparse_step=2,
        mlp_only_layers=[1],
    ),
    "deepseek-v3": _config("DeepseekV3Config", _LATENT),
    "deepseek-v3-plain-queries": _config("DeepseekV3Config", _LATENT, q_lora_rank=None, num_nextn_predict_layers=0),
    "gemma": _config("GemmaConfig", _GROUPED, head_dim=10),
    "gemma-tied": _config("GemmaConfig", _GROUPED, head_dim=10, tie_word_embeddings=True),
    "phi3": _config("Phi3Config", _GROUPED, pad_token_id=None),
    "phi3-tied": _config("Phi3Config", _GROUPED, pad_token_id=None, tie_word_embeddings=True),
    "qwen3-next": _config("Qwen3NextConfig", _HYBRID),
    "qwen3-vl": _config("Qwen3VLConfig", {}, text_config=_TEXT, vision_config=_VISION, tie_word_embeddings=False),
    "qwen3-vl-tied": _config("Qwen3VLConfig", {}, text_config=_TEXT, vision_config=_VISION, tie_word_embeddings=True),
}
"""Name of a case -> what makes its configuration."""

WITHOUT_MEGATRON = frozenset({"llama-bias", "qwen3-bias", "qwen3-vl", "qwen3-vl-tied"})
"""Cases that Megatron-Core cannot have: a bias of the attention's output alone, a vision tower."""

ENGINE_ALONE = frozenset({"qwen3-next"})
"""Cases that it has with Transformer Engine alone."""
