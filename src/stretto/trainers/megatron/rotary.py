"""Rotary frequencies as transformers computes them: one table for every scaling that does not follow the length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_SCALINGS = ("default", "linear", "llama3", "yarn")


def inverse_frequencies(hf_config: Any) -> Tensor:
    """Float32 inverse frequencies of half the rotated dimensions, as the Hugging Face model has them.

    Megatron computes only some scalings, and Llama 3.1's with constants of its own; so its tables are replaced by this.
    Raises ValueError for a scaling that changes with the sequence, differs among layers, or scales the attention.
    """
    parameters = getattr(hf_config, "rope_parameters", None) or {}
    if "rope_theta" not in parameters:
        raise ValueError(f"megatron: {hf_config.model_type} has no single rotary base for all its layers")
    kind = parameters.get("rope_type", "default")
    if kind not in _SCALINGS:
        raise ValueError(f"megatron: rotary scaling {kind} is not supported; these are: {', '.join(_SCALINGS)}")
    if kind == "default":
        return _plain(hf_config, parameters)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](hf_config, torch.device("cpu"))
    if abs(factor - 1.0) > 1e-9:
        raise ValueError(f"megatron: rotary scaling {kind} with an attention factor of {factor:g} is not supported")
    return frequencies


def _plain(hf_config: Any, parameters: dict[str, Any]) -> Tensor:
    """RoFormer (Su et al. 2021), section 3.2.2: theta_i = base^(-2i / d)."""
    head = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
    rotated = int(head * parameters.get("partial_rotary_factor", 1.0))
    return 1.0 / parameters["rope_theta"] ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)
