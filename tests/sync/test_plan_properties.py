"""Plans between random layouts of random families, executed on real numbers and held against a slow oracle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from unittest import mock

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from map_oracle import Side, Values, added, local_tensors, random_values
from random_maps import journeys, sides, weight_maps
from torch import Tensor

from stretto.models.language import Piece, Row, WeightMap
from stretto.sync import program as program_module
from stretto.sync.checksum import TRAILER_BYTES, Checksums
from stretto.sync.execute import Execution
from stretto.sync.freight import freight
from stretto.sync.layout import Atoms, Layout
from stretto.sync.plan import Plan
from stretto.sync.program import Bucket, program
from stretto.sync.views import Views, copy

Locals = dict[int, dict[str, Tensor]]

few = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def held(weights: WeightMap, side: Side, ranks: int, values: Values) -> Locals:
    """What the oracle says that every rank has."""
    return {rank: local_tensors(weights, side, rank, values) for rank in range(ranks)}


def blank(layout: Layout) -> Locals:
    """Tensors of every rank as the layout says them, all NaN."""
    return {
        rank: {
            name: torch.full(shape, torch.nan, dtype=getattr(torch, dtype))
            for name, (shape, dtype) in layout.local(rank).items()
        }
        for rank in range(layout.ranks)
    }


def stored(weights: WeightMap, side: Side, values: Values) -> Values:
    """The values as a side has them: with what it adds, rounded once to its dtype."""
    shift = added(weights, side)
    fixed = {name: piece.dtype for row in weights.rows for name, piece in _named(row)}
    return {
        name: (value + shift.get(name, 0.0)).to(getattr(torch, fixed[name] or side.dtype)).float()
        for name, value in values.items()
    }


def arriving(weights: WeightMap, source: Side, target: Side, inside: Values) -> Values:
    """What the target must have of what the source has: the float32 expression, which its dtype then rounds once."""
    begin, end = added(weights, source), added(weights, target)
    return {name: value + (end.get(name, 0.0) - begin.get(name, 0.0)) for name, value in inside.items()}


def _named(row: Row) -> Iterator[tuple[str, Piece]]:
    for layer in row.layers or (None,):
        for piece in row.pieces:
            yield piece.name.replace("{layer}", str(layer)), piece


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors that are not bit for bit alike; rows of padding are NaN in both."""
    assert found.keys() == expected.keys()
    return [
        name
        for name, one in found.items()
        if one.dtype != expected[name].dtype
        or one.shape != expected[name].shape
        or not torch.equal(one.isnan(), expected[name].isnan())
        or not torch.equal(one.nan_to_num(), expected[name].nan_to_num())
    ]


def in_one_process(source: Layout, target: Layout, tensors: Locals) -> Locals:
    """All ranks of both sides in this process."""
    plan = Plan.of(source, target, [0] * target.ranks, [0] * source.ranks)
    filled = blank(target)
    execution = Execution(plan, 0, lambda: tensors, lambda: filled)
    execution.run()
    execution.verify()
    return filled


def in_buckets(plan: Plan, tensors: Locals, filled: Locals, bucket_bytes: int, straight: bool) -> None:
    """Every process does its part of the plan, and messages go from hand to hand."""
    parts = [program(plan, process, bucket_bytes) for process in range(plan.process_count)]
    begin = [Views("source", plan.source, [(m, m.source) for m in one.read()]) for one in parts]
    end = [Views("target", plan.target, [(m, m.target) for m in one.written()]) for one in parts]
    for process, one in enumerate(parts):
        begin[process].bind(tensors)
        end[process].bind(filled)
        copy([end[process][m] for m in one.local], [begin[process][m] for m in one.local], [m.shift for m in one.local])
    for process, one in enumerate(parts):
        for other, buckets in one.outgoing.items():
            assert parts[other].incoming[process] == buckets, "both ends mean the same buckets"
            for out, into in zip(buckets, parts[other].incoming[process], strict=True):
                assert out.bytes <= bucket_bytes
                handed_over(out, begin[process], into, end[other], straight)
    for views in end:
        views.write_back()


def handed_over(out: Bucket, begin: Views, into: Bucket, end: Views, straight: bool) -> None:
    """One bucket from its sender's tensors to its receiver's, with its checksum."""
    slots = torch.zeros(2, out.bytes + TRAILER_BYTES, dtype=torch.uint8)
    leaving = freight(out, slots[0], begin, "out", straight=straight, trailer=TRAILER_BYTES)
    coming = freight(into, slots[1], end, "in", straight=straight, trailer=TRAILER_BYTES)
    checks = Checksums()
    leaving.copies.run()
    checks.stamp(leaving)
    for sent, received in zip(leaving.messages, coming.messages, strict=True):
        received.copy_(sent)
    checks.expect(coming, "the bucket")
    checks.verify()
    coming.copies.run()


