"""RMSNorm as transformers computes it, for Megatron's layer spec."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm over the last axis (Zhang & Sennrich 2019, equation 4), computed in float32.

    Megatron's own wrapper of torch's norm refuses sequence parallelism and zero-centred weights; here
    `weight.sequence_parallel` says that each rank sees part of the sequence, so that Megatron sums the gradient. With
    `config.layernorm_zero_centered_gamma` the factor is 1 + weight, taken in float32 as Gemma does.

    The arguments are those that Megatron's spec passes. Input and output have shape (..., `hidden_size`) and one dtype.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centred: bool = config.layernorm_zero_centered_gamma
        value = 0.0 if self.zero_centred else 1.0
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(
            torch.full((hidden_size,), value, dtype=config.params_dtype, device=device)  # type: ignore[reportArgumentType]
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[reportAttributeAccessIssue]

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise `hidden` (..., `hidden_size`)."""
        wide = hidden if hidden.dtype == torch.float64 else hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.zero_centred:
            return (wide * (1.0 + self.weight.to(wide.dtype))).to(hidden.dtype)
        return self.weight * wide.to(hidden.dtype)


class LatentNorm(RMSNorm):
    """The norm of a latent of multi-head latent attention.

    transformers builds those with its class's own epsilon and not with the config's.
    """

    EPSILON = 1e-6

    def __init__(self, config: Any, hidden_size: int, eps: float = EPSILON, **_: Any) -> None:
        super().__init__(config, hidden_size, self.EPSILON)
