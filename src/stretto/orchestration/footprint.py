"""What one process of a run will hold in memory at most, from shapes alone: nothing is loaded, nothing computed."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stretto.config.run import RunConfig
from stretto.data.batching import PACKED_ROW_TOKENS
from stretto.engines.embedded.model import build_module, checkpoint_tensors
from stretto.orchestration.live import engine_dtype
from stretto.trainers.precision import compute_dtype
from stretto.world import World

# Python with torch and transformers imported: 350 MiB of resident memory on CPU, and about as much for a CUDA context.
_PROCESS_BYTES = 400 * 2**20
_PROBED_TOKENS = 64


class Slabs(NamedTuple):
    """The engine's memory of keys and values: `group_rows` prompts and `rows` responses, in tokens each."""

    rows: int
    group_rows: int
    prompt_tokens: int
    response_tokens: int

    @property
    def tokens(self) -> int:
        """Tokens whose keys and values fit, a layer."""
        return self.group_rows * self.prompt_tokens + self.rows * self.response_tokens


class Cut(NamedTuple):
    """The trainer's largest micro-batch (rows x length tokens; `loss_tokens` have logits), and how many in a step."""

    rows: int
    length: int
    loss_tokens: int
    passes: int


@dataclass(frozen=True)
class Footprint:
    """Bytes of one process: `standing` lasts, while `rollout` and `training` are phases that take turns.

    It counts what lives at the same time. An allocator that keeps what was freed (glibc does so with arrays of up to
    32 MiB) can make the process larger.
    """

    standing: dict[str, int]
    rollout: dict[str, int]
    training: dict[str, int]

    @property
    def total(self) -> int:
        """The most that is there at the same time."""
        return sum(self.standing.values()) + max(sum(self.rollout.values()), sum(self.training.values()))


def slabs(groups: int, samples: int, prompt_tokens: int, response_tokens: int, max_sequences: int) -> Slabs:
    """The slabs of a phase of `groups` prompts with `samples` responses each, as the embedded engine sizes them."""
    rows = min(max_sequences, groups * samples)
    return Slabs(rows, min(groups, 2 * ceil(rows / samples) + 1), prompt_tokens, response_tokens)


