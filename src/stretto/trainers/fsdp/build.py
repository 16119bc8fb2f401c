"""Loading the checkpoint, sharding it, and the optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from stretto.config.sections import TrainerConfig
from stretto.models.checkpoint import load_model, odd_layers
from stretto.trainers.fsdp.policy import Policy
from stretto.trainers.precision import compute_dtype
from stretto.world import World, ensure_group


def master_dtype(config: TrainerConfig, world: World) -> torch.dtype:
    """The dtype of the weights that the optimizer moves."""
    return torch.float64 if compute_dtype(config, world) == torch.float64 else torch.float32


def build_policy(directory: Path, config: TrainerConfig, world: World) -> Policy:
    """The checkpoint's policy on this rank's device: float32 master weights (float64 when computing in it), sharded.

    One rank that computes in the dtype of its weights has nothing to shard and stays a plain module, whose tensors an
    engine can share.
    """
    compute, master = compute_dtype(config, world), master_dtype(config, world)
    model: Any = load_model(directory, master)
    if config.batching == "packed":
        _check_packable(model.config)
    if config.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    policy = Policy(model, config.logit_chunk_tokens, compiled=config.compile).to(world.device)
    if config.compile:
        for layer in _layers(policy):
            layer.compile(dynamic=True)
    if world.size > 1 or compute != master:
        _shard(policy, compute, master, world)
    return policy


def _shard(policy: Policy, compute: torch.dtype, master: torch.dtype, world: World) -> None:
    ensure_group(world)
    precision = MixedPrecisionPolicy(param_dtype=compute if compute != master else None, reduce_dtype=master)
    for layer in _layers(policy):
        fully_shard(layer, mp_policy=precision)
    fully_shard(policy, mp_policy=precision)


def _layers(policy: Policy) -> list[nn.Module]:
    kinds = set(getattr(policy.model, "_no_split_modules", None) or ())
    return [module for module in policy.model.modules() if type(module).__name__ in kinds]


def _check_packable(config: Any) -> None:
    """A packed row's mask replaces the model's own, so every layer must be full attention."""
    if odd := odd_layers(config):
        raise ValueError(
            f'trainer.batching = "packed" needs full-attention layers and {config.model_type} has '
            f'{", ".join(odd)}; set trainer.batching = "padded"'
        )


def build_optimizer(policy: Policy, config: TrainerConfig) -> torch.optim.Optimizer:
    """AdamW; vectors (norms, biases) are not decayed."""
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
    )
