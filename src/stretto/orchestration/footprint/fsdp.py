"""The forecast for the FSDP2 trainer."""

from __future__ import annotations

from math import ceil, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stretto.config.run import RunConfig
from stretto.engines.embedded.model import build_module, checkpoint_tensors
from stretto.orchestration.dtypes import engine_dtype
from stretto.orchestration.footprint.engine import rollout_phase, transfer_buffers
from stretto.orchestration.footprint.probe import Probe
from stretto.orchestration.footprint.shapes import PROCESS_BYTES, Cut, Footprint, Slabs
from stretto.trainers.precision import compute_dtype
from stretto.world import World


def fsdp_footprint(directory: Path, config: RunConfig, world: World, largest: Slabs, micro: Cut) -> Footprint:
    """See `stretto.orchestration.footprint.footprint`."""
    module: Any = build_module(directory)
    compute, serve = compute_dtype(config.trainer, world), engine_dtype(config, world)
    master = torch.float64 if compute == torch.float64 else torch.float32
    sharded = world.size > 1 or compute != master
    tensors = checkpoint_tensors(module)
    whole = sum(tensor.numel() for tensor in tensors.values())
    held = sum(_shard(tensor, world.size) for tensor in tensors.values())
    shard = held * master.itemsize
    shares = config.engine.backend != "embedded" or (not sharded and serve == master)
    gathered = _gathered(module) * compute.itemsize if sharded else 0
    probe = Probe(module, compute, repeat=config.trainer.packed)
    standing = {
        "process": PROCESS_BYTES,
        "master weights": shard,
        "optimizer": 2 * shard,
        "reference": shard if config.algorithm.kl_coef > 0 else 0,
        "engine weights": 0 if shares else whole * serve.itemsize,
        "transfer buffers": transfer_buffers(config, held, serve, moves=world.size > 1),
    }
    training = {
        "gradients": shard,
        "gathered layers": 2 * gathered,
        "activations": _activations(config, micro, probe) * compute.itemsize,
        "logits chunk": _logit_values(config, micro, probe.vocabulary) * max(4, compute.itemsize),
    }
    return Footprint(standing, rollout_phase(config, probe, largest, serve), training)


def _shard(tensor: Tensor, ranks: int) -> int:
    """Values of the first rank's shard: FSDP2 cuts the first axis into equal parts, the last one shorter."""
    return ceil(tensor.shape[0] / ranks) * prod(tensor.shape[1:]) if tensor.ndim else 1


def _gathered(module: Any) -> int:
    """Values that FSDP2 holds whole during a pass: the root's (embedding, head, norms), and a layer and the next one.

    Their gradients are whole too until they are reduced. Zhao et al. 2023, PyTorch FSDP (arXiv:2304.11277), section 4.
    """
    kinds = set(getattr(module, "_no_split_modules", None) or ())
    layers = [sum(p.numel() for p in one.parameters()) for one in module.modules() if type(one).__name__ in kinds]
    root = sum(p.numel() for p in module.parameters()) - sum(layers)
    return root + 2 * max(layers, default=0)


def _activations(config: RunConfig, micro: Cut, probe: Probe) -> int:
    """Values kept for the backward pass of one micro-batch.

    The packed mask is there once, for all layers. With recomputation a layer keeps its
    input, and one layer at a time has the rest: Chen et al. 2016, Sublinear Memory Cost (arXiv:1604.06174), section 4.
    """
    tokens = micro.rows * micro.length
    mask = tokens * micro.length if config.trainer.packed else 0
    kept = tokens * probe.saved_values
    if config.trainer.activation_checkpointing:
        kept = tokens * probe.hidden * probe.layers + kept // probe.layers
    return kept + mask


def _logit_values(config: RunConfig, micro: Cut, vocabulary: int) -> int:
    """Five arrays of a chunk's logits: the scaled logits are kept, with an entropy term the probabilities too, and the
    backward pass holds the gradients of the gather and of the log-sum-exp, their sum, and what that is divided into.
    """
    return 5 * min(config.trainer.logit_chunk_tokens, micro.loss_tokens) * vocabulary