@few
@given(journeys())
def test_a_layout_is_what_the_oracle_says(journey: tuple[WeightMap, Side, Side]) -> None:
    weights, side, _ = journey
    layout = side.layout(Atoms.of(weights))
    values = random_values(weights)
    for rank in range(layout.ranks):
        expected = local_tensors(weights, side, rank, values)
        assert layout.local(rank) == {
            name: (tuple(one.shape), str(one.dtype).removeprefix("torch.")) for name, one in expected.items()
        }


@few
@given(journeys())
def test_a_plan_fills_every_element_with_the_right_number(journey: tuple[WeightMap, Side, Side]) -> None:
    weights, begin, end = journey
    atoms = Atoms.of(weights)
    source, target = begin.layout(atoms), end.layout(atoms)
    inside = stored(weights, begin, random_values(weights))
    filled = in_one_process(source, target, held(weights, begin, source.ranks, inside))
    expected = held(weights, end, target.ranks, arriving(weights, begin, end, inside))
    assert {rank: same(filled[rank], expected[rank]) for rank in filled} == {rank: [] for rank in filled}


@few
@given(
    journeys(),
    st.sampled_from(["apart", "colocated", "mixed"]),
    st.sampled_from([16, 64, 4096]),
    st.sampled_from([8, 48, program_module._ALONE]),
    st.booleans(),
)
def test_so_it_does_over_many_processes_in_buckets(
    journey: tuple[WeightMap, Side, Side], where: str, bucket_bytes: int, alone: int, straight: bool
) -> None:
    weights, begin, end = journey
    atoms = Atoms.of(weights)
    source, target = begin.layout(atoms), end.layout(atoms)
    at = {
        "apart": None,
        "colocated": [rank % source.ranks for rank in range(target.ranks)],
        "mixed": [rank * 2 for rank in range(target.ranks)],
    }[where]
    plan = Plan.of(source, target, at)
    inside = stored(weights, begin, random_values(weights))
    filled = blank(target)
    with mock.patch.object(program_module, "_ALONE", alone):
        in_buckets(plan, held(weights, begin, source.ranks, inside), filled, bucket_bytes, straight)
    expected = held(weights, end, target.ranks, arriving(weights, begin, end, inside))
    assert {rank: same(filled[rank], expected[rank]) for rank in filled} == {rank: [] for rank in filled}


@few
@given(weight_maps().flatmap(lambda weights: st.tuples(st.just(weights), sides(weights))))
def test_gathering_and_then_chunking_changes_nothing(journey: tuple[WeightMap, Side]) -> None:
    weights, side = journey
    atoms = Atoms.of(weights)
    layout, whole = side.layout(atoms), Side("checkpoint", dtype="float32").layout(atoms)
    shift = added(weights, side)
    tensors = held(weights, side, layout.ranks, stored(weights, side, random_values(weights)))
    again = in_one_process(whole, layout, in_one_process(layout, whole, tensors))
    for rank, expected in tensors.items():
        if not any(shift.values()):
            assert same(again[rank], expected) == []
        for name, one in expected.items():  # less one and then one more may lose a bit in float32
            torch.testing.assert_close(again[rank][name], one, rtol=0, atol=1e-6, equal_nan=True)


@few
@given(journeys(), st.booleans())
def test_only_what_a_process_lacks_is_moved(journey: tuple[WeightMap, Side, Side], colocated: bool) -> None:
    weights, begin, end = journey
    atoms = Atoms.of(weights)
    source, target = begin.layout(atoms), end.layout(atoms)
    at = [rank % source.ranks for rank in range(target.ranks)] if colocated else None
    plan = Plan.of(source, target, at)
    lacking = 0
    for rank in range(target.ranks):
        wanted = elements(target, rank)
        has = elements(source, rank % source.ranks) if colocated else {}
        for (atom, _), (places, item) in wanted.items():
            here = [there for (other, _), (there, _) in has.items() if other == atom]
            lacking += len(np.setdiff1d(places, np.concatenate([*here, []]))) * item
    assert plan.moved_bytes == lacking
    assert plan.moved_bytes == sum(plan.link_bytes().values()) == plan.received_bytes().sum()
    assert int(plan.send_bytes.sum()) == sum(
        places.size * item for rank in range(target.ranks) for places, item in elements(target, rank).values()
    )
    assert plan.sent_bytes().max() >= plan.sender_bound - 1e-6


def elements(layout: Layout, rank: int) -> dict[tuple[int, int], tuple[np.ndarray, int]]:
    """Which elements of each piece a rank has in each of its tensors, and bytes of one."""
    table, found = layout.shards, {}
    for index, holders in enumerate(table.holders):
        if rank not in layout.groups[holders]:
            continue
        steps = np.indices(table.size[index]).reshape(layout.atoms.width, -1) + table.start[index][:, None]
        places = np.ravel_multi_index(tuple(steps), layout.atoms.sizes[table.atom[index]])
        item = 4 if layout.tensors[table.tensor[index]].dtype == "float32" else 2
        found.setdefault(int(table.atom[index]), []).append((places, item, int(table.tensor[index])))
    return {
        (atom, tensor): (np.concatenate([p for p, _, t in parts if t == tensor]), parts[0][1])
        for atom, parts in found.items()
        for tensor in {t for _, _, t in parts}
    }
