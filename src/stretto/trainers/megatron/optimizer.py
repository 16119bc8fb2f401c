"""Megatron's data-parallel gradients and distributed AdamW, with float32 main weights under bfloat16."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from stretto.config.sections import TrainerConfig


def wrap(models: Sequence[Any]) -> list[Any]:
    """The models with buffers in which gradients add up in float32, and weights gather after a step."""
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    return [
        DistributedDataParallel(model.config, settings, model, disable_bucketing=chunk > 0)
        for chunk, model in enumerate(models)
    ]


class Stepper:
    """The optimizer step, taken apart: the caller decides between the norm and the update whether to go on."""

    def __init__(self, chunks: Sequence[Any], config: TrainerConfig, dtype: torch.dtype):
        self._chunks = list(chunks)
        self.megatron: Any = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=config.lr,
                weight_decay=config.weight_decay,
                adam_beta1=config.betas[0],
                adam_beta2=config.betas[1],
                adam_eps=config.eps,
                clip_grad=config.clip_grad,
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=True,
            ),
            self._chunks,
            use_gloo_process_groups=False,
        )
        for group in self.megatron.param_groups:
            # Megatron leaves this product to its schedule of the weight decay; vectors have the factor 0.
            group["weight_decay"] = config.weight_decay * group["wd_mult"]
        for optimizer in self.parts():
            _start_moments(optimizer)
        self._clip_grad = config.clip_grad
        self.everywhere = False
        """Whether every replica gets all of the gradient, and not only the part that its optimizer reads."""

    def finish_gradient(self) -> None:
        """Sum the gradients over ranks: over replicas, experts over theirs, what TP ranks and tied stages share."""
        finalize_model_grads(self._chunks, force_all_reduce=self.everywhere)

    def clip(self) -> float:
        """Scale the gradient down to the largest norm allowed, unless it is not finite; returns the global norm."""
        self.megatron.prepare_grads()
        norm = float(self.megatron.get_grad_norm())
        for optimizer in self.parts():
            if parameters := optimizer.get_parameters():
                clip_grad_by_total_norm_fp32(parameters, self._clip_grad, norm)
        return norm

    def apply(self, rate: float) -> None:
        """Move the weights along the gradient and gather them."""
        for group in self.megatron.param_groups:
            group["lr"] = rate
        self.megatron.step_with_ready_grads()

    def clear(self) -> None:
        """Forget the gradient."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    def set_count(self, updates: int) -> None:
        """Go on after so many steps: AdamW's bias correction counts them, by weight in torch, by group elsewhere."""
        for optimizer in self.parts():
            for slots in optimizer.optimizer.state.values():
                if "step" in slots:
                    slots["step"] = torch.tensor(float(updates))
            if not isinstance(optimizer.optimizer, torch.optim.AdamW):
                for group in optimizer.optimizer.param_groups:
                    group["step"] = updates

    def own_tensors(self) -> Iterator[Tensor]:
        """What only a step needs: moments, and main weights that are not the model's own."""
        for optimizer in self.parts():
            yield from _own_tensors(optimizer)

    def parts(self) -> Iterator[Any]:
        """Megatron's optimizers one by one: experts have their own. Stubs, of a rank without weights, are left out."""
        parts = getattr(self.megatron, "chained_optimizers", [self.megatron])
        yield from (optimizer for optimizer in parts if not optimizer.is_stub_optimizer)


def _start_moments(optimizer: Any) -> None:
    """Make the state of step 0, which a checkpoint before the first step would lack."""
    inner = optimizer.optimizer
    if not isinstance(inner, torch.optim.AdamW):
        optimizer.init_state_fn(inner, optimizer.config)  # Transformer Engine's or Apex's (written, not run)
        return
    for parameter in (one for group in inner.param_groups for one in group["params"]):
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        inner.state[parameter] = {"step": torch.tensor(0.0), **moments}


def _own_tensors(optimizer: Any) -> Iterator[Tensor]:
    for slots in optimizer.optimizer.state.values():
        yield from (tensor for tensor in slots.values() if isinstance(tensor, Tensor) and tensor.ndim)
    for group in optimizer.shard_fp32_from_float16_groups:
        yield from (tensor for tensor in group if tensor is not None)
