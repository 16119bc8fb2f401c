"""Tensors that an engine made from its parameters: a direct write to the parameter would leave them behind."""

from __future__ import annotations

from torch import nn

_PLAIN = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod")
"""Methods of both engines that compute with the parameters as they are loaded (unless a mark below says otherwise)."""

_MARKS = ("cpu_linear", "w_kc", "W_UK_T", "W_UK", "flashinfer_weights", "packed_weight")
"""Attributes that hold, or close over, a tensor made from parameters: packed heads, MLA's absorbed matrices."""


def derived(model: nn.Module) -> list[str]:
    """One line for each module that computes with something else than its parameters."""
    lines = []
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and type(method).__name__ not in _PLAIN:
            lines.append(f"{name}'s weights are processed by {type(method).__name__}")
        lines += [f"{name} computes with {mark}, made from its weights" for mark in _MARKS if _has(module, mark)]
    return lines


def _has(module: nn.Module, mark: str) -> bool:
    return getattr(module, mark, None) is not None
