"""Plans of very large models over hundreds of ranks, from their sizes alone. How long it takes is in no test."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
from transformers import DeepseekV3Config, Qwen3MoeConfig

from stretto.models.registry import weight_map
from stretto.sync.layout import ITEM_BYTES, Atoms, Layout
from stretto.sync.layouts import EngineSizes, engine_layout, megatron_layout
from stretto.sync.parallel import MegatronSizes
from stretto.sync.plan import Plan
from stretto.sync.program import program

QWEN = Qwen3MoeConfig(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=94,
    num_attention_heads=64,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=128,
    moe_intermediate_size=1536,
    tie_word_embeddings=False,
)
"""Qwen3-235B-A22B."""

KIMI = DeepseekV3Config(
    vocab_size=163840,
    hidden_size=7168,
    intermediate_size=18432,
    num_hidden_layers=61,
    num_attention_heads=64,
    num_key_value_heads=64,
    n_routed_experts=384,
    n_shared_experts=1,
    moe_intermediate_size=2048,
    first_k_dense_replace=1,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_group=1,
    topk_group=1,
    num_nextn_predict_layers=0,
    tie_word_embeddings=False,
)
"""A trillion parameters: latent attention and 384 experts, as Kimi K2 has them."""

QWEN_TOTAL, KIMI_TOTAL = 235_093_634_560, 1_026_408_232_448


@cache
def planned(name: str) -> Plan:
    config, trainer, engine = {
        "235B on 64 ranks": (QWEN, MegatronSizes(tp=4, pp=8, ep=8, dp=2), EngineSizes("sglang", tp=8, replicas=4)),
        "1T on 512 ranks": (
            KIMI,
            MegatronSizes(tp=8, pp=8, ep=32, dp=8),
            EngineSizes("sglang", tp=32, ep=32, replicas=8),
        ),
    }[name]
    atoms = Atoms.of(weight_map(config))
    return Plan.of(megatron_layout(atoms, "bfloat16", trainer), engine_layout(atoms, "bfloat16", engine))


NAMES = ["235B on 64 ranks", "1T on 512 ranks"]


@pytest.mark.parametrize(
    ("name", "total", "ranks"), [(NAMES[0], QWEN_TOTAL, (64, 32)), (NAMES[1], KIMI_TOTAL, (512, 256))]
)
def test_the_model_is_the_one_that_is_meant(name: str, total: int, ranks: tuple[int, int]) -> None:
    plan = planned(name)
    assert int(plan.source.atoms.sizes.prod(axis=1).sum()) == total
    assert (plan.source.ranks, plan.target.ranks) == ranks


@pytest.mark.parametrize("name", NAMES)
def test_every_element_of_every_rank_is_covered_once(name: str) -> None:
    """The pieces of each shard are disjoint and fill it; the shards of each rank fill its tensors, padding apart."""
    plan = planned(name)
    shards, pieces = plan.target.shards, plan.pieces
    order = np.argsort(pieces.target, kind="stable")
    edges = np.searchsorted(pieces.target[order], np.arange(len(shards.atom) + 1))
    for shard in range(0, len(shards.atom), 7):
        mine = order[edges[shard] : edges[shard + 1]]
        start = pieces.start[mine] - shards.start[shard]
        assert (start >= 0).all()
        assert (start + pieces.size[mine] <= shards.size[shard]).all()
        assert tiles(start, pieces.size[mine], shards.size[shard]), shard
    received = np.zeros(plan.target.ranks, dtype=np.int64)
    np.add.at(received, plan.sends.target_rank, plan.send_bytes)
    assert received.tolist() == [real_bytes(plan.target, rank) for rank in range(plan.target.ranks)]


def tiles(start: np.ndarray, size: np.ndarray, whole: np.ndarray) -> bool:
    """Whether boxes are a whole, each element once: on the grid that all their edges draw, every cell has one box."""
    edges = [
        np.unique(np.concatenate([start[:, k], start[:, k] + size[:, k], [0, whole[k]]])) for k in range(len(whole))
    ]
    counts = np.zeros([len(one) - 1 for one in edges], dtype=int)
    for one, length in zip(start, size, strict=True):
        counts[tuple(slice(*np.searchsorted(edges[k], [one[k], one[k] + length[k]])) for k in range(len(whole)))] += 1
    return bool((counts == 1).all())


def real_bytes(layout: Layout, rank: int) -> int:
    """Bytes of a rank's tensors without rows of padding, from their shapes alone."""
    padding = 0
    for one in layout.tensors:
        if "embed_tokens" in one.name or "lm_head" in one.name:
            v = layout.atoms.weights.size("v")
            tp = layout.ranks // len(layout.groups[0])
            assert one.shape[0] * tp >= v
            real = min(v, one.shape[0] * (rank % tp + 1)) - min(v, one.shape[0] * (rank % tp))
            padding += (one.shape[0] - real) * one.shape[1] * 2
    return layout.local_bytes(rank) - padding


@pytest.mark.parametrize("name", NAMES)
def test_nobody_receives_more_than_it_needs(name: str) -> None:
    """No process of the engine has anything beforehand, so the least that can move is what its tensors hold."""
    plan = planned(name)
    least = sum(real_bytes(plan.target, rank) for rank in range(plan.target.ranks))
    assert least <= plan.moved_bytes <= 1.01 * least
    sent, received = plan.sent_bytes(), plan.received_bytes()
    assert sent.sum() == received.sum() == plan.moved_bytes
    assert (sent[plan.target_at] == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_replicas_share_the_sending(name: str) -> None:
    plan = planned(name)
    busiest = plan.sent_bytes().max()
    assert plan.sender_bound <= busiest <= 1.1 * plan.sender_bound
    # The bound is no straw: it is at least the mean, and the embedding's stage has more to send than the mean.
    assert plan.sender_bound >= plan.moved_bytes / plan.source.ranks


@pytest.mark.parametrize("name", NAMES)
def test_the_two_ends_of_a_link_mean_the_same_buckets(name: str) -> None:
    plan = planned(name)
    first = plan.source.ranks
    into = program(plan, first, 128 * 2**20)
    for sender in [*into.incoming][:3]:
        assert program(plan, sender, 128 * 2**20).outgoing[first] == into.incoming[sender]
    assert into.bytes == real_bytes(plan.target, 0)
    assert all(math.prod(move.size) * ITEM_BYTES[move.dtype] == move.bytes for move in into.written())
