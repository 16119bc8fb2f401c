"""The weights of benchmarks/plan_exec.py: a random Qwen3, cut by hand as Megatron's tensor parallelism cuts it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stretto.models.registry import weight_map
from stretto.sync.binding import check_tensors
from stretto.sync.layout import Atoms, Layout
from stretto.sync.layouts import checkpoint_layout, megatron_layout
from stretto.sync.parallel import MegatronSizes
from stretto.world import World

DTYPE = "bfloat16"
QWEN3_4B = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}
TINY = QWEN3_4B | {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 4096,
}

Tensors = Mapping[str, Tensor]


def make_config(tiny: bool) -> Any:
    """The Hugging Face config."""
    from transformers import Qwen3Config

    return Qwen3Config(architectures=["Qwen3ForCausalLM"], **(TINY if tiny else QWEN3_4B))


@dataclass(frozen=True)
class Source:
    """The trainer's side on this rank. `weights` finds the local tensors anew, as the trainer does every time."""

    kind: str
    layout: Layout
    weights: Callable[[], Tensors]
    models: Sequence[Any]
    """Megatron-Core's model chunks; empty when the tensors were made from the layout."""


def random_model(config: Any, world: World) -> dict[str, Tensor]:
    """Every tensor of the checkpoint, from a seed. Raises RuntimeError when the ranks drew different values."""
    shapes = checkpoint_layout(Atoms.of(weight_map(config)), DTYPE).local(0)
    full = {}
    for seed, (name, (shape, dtype)) in enumerate(shapes.items()):
        generator = torch.Generator(world.device).manual_seed(seed)
        drawn = torch.randn(shape, generator=generator, device=world.device, dtype=torch.float32)
        full[name] = drawn.to(getattr(torch, dtype))
    prints = world.gather([int(bits(tensor).sum(dtype=torch.int64)) for tensor in full.values()])
    if any(one != prints[0] for one in prints):
        raise RuntimeError("the ranks drew different values from the same seeds")
    return full


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bits as integers, so that NaN equals NaN."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def check_equal(found: Tensors, full: Tensors, what: str) -> None:
    """Raise RuntimeError naming the tensors that are missing, too many, or not the full model's bit by bit."""
    wrong = sorted(found.keys() ^ full.keys())
    wrong += [name for name in full if name in found and not torch.equal(bits(found[name]), bits(full[name]))]
    if wrong:
        raise RuntimeError(f"{what}: {len(wrong)} tensors are not those of the full model: {', '.join(wrong[:8])}")


def shard(full: Tensors, config: Any, tp: int, rank: int) -> dict[str, Tensor]:
    """The tensors of one tensor-parallel rank by Megatron's local names, written out without a weight map."""

    def rows(name: str) -> Tensor:
        return full[name].chunk(tp)[rank]

    kv, hidden = config.num_key_value_heads, config.hidden_size
    held = {
        "embedding.word_embeddings.weight": rows("model.embed_tokens.weight"),
        "decoder.final_layernorm.weight": full["model.norm.weight"],
    }
    for layer in range(config.num_hidden_layers):
        of, to = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        qkv = [full[f"{of}self_attn.{one}_proj.weight"].view(kv, -1, hidden) for one in "qkv"]
        held |= {
            f"{to}self_attention.linear_qkv.weight": torch.cat(qkv, 1).chunk(tp)[rank].reshape(-1, hidden),
            f"{to}self_attention.linear_proj.weight": full[f"{of}self_attn.o_proj.weight"].chunk(tp, 1)[rank],
            f"{to}mlp.linear_fc1.weight": torch.cat([rows(f"{of}mlp.{one}_proj.weight") for one in ("gate", "up")]),
            f"{to}mlp.linear_fc2.weight": full[f"{of}mlp.down_proj.weight"].chunk(tp, 1)[rank],
            **{f"{to}{theirs}": full[f"{of}{ours}"] for theirs, ours in NORMS.items()},
        }
    return held


NORMS = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}
"""Megatron's names of a layer's norms and the checkpoint's."""


def make_source(full: Tensors, config: Any, world: World, wanted: str) -> Source:
    """The trainer's side, filled: Megatron-Core's model, or tensors of the layout where `wanted` is `layout`.

    With `auto` the layout stands in for a model that cannot be built here, and `kind` says why.
    """
    sizes = MegatronSizes(tp=world.size)
    layout = megatron_layout(Atoms.of(weight_map(config)), DTYPE, sizes)
    kind, models = "tensors of the layout", []
    if wanted != "layout":
        models, reason = _build(config, sizes, world)
        reason = next((one for one in world.gather(reason) if one), "")
        if reason and wanted == "megatron":
            raise RuntimeError(f"Megatron-Core's model cannot be built: {reason}")
        kind = f"tensors of the layout ({reason})" if reason else f"Megatron-Core {_version()} GPTModel"
        models = [] if reason else models
    if models:
        from stretto.trainers.megatron.trainer import local_tensors

        weights: Callable[[], Tensors] = lambda: local_tensors(models)  # noqa: E731
    else:
        made = _empty(layout, world.rank, world.device)
        weights = lambda: made  # noqa: E731
    held = weights()
    check_tensors(layout, world.rank, held)
    with torch.no_grad():
        for name, value in shard(full, config, world.size, world.rank).items():
            held[name].copy_(value)
    return Source(kind, layout, weights, models)


def _empty(layout: Layout, rank: int, device: torch.device) -> dict[str, Tensor]:
    shapes = layout.local(rank).items()
    return {name: torch.empty(shape, dtype=getattr(torch, dtype), device=device) for name, (shape, dtype) in shapes}


def make_target(layout: Layout, rank: int, device: torch.device) -> dict[str, Tensor]:
    """The receiving side's tensors on `rank`, not yet written."""
    return _empty(layout, rank, device)


def poison(tensors: Tensors) -> None:
    """Overwrite everything with a NaN, so that an element that is not written is found."""
    for tensor in tensors.values():
        tensor.fill_(torch.nan)


def _build(config: Any, sizes: MegatronSizes, world: World) -> tuple[list[Any], str]:
    """Megatron-Core's chunks on this rank, or why there are none."""
    try:
        from stretto.trainers.megatron import parallel

        parallel.start(sizes, world)
        from stretto.trainers.megatron.build import build_model

        options = weight_map(config).megatron or {}
        dtype = getattr(torch, DTYPE)
        return build_model(config, sizes, options, dtype=dtype, device=world.device), ""
    except Exception as error:  # any version of Megatron may fail in its own way; the result says that it did
        traceback.print_exc()
        return [], f"{type(error).__name__}: {error}"


def _version() -> str:
    import megatron.core

    return str(megatron.core.__version__)