def passes(config: RunConfig, groups: int, prompt_tokens: int) -> Cut:
    """How `stretto.data.batching.cut` cuts the optimizer steps of `groups` prompts, all responses at their longest."""
    samples, new, trainer = config.rollout.samples_per_prompt, config.rollout.max_new_tokens, config.trainer
    longest, members = prompt_tokens + new - 1, 1
    if trainer.packed:
        capacity = max(longest, min(PACKED_ROW_TOKENS, trainer.micro_batch_tokens))
        members = samples if new == 1 else min(samples, (capacity - prompt_tokens) // (new - 1))
    length = prompt_tokens + members * (new - 1)
    trees = ceil(groups / trainer.updates_per_batch) * ceil(samples / members)
    rows = min(trees, max(1, trainer.micro_batch_tokens // length))
    return Cut(rows, length, rows * members * new, ceil(trees / rows) * trainer.updates_per_batch)


def footprint(directory: Path, config: RunConfig, world: World, largest: Slabs, micro: Cut) -> Footprint:
    """Forecast for a process of `world` that generates into the slabs `largest` and trains in micro-batches `micro`.

    Raises ValueError when the embedded engine cannot serve the model.
    """
    module: Any = build_module(directory)
    compute, serve = compute_dtype(config.trainer, world), engine_dtype(config, world)
    master = torch.float64 if compute == torch.float64 else torch.float32
    sharded = world.size > 1 or compute != master
    tensors = checkpoint_tensors(module)
    whole = sum(tensor.numel() for tensor in tensors.values())
    shard = sum(_shard(tensor, world.size) for tensor in tensors.values()) * master.itemsize
    vocabulary = module.config.vocab_size
    aliased = not sharded and serve == master
    gathered = _gathered(module) * compute.itemsize if sharded else 0
    probe = Probe(module, repeat=config.trainer.packed)
    standing = {
        "process": _PROCESS_BYTES,
        "master weights": shard,
        "optimizer": 2 * shard,
        "reference": shard if config.algorithm.kl_coef > 0 else 0,
        "engine weights": 0 if aliased else whole * serve.itemsize,
    }
    rollout = {
        "KV cache": largest.tokens * probe.kv_values * serve.itemsize,
        "engine logits": _sampling_values(largest, vocabulary) * torch.float32.itemsize,
    }
    training = {
        "gradients": shard,
        "gathered layers": 2 * gathered,
        "activations": _activations(config, module.config.hidden_size, micro, probe) * compute.itemsize,
        "logits chunk": _logit_values(config, micro, vocabulary) * max(4, compute.itemsize),
    }
    return Footprint(standing, rollout, training)


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


def _sampling_values(largest: Slabs, vocabulary: int) -> int:
    """Of each live response: the head's output, the scaled logits, their exponentials and a padded copy; of each
    prompt, the logits of its first response token.
    """
    return (4 * largest.rows + largest.group_rows) * vocabulary


def _activations(config: RunConfig, hidden: int, micro: Cut, probe: Probe) -> int:
    """Values kept for the backward pass of one micro-batch.

    The packed mask is there once, for all layers. With recomputation a layer keeps its
    input, and one layer at a time has the rest: Chen et al. 2016, Sublinear Memory Cost (arXiv:1604.06174), section 4.
    """
    tokens = micro.rows * micro.length
    mask = tokens * micro.length if config.trainer.packed else 0
    kept = tokens * probe.saved_values
    if config.trainer.activation_checkpointing:
        kept = tokens * hidden * probe.layers + kept // probe.layers
    return kept + mask


def _logit_values(config: RunConfig, micro: Cut, vocabulary: int) -> int:
    """Five arrays of a chunk's logits: the scaled logits are kept, with an entropy term the probabilities too, and the
    backward pass holds the gradients of the gather and of the log-sum-exp, their sum, and what that is divided into.
    """
    return 5 * min(config.trainer.logit_chunk_tokens, micro.loss_tokens) * vocabulary


class Probe:
    """Counts what a model keeps per token by running its layers on the meta device, where tensors have no memory.

    `kv_values`: keys and values of all layers; `saved_values`: what the layers keep for the backward pass, when
    attention keeps its inputs and its output (Dao et al. 2022, FlashAttention, arXiv:2205.14135, section 3.1).
    `repeat`: keys and values are repeated for every query head, as transformers does under a mask.
    """

    def __init__(self, module: Any, *, repeat: bool):
        self.kv_values = 0
        self.layers = 0
        self._repeat = repeat
        itemsize = next(module.parameters()).element_size()
        weights = {_storage(parameter) for parameter in module.parameters()}
        saved: dict[int, Tensor] = {}

        def keep(tensor: Tensor) -> Tensor:
            if _storage(tensor) not in weights:
                saved[_storage(tensor)] = tensor
            return tensor

        module.requires_grad_(True)
        ids = torch.zeros(1, _PROBED_TOKENS, dtype=torch.long, device="meta")
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            module.base_model(input_ids=ids, position_ids=ids, use_cache=False, stretto_step=self)
        total = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
        self.saved_values = ceil(total / itemsize / _PROBED_TOKENS)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """In the place of the engine's attention: [1, heads, tokens, size] -> [1, tokens, query heads, size]."""
        self.layers += 1
        self.kv_values += 2 * key.shape[1] * key.shape[3]
        if self._repeat:
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        return _KeepsInputsAndOutput.apply(query, key, value)


class _KeepsInputsAndOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty(query.transpose(1, 2).shape)
        ctx.save_for_backward(query, key, value, out)
        return out


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
