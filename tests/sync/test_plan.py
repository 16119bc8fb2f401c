"""What a plan refuses, what its digest says, and how it shares out the sending."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from map_oracle import Side
from random_maps import journeys
from transformers import LlamaConfig

from stretto.models.language import Held, Piece, Row, WeightMap, row
from stretto.models.llama import llama
from stretto.sync import senders
from stretto.sync.layout import Atoms, Ints, Layout, LayoutBuilder, Shards
from stretto.sync.layouts import EngineSizes
from stretto.sync.parallel import MegatronSizes
from stretto.sync.plan import Plan
from stretto.sync.storage import View


def config(layers: int = 2) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=13,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=3,
        tie_word_embeddings=False,
    )


LLAMA = llama(config())

CHECKPOINT, ENGINE = Side("checkpoint"), Side("sglang", EngineSizes("sglang", 2))
TRAINER = Side("megatron", MegatronSizes(tp=2, pp=2))

Q_0 = "model.layers.0.self_attn.q_proj.weight"


def layouts(begin: Side = TRAINER, end: Side = ENGINE, weights: WeightMap = LLAMA) -> tuple[Layout, Layout]:
    atoms = Atoms.of(weights)
    return begin.layout(atoms), end.layout(atoms)


def kept(layout: Layout, keep: np.ndarray) -> Layout:
    """The layout without some of its shards."""
    return replace(layout, shards=Shards(*(column[keep] for column in layout.shards)))


def of_atom(layout: Layout, name: str) -> np.ndarray:
    return layout.shards.atom == layout.atoms.index[name]


def refusal(source: Layout, target: Layout) -> list[str]:
    with pytest.raises(ValueError, match="\n  ") as caught:
        Plan.of(source, target)
    return [line.strip() for line in str(caught.value).splitlines()]


def test_what_nothing_fills_is_named_with_the_nearest_that_there_is() -> None:
    source, target = layouts()
    lines = refusal(kept(source, ~of_atom(source, Q_0)), target)
    assert lines[0] == "megatron(tp=2, pp=2) does not fill sglang(tp=2, ep=1, replicas=1):"
    near = "model.layers.1.self_attn.q_proj.weight"
    assert lines[1:] == [f"nothing fills the target's {Q_0} (nearest there: {near})"]


def test_what_nothing_reads_is_named_with_the_nearest_that_is_read() -> None:
    source, target = layouts()
    lines = refusal(source, kept(target, ~of_atom(target, "model.norm.weight")))
    assert len(lines) == 2
    assert lines[1].startswith("nothing reads the source's model.norm.weight (nearest there: model.")


def test_both_lists_are_in_one_message() -> None:
    source, target = layouts()
    lines = refusal(kept(source, ~of_atom(source, Q_0)), kept(target, ~of_atom(target, "model.norm.weight")))
    assert [line.split(" (")[0] for line in lines[1:]] == [
        f"nothing fills the target's {Q_0}",
        "nothing reads the source's model.norm.weight",
    ]


def test_many_lines_are_cut_short() -> None:
    source, target = layouts(weights=llama(config(9)))
    lines = refusal(kept(source, of_atom(source, "model.norm.weight")), target)
    assert len(lines) == 22
    assert lines[-1] == f"... and {len(source.atoms.names) - 1 - 20} more"


def test_a_source_of_which_a_rank_lacks_its_part_is_refused() -> None:
    source, target = layouts()
    first = int(np.nonzero(of_atom(source, Q_0))[0][0])
    lines = refusal(kept(source, np.arange(len(source.shards.atom)) != first), target)
    assert lines == ["megatron(tp=2, pp=2) does not hold the model once:", f"{Q_0}: its ranks hold 48 of 96 elements"]


def moved(layout: Layout, shard: int, by: int) -> Layout:
    """The layout with one box a little further along its first factor."""
    start = layout.shards.start.copy()
    start[shard, 0] += by
    return replace(layout, shards=layout.shards._replace(start=start))


def test_a_source_of_which_two_ranks_have_the_same_in_different_boxes_is_refused() -> None:
    source, target = layouts(Side("fsdp", 2))
    name = "model.norm.weight"
    second = int(np.nonzero(of_atom(source, name))[0][1])
    assert f"{name}: two of its boxes overlap" in refusal(moved(source, second, -1), target)


def test_a_target_of_which_a_rank_wants_what_no_rank_has_is_refused() -> None:
    source, target = layouts()
    last = int(np.nonzero(of_atom(target, "model.layers.1.mlp.down_proj.weight"))[0][-1])
    lines = refusal(source, moved(target, last, 1))
    assert (
        "model.layers.1.mlp.down_proj.weight: 42 of 48 elements of model.layers.1.mlp.down_proj.weight are written"
        in lines
    )


def test_a_target_tensor_with_a_hole_is_refused() -> None:
    source, target = layouts()
    middle = int(np.nonzero(of_atom(target, "model.layers.1.self_attn.k_proj.weight"))[0][0])
    lines = refusal(source, kept(target, np.arange(len(target.shards.atom)) != middle))
    assert "model.layers.1.self_attn.k_proj.weight: 24 of 48 elements are read" in lines
    assert "model.layers.1.self_attn.qkv_proj.weight: 72 of 96 elements are written at rank 0" in lines


def test_a_target_tensor_that_a_rank_has_and_nobody_writes_is_refused() -> None:
    source, target = layouts(end=Side("fsdp", 2))
    first = int(np.nonzero(of_atom(target, "model.norm.weight"))[0][0])
    lines = refusal(source, kept(target, np.arange(len(target.shards.atom)) != first))
    assert "model.norm.weight: nothing is written at some of its 1 ranks" in lines


def test_a_target_tensor_that_is_written_twice_is_refused() -> None:
    source, target = layouts()
    one = int(np.nonzero(of_atom(target, "model.norm.weight"))[0][0])
    twice = np.append(np.arange(len(target.shards.atom)), one)
    assert "model.norm.weight: 16 of 8 elements are written at rank 0" in refusal(source, kept(target, twice))


def test_two_tensors_of_one_name_are_refused() -> None:
    rows = [
        with_name(one, "engine", "model.norm.weight") if "input" in one.pieces[0].name else one for one in LLAMA.rows
    ]
    source, target = layouts(weights=replace(LLAMA, rows=tuple(rows)))
    assert "sglang(tp=2, ep=1, replicas=1) has two tensors of the name model.norm.weight" in refusal(source, target)


def with_name(one: Row, side: str, name: str) -> Row:
    return replace(one, held=MappingProxyType({**one.held, side: (Held(name),)}))


def test_layouts_of_two_maps_are_no_plan() -> None:
    with pytest.raises(AssertionError, match="two layouts of one map"):
        Plan.of(layouts()[0], layouts(weights=llama(config(3)))[1])


# The digest.


def digest(begin: Side = TRAINER, end: Side = ENGINE, weights: WeightMap = LLAMA, **where: list[int]) -> str:
    return Plan.of(*layouts(begin, end, weights), **where).digest


def test_the_digest_is_another_when_anything_is() -> None:
    per = [
        replace(one, held=MappingProxyType({**one.held, "megatron": (replace(one.held["megatron"][0], per=""),)}))
        if "q_proj" in one.pieces[0].name
        else one
        for one in LLAMA.rows
    ]
    digests = {
        "itself": digest(),
        "target's dtype": digest(end=replace(ENGINE, dtype="bfloat16")),
        "source's dtype": digest(replace(TRAINER, dtype="bfloat16")),
        "source's sizes": digest(Side("megatron", MegatronSizes(tp=2, pp=1))),
        "stages": digest(Side("megatron", MegatronSizes(tp=2, pp=1, dp=2))),
        "names": digest(replace(TRAINER, sizes=MegatronSizes(tp=2, pp=2, te=True))),
        "padding": digest(replace(TRAINER, sizes=MegatronSizes(tp=2, pp=2, vocab_divisor=16))),
        "target's sizes": digest(end=Side("sglang", EngineSizes("sglang", 1))),
        "target's kind": digest(end=Side("vllm", EngineSizes("vllm", 2))),
        "replicas": digest(end=Side("sglang", EngineSizes("sglang", 2, replicas=2))),
        "colocated": digest(target_at=[0, 1]),
        "colocated the other way round": digest(target_at=[1, 0]),
        "ranks elsewhere": digest(source_at=[0, 1, 3, 2]),
        "order in a tensor": digest(weights=replace(LLAMA, rows=tuple(per))),
        "layers": digest(weights=llama(config(3))),
    }
    same = [pair for pair in itertools.combinations(digests, 2) if digests[pair[0]] == digests[pair[1]]]
    assert same == []
    assert digest() == digests["itself"]


def test_the_digest_is_the_same_in_every_process() -> None:
    script = (
        "import test_plan as t; from stretto.sync.plan import Plan; "
        "print(t.digest(), Plan.of(*t.layouts(t.Side('fsdp', 3), t.Side('embedded', 2))).digest)"
    )
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    printed = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("1", "2")
    }
    assert printed == {f"{digest()} {digest(Side('fsdp', 3), Side('embedded', 2))}\n"}


def test_a_part_of_a_plan_fills_the_tensors_of_these_names() -> None:
    plan = Plan.of(*layouts(end=CHECKPOINT))
    part = plan.only({"model.norm.weight", Q_0})
    assert int(part.send_bytes.sum()) == 4 * (8 + 12 * 8)
    assert part.digest != plan.digest


def test_a_summary_adds_up() -> None:
    plan = Plan.of(*layouts())
    summary = plan.summary()
    assert summary["target_bytes"] == summary["moved_bytes"] == plan.moved_bytes
    assert summary["busiest_sender_bytes"] == plan.sent_bytes().max()
    assert plan.least_seconds(100.0) == max(plan.sent_bytes().max(), plan.received_bytes().max()) / 100.0
    assert sum(plan.link_bytes().values()) == plan.moved_bytes


# Who sends.


def best_share(holders: list[set[int]], sizes: Ints, ranks: int) -> float:
    """The least load of the busiest rank over all ways to share, pieces cut at will: the heaviest of all sets of ranks.

    By max-flow min-cut, it is the most bytes a rank, over all sets, of what only ranks of the set hold.
    """
    best = 0.0
    for count in range(1, ranks + 1):
        for some in itertools.combinations(range(ranks), count):
            inside = sum(size for one, size in zip(holders, sizes, strict=True) if one <= set(some))
            best = max(best, inside / count)
    return best


@st.composite
def shared_boxes(draw):
    """Boxes of so many bytes, and the ranks that hold each."""
    ranks = draw(st.integers(1, 6))
    groups = draw(st.lists(st.sets(st.integers(0, ranks - 1), min_size=1), min_size=1, max_size=6))
    boxes = draw(st.lists(st.tuples(st.sampled_from(groups), st.integers(1, 50)), min_size=1, max_size=30))
    return ranks, boxes


def layout_of_boxes(ranks: int, boxes: list[tuple[set[int], int]]) -> Layout:
    rows = tuple(row(Piece(f"p{place}", str(size))) for place, (_, size) in enumerate(boxes))
    build = LayoutBuilder("boxes", Atoms.of(WeightMap("boxes", {}, rows, 1)), ranks, "float32")
    kind = build.new_class(range(ranks))
    for place, (holders, size) in enumerate(boxes):
        view = View((0,), (size,), (1,), 0)
        build.shard(0, f"p{place}", view, Held(f"p{place}"), build.group(sorted(holders)))
    assert kind == 0
    return build.build()


@settings(max_examples=80, deadline=None)
@given(shared_boxes())
def test_the_bound_is_below_the_best_and_the_sharing_near_it(case: tuple[int, list[tuple[set[int], int]]]) -> None:
    ranks, boxes = case
    layout = layout_of_boxes(ranks, boxes)
    box = np.arange(len(boxes))
    sizes = np.array([size for _, size in boxes])
    best = best_share([holders for holders, _ in boxes], sizes, ranks)
    assert senders.bound(layout, box, box, sizes) <= best + 1e-9
    elsewhere = np.full(len(boxes), ranks)
    rank, shard = senders.choose(layout, box, box, sizes, np.arange(ranks), elsewhere)
    assert all(one in boxes[place][0] for place, one in enumerate(rank))
    assert (shard == box).all()
    assert np.bincount(rank, weights=sizes).max() <= 1.1 * best + sizes.max()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(journeys())
def test_every_sender_has_what_it_sends(journey: tuple[WeightMap, Side, Side]) -> None:
    weights, begin, end = journey
    atoms = Atoms.of(weights)
    source, target = begin.layout(atoms), end.layout(atoms)
    assume(source.ranks <= 12)
    plan = Plan.of(source, target)
    groups, shards = plan.source.groups, plan.source.shards
    piece = plan.sends.piece
    for rank, shard in zip(plan.sends.source_rank, plan.sends.source, strict=True):
        assert rank in groups[shards.holders[shard]]
    inside = plan.pieces.start[piece] - shards.start[plan.sends.source]
    assert (shards.atom[plan.sends.source] == plan.pieces.atom[piece]).all()
    assert (inside >= 0).all()
    assert (inside + plan.pieces.size[piece] <= shards.size[plan.sends.source]).all()
    holders = [
        {int(one) for place in np.nonzero(plan.boxes.of_shard == box)[0] for one in groups[shards.holders[place]]}
        for box in range(len(plan.boxes.atom))
    ]
    if source.ranks <= 6:
        best = best_share([holders[box] for box in plan.pieces.box[piece]], plan.send_bytes, source.ranks)
        assert plan.sender_bound <= best + 1e-9
