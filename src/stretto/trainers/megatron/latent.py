"""What multi-head latent attention needs where Transformer Engine is missing: projections that every TP rank holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class WholeLinear(torch.nn.Linear):
    """A linear layer without bias that is not cut over TP ranks, as Transformer Engine's `duplicated` mode has it.

    For the projections down to the latents. Megatron's local layers would cut them and gather their outputs; there the
    gradient of the rotary keys, a part of it on every rank, is not summed. Here each rank projects its part of the
    sequence, and `weight.sequence_parallel` has Megatron sum the gradient. The arguments are the spec's.
    """

    def __init__(self, input_size: int, output_size: int, *, config: Any, init_method: Any, **_: Any) -> None:
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(input_size, output_size, bias=False, dtype=config.params_dtype, device=device)
        if config.perform_initialization:
            init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[reportAttributeAccessIssue]

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:  # type: ignore[reportIncompatibleMethodOverride]
        """Project (..., `input_size`); the second of the pair is the bias, which Megatron expects apart."""
        return super().forward(hidden), None


def use_whole_projections(spec: Any) -> None:
    """Put `WholeLinear` into the latent attention of a layer's spec."""
    from megatron.core.transformer import multi_latent_attention

    # The module asks whether a layer is one of the classes it knows by these names. Without the engine it knows none
    # that is not cut, and would ask for an instance of None.
    multi_latent_attention.Linear = WholeLinear
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False
    spec.linear_q_down_proj = WholeLinear
    spec.linear_kv_down_proj = WholeLinear
