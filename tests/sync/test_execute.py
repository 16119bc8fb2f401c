"""Plans executed between real processes over gloo, and what an execution refuses."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from map_oracle import Side, local_tensors, random_values
from torch import Tensor

from ranks import Ranks
from stretto.models.language import Held, Piece, WeightMap, layers, row
from stretto.sync import program as program_module
from stretto.sync.execute import Execution, over_group
from stretto.sync.layout import Atoms
from stretto.sync.layouts import EngineSizes
from stretto.sync.links import GroupLink
from stretto.sync.parallel import MegatronSizes
from stretto.sync.plan import Plan
from stretto.world import World

CPU = torch.device("cpu")
DEADLINE_S = 120.0

WEIGHTS = WeightMap(
    "small",
    {"v": 13, "h": 6, "g": 2, "q": 2, "d": 3, "f": 8, "e": 4, "m": 2},
    (
        row(Piece("embed", "v h"), megatron="embed", stage="first"),
        row(Piece("embed", "v h"), megatron="head", stage="last", tied=True),
        *layers(
            2,
            [
                row(Piece("norm", "h"), megatron=Held("norm", add=1.0)),
                row(
                    Piece("q", "(g q d) h"),
                    Piece("k", "(g d) h"),
                    megatron=Held("qk", per="g"),
                    engine=Held("qk"),
                    memory=Held("qk", transpose=True),
                ),
                row(Piece("gate", "f h"), Piece("up", "f h"), megatron=Held("fc1"), engine=Held("gate_up")),
                row(Piece("down", "h f"), megatron="down"),
                row(
                    Piece("experts.{e}", "m h"), megatron="experts.{e}", memory=Held("experts"), engine=Held("experts")
                ),
                row(Piece("scale", ""), megatron="scale", cut=False),
                row(Piece("router_bias", "e", dtype="float32", buffer=True), megatron="router_bias", cut=False),
            ],
            prefix="l.{layer}.",
            megatron="m.{layer}.",
        ),
    ),
    2,
    megatron={},
)
"""Everything that is awkward: padding, a tied head, +1, groups, a transpose, a stack, scalars, a float32 buffer."""

FOUR = Side("megatron", MegatronSizes(tp=2, pp=2, vocab_divisor=4))
JOURNEYS: dict[str, tuple[Side, Side, list[int] | None]] = {
    "colocated": (FOUR, Side("embedded", 4), [0, 1, 2, 3]),
    "colocated the other way round": (FOUR, Side("embedded", 4), [3, 2, 1, 0]),
    "apart": (Side("megatron", MegatronSizes(tp=2)), Side("sglang", EngineSizes("sglang", 2)), [2, 3]),
    "cast": (Side("fsdp", 3), Side("embedded", 1, "bfloat16"), [3]),
    "cast up": (Side("megatron", MegatronSizes(dp=2), "bfloat16"), Side("vllm", EngineSizes("vllm", 2)), [1, 3]),
    "ranks without rows": (Side("fsdp", 4), Side("megatron", MegatronSizes(tp=2, dp=2)), [1, 0, 3, 2]),
    "nothing travels": (Side("embedded", 4), Side("embedded", 4), [0, 1, 2, 3]),
    "many ranks a process": (Side("fsdp", 4), Side("embedded", 8), [0, 0, 1, 1, 2, 2, 3, 3]),
}


def plan_of(journey: str, weights: WeightMap = WEIGHTS) -> Plan:
    begin, end, at = JOURNEYS[journey]
    atoms = Atoms.of(weights)
    return Plan.of(begin.layout(atoms), end.layout(atoms), at)


def values_of(begin: Side, seed: int) -> dict[str, Tensor]:
    """Numbers that every dtype in the tests holds exactly, also with one added."""
    exact = {name: (one * 8).round() / 8 for name, one in random_values(WEIGHTS, seed).items()}
    return exact if begin.dtype == "bfloat16" else random_values(WEIGHTS, seed)


def shifted(values: dict[str, Tensor], side: Side) -> dict[str, Tensor]:
    """Megatron holds norms as their whole weight."""
    more = 1.0 if isinstance(side.sizes, MegatronSizes) else 0.0
    return {name: one + more if name.endswith("norm") else one for name, one in values.items()}


def scattered(tensor: Tensor) -> Tensor:
    """The same tensor with gaps between its elements."""
    wide = torch.full((*tensor.shape, 2), torch.nan, dtype=tensor.dtype)
    wide[..., 0] = tensor
    return wide[..., 0]


class Part:
    """One process's part of a journey, with its tensors and what must become of them."""

    def __init__(self, journey: str, process: int, extra_bytes: int, form: Callable[[Tensor], Tensor] = torch.clone):
        self.begin, self.end, _ = JOURNEYS[journey]
        self.plan = plan_of(journey)
        self.mine = [rank for rank, at in enumerate(self.plan.source_at) if at == process]
        self.targets = [rank for rank, at in enumerate(self.plan.target_at) if at == process]
        self.source = {rank: self._tensors(self.begin, rank, 0, form) for rank in self.mine}
        self.filled = {
            rank: {name: form(torch.full_like(one, torch.nan)) for name, one in self.expected(rank, 0).items()}
            for rank in self.targets
        }
        self.link = over_group(self.plan, device=CPU, extra_bytes=extra_bytes)
        self.execution = Execution(self.plan, process, lambda: self.source, lambda: self.filled, link=self.link)

    def _tensors(self, side: Side, rank: int, seed: int, form: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        values = shifted(values_of(self.begin, seed), side)
        return {name: form(one) for name, one in local_tensors(WEIGHTS, side, rank, values).items()}

    def expected(self, rank: int, seed: int) -> dict[str, Tensor]:
        """What the target must hold: the source's float32 number, less or more one, rounded once."""
        values, begin = values_of(self.begin, seed), self.begin
        if isinstance(begin.sizes, MegatronSizes) and not isinstance(self.end.sizes, MegatronSizes):
            values = {name: (one + 1.0) - 1.0 if name.endswith("norm") else one for name, one in values.items()}
        return local_tensors(WEIGHTS, self.end, rank, shifted(values, self.end))

    def step(self, seed: int) -> None:
        """An optimizer step: other numbers in the same tensors."""
        for rank in self.mine:
            for name, one in self._tensors(self.begin, rank, seed, torch.clone).items():
                self.source[rank][name].copy_(one)

    def wrong(self, seed: int) -> list[str]:
        """Names of tensors that are not, bit for bit, what they must be."""
        return [
            f"{rank}: {name}"
            for rank in self.targets
            for name, one in self.expected(rank, seed).items()
            if self.filled[rank][name].dtype != one.dtype
            or not torch.equal(self.filled[rank][name].isnan(), one.isnan())
            or not torch.equal(self.filled[rank][name].nan_to_num(), one.nan_to_num())
        ]


def slots(link: GroupLink | None) -> list[Tensor]:
    return list(link._buffers.values()) if link else []


def fill(world: World, journey: str, extra_bytes: int, alone: int, gaps: bool) -> dict[str, Any]:
    """Three steps and publications; says what was wrong, how many buckets there were, and what memory they took."""
    program_module._ALONE = alone
    part = Part(journey, world.rank, extra_bytes, scattered if gaps else torch.clone)
    execution, wrong, places = part.execution, [], set()
    for seed in (0, 1, 1):
        part.step(seed)
        written = execution.run()
        execution.verify()
        wrong += part.wrong(seed)
        places.add(tuple(sorted(one.data_ptr() for one in slots(part.link))))
    return {
        "wrong": wrong,
        "written": written,
        "buckets": sum(len(one) for one in execution.program.incoming.values()),
        "bytes": sum(len(one) for one in slots(part.link)),
        "places": len(places),
        "expected": sum(
            one.isfinite().sum().item() * one.element_size()
            for rank in part.targets
            for one in part.expected(rank, 1).values()
        ),
    }


@pytest.mark.parametrize("journey", JOURNEYS)
@pytest.mark.parametrize(
    ("extra_bytes", "alone", "gaps"),
    [(256, 2**23, False), (1024, 16, False), (2**29, 2**23, True), (2**29, 16, False)],
    ids=["tiny buckets", "messages of one piece", "gaps in tensors", "straight"],
)
def test_every_rank_gets_its_tensors(four: Ranks, journey: str, extra_bytes: int, alone: int, gaps: bool) -> None:
    found = four.run(fill, journey, extra_bytes, alone, gaps)
    assert [one["wrong"] for one in found] == [[]] * 4
    assert all(one["bytes"] <= extra_bytes for one in found)
    assert all(one["places"] == 1 for one in found), "buckets are the same memory at every publication"
    assert [one["written"] for one in found] == [one["expected"] for one in found]
    if extra_bytes == 256 and journey != "nothing travels":
        assert max(one["buckets"] for one in found) > 20


def disagree(world: World) -> None:
    _, end, at = JOURNEYS["colocated"]
    atoms = Atoms.of(WEIGHTS)
    begin = Side("megatron", MegatronSizes(tp=2, pp=2, vocab_divisor=4 if world.rank else 16))
    plan = Plan.of(begin.layout(atoms), end.layout(atoms), at)
    over_group(plan, device=CPU)


def other_buckets(world: World) -> None:
    Part("apart", world.rank, 1024 if world.rank == 2 else 2048)


@pytest.mark.parametrize(("job", "who"), [(disagree, "[1, 2, 3]"), (other_buckets, "[2]")])
def test_ranks_with_other_plans_all_say_so(four: Ranks, job: Callable[..., None], who: str) -> None:
    four.ask(job)
    for failed, what in [four.answer(rank) for rank in range(4)]:
        assert failed
        assert f"RuntimeError: ranks {who} have made another plan than rank 0" in what


def too_many(world: World) -> None:
    atoms = Atoms.of(WEIGHTS)
    plan = Plan.of(FOUR.layout(atoms), Side("embedded").layout(atoms))
    over_group(plan, device=CPU)


def test_a_group_that_is_too_small_is_refused(four: Ranks) -> None:
    four.ask(too_many)
    for failed, what in [four.answer(rank) for rank in range(4)]:
        assert failed
        assert "ValueError: the plan is for 5 processes and the group has 4" in what


class Skipping(Execution):
    """Leaves out the last bucket of every link."""

    def _links(self, step: int) -> tuple[Any, Any, int, int]:
        out, into, to, back = super()._links(step)
        return out[:-1], into[:-1], to, back


def skip_a_bucket(world: World) -> str:
    part = Part("apart", world.rank, 256)
    execution = Skipping(part.plan, world.rank, lambda: part.source, lambda: part.filled, link=part.link)
    execution.run()
    execution.verify()
    return "verified"


def test_a_bucket_that_is_left_out_is_found_by_its_receivers(four: Ranks) -> None:
    four.ask(skip_a_bucket)
    answers = [four.answer(rank) for rank in range(4)]
    assert answers[:2] == [(False, "verified")] * 2, "who only sends has nothing to miss"
    for failed, what in answers[2:]:
        assert failed
        assert "was not filled by this publication" in what


def die_on_the_way(world: World) -> float:
    """Process 1 has made the plan with the others and is gone when its part is due."""
    _, end, _ = JOURNEYS["cast"]
    atoms = Atoms.of(WEIGHTS)
    source = Side("fsdp", 2).layout(atoms)
    tensors = {world.rank: local_tensors(WEIGHTS, Side("fsdp", 2), world.rank, random_values(WEIGHTS))}
    filled = {0: {name: torch.zeros(s, dtype=getattr(torch, d)) for name, (s, d) in end.layout(atoms).local(0).items()}}
    plan = Plan.of(source, end.layout(atoms), [0])
    execution = Execution(plan, world.rank, lambda: tensors, lambda: filled, link=over_group(plan, device=CPU))
    if world.rank == 1:
        os._exit(1)
    begin = time.monotonic()
    with pytest.raises(RuntimeError):
        execution.run()
    with pytest.raises(RuntimeError, match="was not filled"):
        execution.verify()
    return time.monotonic() - begin


def test_a_process_that_dies_is_an_error_for_those_who_wait_for_it(tmp_path: Path) -> None:
    two = Ranks(2, tmp_path, group_timeout_s=20.0)
    try:
        two.ask(die_on_the_way)
        failed, waited = two.answer(0)
        assert not failed, waited
        assert waited < 60.0
    finally:
        two.close()


# In one process.


def alone(source: dict[str, Tensor], filled: dict[str, Tensor]) -> Execution:
    atoms = Atoms.of(WEIGHTS)
    plan = Plan.of(Side("embedded").layout(atoms), Side("checkpoint").layout(atoms), [0])
    return Execution(plan, 0, lambda: {0: source}, lambda: {0: filled})


def both_sides() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    values = random_values(WEIGHTS)
    source, target = (local_tensors(WEIGHTS, Side(kind), 0, values) for kind in ("embedded", "checkpoint"))
    return source, {name: torch.zeros_like(one) for name, one in target.items()}


def test_nothing_counts_as_filled_before_the_first_run() -> None:
    with pytest.raises(RuntimeError, match="was not filled by this publication"):
        alone(*both_sides()).verify()


def test_a_failed_run_leaves_nothing_verified() -> None:
    source, filled = both_sides()
    execution = alone(source, filled)
    execution.run()
    execution.verify()
    del source["l.1.qk"]
    with pytest.raises(ValueError, match=r"the source embedded\(replicas=1\) has no tensor l\.1\.qk at rank 0"):
        execution.run()
    with pytest.raises(RuntimeError, match="was not filled"):
        execution.verify()


def test_a_tensor_of_another_shape_or_dtype_is_refused() -> None:
    source, filled = both_sides()
    execution = alone(source, filled)
    source["l.0.qk"] = source["l.0.qk"].t()
    with pytest.raises(ValueError, match=r"l\.0\.qk is \[18, 6\] float32 and its layout says \[6, 18\] float32"):
        execution.run()
    source["l.0.qk"] = source["l.0.qk"].t()
    filled["l.0.scale"] = filled["l.0.scale"].bfloat16()
    with pytest.raises(ValueError, match=r"l\.0\.scale is \[\] bfloat16 and its layout says \[\] float32"):
        execution.run()


def test_tensors_that_moved_are_found_where_they_are() -> None:
    source, filled = both_sides()
    execution = alone(source, filled)
    execution.run()
    before = source["embed"]
    source["embed"] = before + 1
    old, filled["embed"] = filled["embed"], torch.zeros_like(filled["embed"])
    execution.run()
    assert torch.equal(filled["embed"], source["embed"])
    assert torch.equal(old, before)


def test_parameters_can_be_filled_and_read() -> None:
    source, filled = both_sides()
    params = [{name: torch.nn.Parameter(one) for name, one in side.items()} for side in (source, filled)]
    alone(*params).run()
    assert torch.equal(params[1]["embed"], source["embed"])
    assert params[1]["embed"].requires_grad


@pytest.mark.parametrize("target", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("source", ["bfloat16", "float32"])
def test_a_cast_and_one_more_are_rounded_once(source: str, target: str) -> None:
    """Megatron's norm, with one added, from and to every dtype; numbers for which rounding twice gives another."""
    norm = row(Piece("norm", "h"), megatron=Held("norm", add=1.0), stage="first")
    weights = WeightMap("norm", {"h": 4096}, (norm,), 1, megatron={})
    atoms = Atoms.of(weights)
    begin, end = Side("checkpoint", dtype=source).layout(atoms), Side("megatron", MegatronSizes(), target).layout(atoms)
    numbers = torch.linspace(-3, 3, 4096, dtype=torch.float64).float().to(getattr(torch, source))
    filled = {0: {"norm": torch.empty(4096, dtype=getattr(torch, target))}}
    execution = Execution(Plan.of(begin, end, [0]), 0, lambda: {0: {"norm": numbers}}, lambda: filled)
    execution.run()
    assert torch.equal(filled[0]["norm"], (numbers.float() + 1).to(getattr(torch, target)))
    if source == target == "bfloat16":
        assert not torch.equal(filled[0]["norm"], (numbers.float() + 1).half().to(torch.bfloat16))
