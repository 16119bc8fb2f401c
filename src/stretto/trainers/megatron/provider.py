"""Megatron's transformer config, translated from a Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from stretto.models.checkpoint import odd_layers
from stretto.sync.parallel import MegatronSizes

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

SCALE_EMBEDDINGS = "scale_embeddings"
"""The option that is no field of Megatron's config: embeddings times the root of the hidden size, as in Gemma."""

_ACTIVATIONS = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}
_BIASES = ("attention_bias", "mlp_bias", "use_bias")


def padded_vocabulary(vocabulary: int, sizes: MegatronSizes) -> int:
    """Rows of the embedding over all TP ranks: `vocabulary` up to the next multiple of vocab_divisor x tp."""
    multiple = sizes.vocab_divisor * sizes.tp
    return -(-vocabulary // multiple) * multiple


def transformer_config(
    hf_config: Any,
    sizes: MegatronSizes,
    options: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    sequence_parallel: bool = False,
    recompute: bool = False,
) -> TransformerConfig:
    """The config of every chunk of the model; a MLATransformerConfig where attention has latents (`kv_lora_rank`).

    `options` are what the family knows and its Hugging Face config does not say: fields of Megatron's config by name
    (`qk_layernorm`, `add_qkv_bias`, `moe_router_score_function`, ...), and `scale_embeddings`. `recompute` keeps only
    the layers' inputs for the backward pass.

    Raises ValueError for what Megatron-Core cannot compute as transformers does.
    """
    # Here, for a forecast reads this file without Megatron-Core.
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    running = run_settings(hf_config, sizes, dtype=dtype, sequence_parallel=sequence_parallel, recompute=recompute)
    attention = _latent_attention(hf_config) if is_latent(hf_config) else _attention(hf_config)
    values = {
        **_shape(hf_config),
        **attention,
        **(_experts(hf_config, sizes, options) if expert_layers(hf_config) else {}),
        **running,
        **{name: value for name, value in options.items() if name != SCALE_EMBEDDINGS},
    }
    kind = MLATransformerConfig if is_latent(hf_config) else TransformerConfig
    if unknown := sorted(set(options) - {field.name for field in fields(kind)} - {SCALE_EMBEDDINGS}):
        raise ValueError(f"megatron: {', '.join(unknown)} in the family's options is no field of {kind.__name__}")
    return kind(**values)


def run_settings(
    hf_config: Any,
    sizes: MegatronSizes,
    *,
    dtype: torch.dtype,
    sequence_parallel: bool,
    recompute: bool,
) -> dict[str, Any]:
    """The fields of the config that do not come from the architecture: sizes, dtypes, and no fusions or dropout.

    The keywords are those of `transformer_config`. Raises ValueError for what Megatron-Core cannot compute as
    transformers does.
    """
    _check(hf_config, sizes, sequence_parallel)
    keeping = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {
        **_parallel(hf_config, sizes, dtype, sequence_parallel),
        **_PLAIN,
        **(keeping if recompute else {}),
        "deallocate_pipeline_outputs": False,
        # Without, Megatron does not mark what is cut over TP ranks, and gets the gradient's norm wrong.
        "perform_initialization": True,
        "use_cpu_initialization": not torch.cuda.is_available(),
    }


def is_latent(hf_config: Any) -> bool:
    """Whether attention is multi-head latent attention."""
    return getattr(hf_config, "kv_lora_rank", None) is not None


def expert_count(hf_config: Any) -> int:
    """How many experts a layer routes among; 0 when the model has none."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return next((count for name in names if (count := getattr(hf_config, name, None))), 0)


def expert_layers(hf_config: Any) -> list[int]:
    """For each layer 1 if it has experts, else 0; empty when no layer has any."""
    if not expert_count(hf_config):
        return []
    dense = set(getattr(hf_config, "mlp_only_layers", None) or ())
    dense |= set(range(getattr(hf_config, "first_k_dense_replace", None) or 0))
    step = getattr(hf_config, "decoder_sparse_step", None) or 1
    kinds = [int(layer not in dense and (layer + 1) % step == 0) for layer in range(hf_config.num_hidden_layers)]
    return kinds if any(kinds) else []


def _check(hf_config: Any, sizes: MegatronSizes, sequence_parallel: bool) -> None:
    kind = hf_config.model_type
    if odd := odd_layers(hf_config):
        raise ValueError(f"megatron: {kind} has layers of {', '.join(odd)}; only full attention is supported")
    if biases := [name for name in _BIASES if getattr(hf_config, name, False)]:
        raise ValueError(f"megatron: {kind} with {', '.join(biases)} is not supported (a bias outside q, k and v)")
    if getattr(hf_config, "hidden_act", None) not in _ACTIVATIONS:
        raise ValueError(f"megatron: activation {getattr(hf_config, 'hidden_act', None)} is not supported")
    groups = getattr(hf_config, "num_key_value_heads", None) or hf_config.num_attention_heads
    if groups % sizes.tp and not is_latent(hf_config):
        raise ValueError(f"megatron: tp = {sizes.tp} does not divide the {groups} key-value heads; lower tp")
    experts = expert_count(hf_config)
    if (experts or is_latent(hf_config)) and sizes.tp > 1 and not sequence_parallel:
        raise ValueError(f"megatron: experts and latent attention ({kind}) at tp > 1 need sequence parallelism")
    if sizes.ep > 1 and not experts:
        raise ValueError(f"megatron: ep = {sizes.ep} and {kind} has no experts; set ep = 1")
    if experts % sizes.ep:
        raise ValueError(f"megatron: ep = {sizes.ep} does not divide the {experts} experts; lower ep")
    if sizes.grouped_experts and not sizes.te:
        raise ValueError("megatron: grouped experts need Transformer Engine (te); its local layers keep them apart")


_PLAIN: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    "gradient_accumulation_fusion": False,
    "cross_entropy_loss_fusion": False,
}
"""No fusions, no dropout, no bias: what transformers computes, operation for operation."""


def _shape(hf_config: Any) -> dict[str, Any]:
    return {
        "num_layers": hf_config.num_hidden_layers,
        "hidden_size": hf_config.hidden_size,
        "ffn_hidden_size": hf_config.intermediate_size,
        "num_attention_heads": hf_config.num_attention_heads,
        "layernorm_epsilon": hf_config.rms_norm_eps,
        "activation_func": _ACTIVATIONS[hf_config.hidden_act],
    }


def _attention(hf_config: Any) -> dict[str, Any]:
    heads = hf_config.num_attention_heads
    return {
        "num_query_groups": getattr(hf_config, "num_key_value_heads", None) or heads,
        "kv_channels": getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads,
    }


def _latent_attention(hf_config: Any) -> dict[str, Any]:
    """DeepSeek-V2 (2024), section 2.1. The rotary table is replaced; a scaling is left only in the softmax's scale."""
    if not getattr(hf_config, "rope_interleave", True):
        raise ValueError(
            "megatron: latent attention pairs neighbouring rotary dimensions; rope_interleave must be true"
        )
    rope = hf_config.rope_parameters
    scaled = rope.get("rope_type", "default") != "default"
    return {
        "num_query_groups": hf_config.num_attention_heads,
        "q_lora_rank": hf_config.q_lora_rank,
        "kv_lora_rank": hf_config.kv_lora_rank,
        "qk_head_dim": hf_config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": hf_config.qk_rope_head_dim,
        "v_head_dim": hf_config.v_head_dim,
        "qk_layernorm": True,
        "rope_type": "rope",
        "rotary_base": rope["rope_theta"],
        "rotary_scaling_factor": float(rope["factor"]) if scaled else 1.0,
        "mscale_all_dim": float(rope.get("mscale_all_dim") or 0.0) if scaled else 0.0,
    }


def _experts(hf_config: Any, sizes: MegatronSizes, options: Mapping[str, Any]) -> dict[str, Any]:
    sigmoid = options.get("moe_router_score_function") == "sigmoid"
    normalised = bool(getattr(hf_config, "norm_topk_prob", True))
    if sigmoid and not (normalised and hf_config.num_experts_per_tok > 1):
        raise ValueError("megatron: sigmoid routing is normalised over several experts; this config has it otherwise")
    width = getattr(hf_config, "moe_intermediate_size", None) or hf_config.intermediate_size
    gated = getattr(hf_config, "shared_expert_intermediate_size", None)
    return {
        "num_moe_experts": expert_count(hf_config),
        "moe_layer_freq": expert_layers(hf_config),
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": gated
        or width * (getattr(hf_config, "n_shared_experts", 0) or 0)
        or None,
        "moe_shared_expert_gate": bool(gated),
        "moe_router_topk": hf_config.num_experts_per_tok,
        "moe_router_pre_softmax": not sigmoid and not normalised,
        "moe_router_topk_scaling_factor": getattr(hf_config, "routed_scaling_factor", None),
        **_expert_groups(hf_config),
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        # The bias of a router without auxiliary loss is a weight that no gradient reaches: it stays as published.
        "moe_router_bias_update_rate": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": sizes.grouped_experts,
        "moe_permute_fusion": False,
    }


def _expert_groups(hf_config: Any) -> dict[str, Any]:
    """DeepSeek-V3 (2024), section 2.1.2: experts come from the best few groups, each judged by its two best experts."""
    groups = getattr(hf_config, "n_group", None) or 1
    if groups == 1:
        return {}
    if hf_config.num_experts_per_tok != 2 * hf_config.topk_group:
        raise ValueError(
            f"megatron: a group is judged by its {hf_config.num_experts_per_tok} // {hf_config.topk_group} best "
            "experts (num_experts_per_tok // topk_group) and in transformers by two; such a model is not supported"
        )
    return {"moe_router_num_groups": groups, "moe_router_group_topk": hf_config.topk_group}


def _parallel(hf_config: Any, sizes: MegatronSizes, dtype: torch.dtype, sequence_parallel: bool) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": sizes.tp,
        "pipeline_model_parallel_size": sizes.pp,
        "virtual_pipeline_model_parallel_size": sizes.vpp if sizes.vpp > 1 else None,
        "pipeline_model_parallel_layout": pipeline_layout(hf_config.num_hidden_layers, sizes),
        "pipeline_dtype": dtype,
        "expert_model_parallel_size": sizes.ep,
        "expert_tensor_parallel_size": sizes.etp,
        "transformer_impl": "transformer_engine" if sizes.te else "local",
        "sequence_parallel": sequence_parallel and sizes.tp > 1,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
    }


def pipeline_layout(layers: int, sizes: MegatronSizes) -> list[list[str]] | None:
    """What each virtual stage holds, in the order of the model; None with one stage."""
    if sizes.pp == 1:
        return None
    stages = sizes.layers(layers)
    layout = [["decoder"] * len(stages[stage][chunk]) for chunk in range(sizes.vpp) for stage in range(sizes.pp)]
    layout[0].insert(0, "embedding")
    layout[-1].append("loss")
    return layout
