"""What benchmarks/plan_exec.py compares with: the rates of the link, and how others bring the weights together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from plan_exec_model import NORMS, Source, Tensors
from torch import Tensor

from stretto.world import World


def broadcast(size: int, world: World) -> Callable[[], None]:
    """Broadcast `size` bytes from the last rank, as one flat buffer."""
    buffer = torch.ones(size // 2, dtype=torch.bfloat16, device=world.device)

    def run() -> None:
        dist.broadcast(buffer, src=world.size - 1)

    return run


def buckets_alone(sizes: Sequence[int], world: World) -> Callable[[], None]:
    """Send buckets of these sizes from rank 1 to rank 0, two under way at a time, with nothing packed or unpacked."""
    buffers = [torch.ones(max(sizes), dtype=torch.uint8, device=world.device) for _ in range(2)]
    operation, peer = (dist.irecv, 1) if world.first else (dist.isend, 0)

    def issue(index: int) -> list[Any]:
        piece = buffers[index % 2][: sizes[index]]
        return dist.batch_isend_irecv([dist.P2POp(operation, piece, peer)])

    def run() -> None:
        works = issue(0)
        for index in range(1, len(sizes)):
            following = issue(index)
            for work in works:
                work.wait()
            works = following
        for work in works:
            work.wait()

    return run


def gather_and_convert(source: Source, config: Any, world: World, keep: bool) -> Callable[[], Tensors]:
    """The field's usual way: gather every parameter's shards on all ranks, then put together, split and rename.

    Without `keep` a rank drops each tensor once it is made.
    """

    def run() -> Tensors:
        made: dict[str, Tensor] = {}
        for name, held in source.weights().items():
            held = held.detach()
            cut = "layernorm" not in name
            shards = [held]
            if cut:
                shards = [torch.empty_like(held) for _ in range(world.size)]
                dist.all_gather(shards, held)
            converted = _convert(name, shards, config)
            if keep:
                made |= converted
        return made

    return run


def _convert(name: str, shards: list[Tensor], config: Any) -> dict[str, Tensor]:
    """The checkpoint's tensors of one Megatron parameter, from all ranks' shards."""
    if name == "embedding.word_embeddings.weight":
        return {"model.embed_tokens.weight": torch.cat(shards)}
    if name == "decoder.final_layernorm.weight":
        return {"model.norm.weight": shards[0].clone()}
    _, _, layer, inner = name.split(".", 3)
    to = f"model.layers.{layer}."
    if inner in NORMS:
        return {to + NORMS[inner]: shards[0].clone()}
    if inner == "self_attention.linear_qkv.weight":
        head, hidden = config.head_dim, config.hidden_size
        queries = config.num_attention_heads // config.num_key_value_heads
        groups = torch.cat(shards).view(config.num_key_value_heads, queries + 2, head, hidden)
        parts = groups.split([queries, 1, 1], dim=1)
        named = zip("qkv", parts, strict=True)
        return {f"{to}self_attn.{one}_proj.weight": part.reshape(-1, hidden) for one, part in named}
    if inner == "mlp.linear_fc1.weight":
        halves = zip(*(one.chunk(2) for one in shards), strict=True)
        return {f"{to}mlp.{one}_proj.weight": torch.cat(h) for one, h in zip(("gate", "up"), halves, strict=True)}
    theirs = {"self_attention.linear_proj.weight": "self_attn.o_proj", "mlp.linear_fc2.weight": "mlp.down_proj"}
    return {f"{to}{theirs[inner]}.weight": torch.cat(shards, 1)}


def bridge_export(source: Source, config: Any, full: Tensors, keep: bool) -> Callable[[], Tensors]:
    """Megatron-Bridge's own export of the same model. Raises whatever keeps it from running here."""
    if not source.models:
        raise RuntimeError("there is no Megatron-Core model to export")
    from stretto.trainers.megatron.bridge_import import import_bridge

    exporter = import_bridge().from_hf_config(deepcopy(config))
    # There are no files: all that the bridge asks of them is which tensors they have.
    exporter.hf_pretrained.state = SimpleNamespace(source=SimpleNamespace(get_all_keys=lambda: sorted(full)))
    models = list(source.models)

    @torch.no_grad()
    def run() -> Tensors:
        made: dict[str, Tensor] = {}
        for name, tensor in exporter.export_hf_weights(models, cpu=False, show_progress=False):
            if keep:
                made[name] = tensor.detach()
        return made

    return run
