"""Training on Megatron-Core: tensor, pipeline and expert parallel models, built from a Hugging Face config alone."""

from __future__ import annotations

import importlib.util


def require_megatron() -> None:
    """Raise ValueError that names the extra when Megatron-Core is not installed."""
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        raise ValueError("the megatron trainer needs Megatron-Core: pip install 'stretto[megatron]'")
