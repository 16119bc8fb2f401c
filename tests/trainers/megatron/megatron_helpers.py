"""Small models for Megatron-Core, their trainers on any ranks, and what a rank holds of a whole model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from trainer_samples import mixed_batch, run_config, share

from stretto.types import Batch
from stretto.world import World

VOCABULARY = 97
BATCH = mixed_batch(VOCABULARY)
SETTINGS: dict[str, Any] = {"backend": "megatron", "dtype": "float32", "micro_batch_tokens": 40, "lr": 1e-3}
EVERYTHING_ON: dict[str, Any] = {"kl_coef": 0.1, "entropy_coef": 0.02, "aggregation": "sequence_mean"}
TP2, PP2 = {"tp": 2}, {"pp": 2}
SHARED = {"tp": 2, "sequence_parallel": True}

DENSE, EXPERTS, BIASED, CENTRED, LATENT = "dense", "experts", "biased", "centred", "latent"
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
_ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LATENT: dict[str, Any] = {
    **_ROUTED,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 2,
}
KINDS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    DENSE: ("qwen3", True, {}),
    EXPERTS: ("qwen3_moe", False, {**_ROUTED, "num_experts": 4, "mlp_only_layers": [0]}),
    BIASED: ("qwen2", False, {}),
    CENTRED: ("gemma", True, {}),
    LATENT: ("deepseek_v3", False, _LATENT),
}
"""Family, whether the head is tied, and what differs from the usual shape."""


class Setup:
    """What a trainer is made of, as it travels to the ranks."""

    def __init__(
        self, directory: Path, trainer: Mapping[str, Any] | None = None, algorithm: Mapping[str, Any] | None = None
    ):
        self.directory = directory
        self.config = run_config(SETTINGS | dict(trainer or {}), algorithm, steps=16)

    @contextmanager
    def trainer(self, world: World) -> Iterator[Any]:
        from stretto.trainers.megatron import open_megatron

        with open_megatron(self.directory, self.config, world) as trainer:
            yield trainer


def write_models(directory: Path) -> dict[str, Path]:
    """Checkpoints by kind: a tied and an untied head, routed experts behind a dense layer, biases, norms centred at
    zero, latent attention.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    for kind, (family, tied, changes) in KINDS.items():
        config = AutoConfig.for_model(family, **SHAPE | changes, tie_word_embeddings=tied)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        move_vectors(model)
        model.save_pretrained(directory / kind)
    return {kind: directory / kind for kind in KINDS}


@torch.no_grad()
def move_vectors(model: torch.nn.Module) -> None:
    """Make norms and biases differ, which are all alike when they are new."""
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(0.2 * torch.randn_like(parameter))


def parameters_of(trainer: Any) -> Iterator[tuple[str, str, Any]]:
    """This rank's parameters after the trainer's local name and the one that they would have on a single rank."""
    from megatron.core import parallel_state

    expert_rank = parallel_state.get_expert_model_parallel_rank()
    many = len(trainer._models) > 1
    for chunk, model in enumerate(trainer._models):
        for local, parameter in model.named_parameters():
            parts = local.split(".")
            if parts[:2] == ["decoder", "layers"]:
                parts[2] = str(model.decoder.layers[int(parts[2])].layer_number - 1)
            if "local_experts" in parts:
                place = parts.index("local_experts") + 1
                held = model.config.num_moe_experts // model.config.expert_model_parallel_size
                parts[place] = str(int(parts[place]) + expert_rank * held)
            single = ".".join(parts)
            if single == "output_layer.weight" and model.share_embeddings_and_output_weights:
                single = "embedding.word_embeddings.weight"
            yield f"vp{chunk}.{local}" if many else local, single, parameter


def cut_like(name: str, parameter: Any, whole: Tensor) -> Tensor:
    """The part of a whole tensor that this rank's parameter holds; vocabularies are padded with zeros."""
    from megatron.core import parallel_state as state

    if not getattr(parameter, "tensor_model_parallel", False):
        return whole
    group: Any = state.get_tensor_model_parallel_group()
    if "local_experts" in name:
        group = state.get_expert_tensor_parallel_group()
    dim, rank, size = parameter.partition_dim, group.rank(), group.size()
    if missing := parameter.shape[dim] * size - whole.shape[dim]:
        whole = torch.cat([whole, whole.new_zeros(missing, *whole.shape[1:])])
    return torch.cat(whole.chunk(size * parameter.partition_stride, dim)[rank::size], dim)


def mine(world: World, batch: Batch) -> Batch:
    """This rank's share: whole groups, so that some ranks have much and others little."""
    return share(batch, [i for i, one in enumerate(batch.rollouts) if one.group_id % world.size == world.rank])


def halves(batch: Batch) -> list[Batch]:
    """Shares for two ranks, one of which has half of a group."""
    return [share(batch, range(5)), share(batch, range(5, 10))]


def with_behaviour(logprobs: Sequence[Sequence[float]]) -> Batch:
    """The batch with behaviour log-probs a little off the trainer's own."""
    rollouts = []
    for one, kept in zip(BATCH.rollouts, logprobs, strict=True):
        values = iter(kept)
        noisy = tuple(next(values) + 0.1 * math.sin(7 * t) if m else math.nan for t, m in enumerate(one.loss_mask_T))
        rollouts.append(replace(one, logprobs_T=noisy))
    return Batch(rollouts, BATCH.advantages)


def gradient(trainer: Any, own: Batch) -> tuple[float, dict[str, Tensor]]:
    """Loss and this rank's parts of the gradient, by the names of a single rank."""
    loss, found = trainer.gradient(own)
    return loss, {single: found[local] for local, single, _ in parameters_of(trainer)}


def whole_gradient(world: World, setup: Setup) -> tuple[Batch, float, dict[str, Tensor], dict[str, float]]:
    """On one rank: the batch with behaviour log-probs, its loss and gradient, and the metrics of a step."""
    with setup.trainer(world) as trainer:
        batch = with_behaviour(trainer.logprobs(BATCH.rollouts))
        loss, found = gradient(trainer, batch)
        return batch, loss, found, dict(trainer.step(batch).metrics)


def snapshot(trainer: Any) -> dict[str, Tensor]:
    """Copies of this rank's weights."""
    return {name: tensor.detach().clone() for name, tensor in trainer.weights().items()}


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether all tensors are equal, bit by bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
