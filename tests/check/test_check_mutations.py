"""Deliberate mistakes, one at a time: the check breaks at the right rung and names the parameter and the kind."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from check_cases import broken, report_of, verdicts
from check_faults import FAULTS, patched

from ranks import Ranks
from stretto.orchestration.check import numbers
from stretto.world import World

MEGATRON: dict[str, Any] = {"trainer": "megatron"}


class Mutation(NamedTuple):
    """A fault, the model that shows it, and what the check has to say: patterns for the parameter and the kind."""

    fault: str
    case: str
    rung: str
    parameter: str
    kind: str
    settings: dict[str, Any] = MEGATRON


ON_ONE_RANK = (
    Mutation("gate_and_up_swapped", "llama", "logits", r"up_proj.*gate_proj", "swapped within .*linear_fc1"),
    Mutation("qkv_not_interleaved", "qwen3", "logits", r"q_proj.*k_proj.*v_proj", "groups interleaved wrongly"),
    Mutation("no_plus_one", "gemma", "logits", r"input_layernorm.*model\.norm", r"\+1 missing"),
    Mutation("expert_transposed", "square", "logits", r"experts\.\{e\}\.down_proj", "transposed"),
    Mutation("query_and_key_norms_swapped", "qwen3", "logits", r"q_norm.*k_norm", "swapped with each other"),
    Mutation("bias_dropped", "qwen2", "mapped", r"self_attn\.k_proj\.bias", "a row is missing"),
    Mutation(
        "router_bias_without_its_dtype",
        "deepseek-v3",
        "mapped",
        "expert_bias|e_score_correction_bias",
        "wrong dtype",
        MEGATRON | {"dtype": "bfloat16"},
    ),
    Mutation("megatron_name_misspelled", "llama", "mapped", "linear_proj", "another name"),
    Mutation(
        "stacked_gate_and_up_swapped", "qwen3-moe", "round trip", r"experts\.\{e\}\.gate_proj", "halves swapped", {}
    ),
    Mutation("norm_of_the_next_layer", "llama", "logits", "input_layernorm", "of the wrong layer"),
    Mutation("norm_gradients_doubled", "llama", "gradients", "post_attention_layernorm", "2 times"),
    Mutation("engine_served_stale_weights", "llama", "step and sync", r"model\.embed_tokens\.weight", "stale"),
)

ON_TWO_RANKS = (
    Mutation("stages_swapped", "llama", "logits", "input_layernorm", "wrong pipeline offset", MEGATRON | {"pp": 2}),
    Mutation("stage_overlaps", "llama", "plan", r"model\.layers\.1\.", "not written", MEGATRON | {"pp": 2}),
    Mutation("tied_head_stays_behind", "llama-tied", "step and sync", "embed_tokens", "stale", MEGATRON | {"pp": 2}),
    Mutation("experts_of_the_other_rank", "square", "logits", r"experts", "experts off by 2", MEGATRON | {"ep": 2}),
    Mutation("padding_not_masked", "qwen2", "logits", "embed_tokens|lm_head", "padded rows", MEGATRON | {"tp": 2}),
    Mutation(
        "down_projection_of_the_other_rank",
        "llama",
        "logits",
        "down_proj",
        "one shard along axis 1",
        MEGATRON | {"tp": 2},
    ),
    Mutation("bucket_skipped", "llama", "round trip", r"model\.", "", {"dp": 2}),
    Mutation("bucket_forgotten", "llama", "round trip", r"model\.", "never written", {"dp": 2}),
    Mutation("bucket_twice", "llama", "round trip", r"model\.", "", {"dp": 2}),
)


@pytest.mark.parametrize("mutation", ON_ONE_RANK, ids=lambda one: one.fault)
def test_a_mistake_is_found_and_named_on_one_rank(alone: Ranks, tmp_path: Path, mutation: Mutation) -> None:
    assert_found(alone.run(report_of, mutation.case, tmp_path, mutation.settings, mutation.fault), mutation)


@pytest.mark.parametrize("mutation", ON_TWO_RANKS, ids=lambda one: one.fault)
def test_a_mistake_is_found_and_named_on_two_ranks(pair: Ranks, tmp_path: Path, mutation: Mutation) -> None:
    assert_found(pair.run(report_of, mutation.case, tmp_path, mutation.settings, mutation.fault), mutation)


def test_a_search_that_takes_too_long_ends_with_what_it_has(pair: Ranks, tmp_path: Path) -> None:
    for report in pair.run(report_in_no_time, tmp_path):
        assert broken(report) == "logits"
        assert report["failure"]["kind"] == "not found in time"
        assert "0 mistakes of one row were tried" in report["failure"]["evidence"]


def report_in_no_time(world: World, directory: Path) -> dict[str, Any]:
    deadline_s = -1.0 if world.first else 600.0  # the first rank's clock is everyone's
    with patched(numbers, search=partial(numbers.search, deadline_s=deadline_s)):
        return report_of(world, "llama", directory, MEGATRON | {"tp": 2}, "down_projection_of_the_other_rank")


def assert_found(reports: list[dict[str, Any]], mutation: Mutation) -> None:
    """Every rank says the same."""
    for report in reports:
        assert broken(report) == mutation.rung, report["failure"] or verdicts(report)
        failure = report["failure"]
        assert re.search(mutation.parameter, failure["parameter"] or "", re.DOTALL), failure
        assert re.search(mutation.kind, failure["kind"]), failure
        after = list(verdicts(report).values())
        assert set(after[after.index("fail") + 1 :]) <= {"skipped"}


def test_a_forgotten_temperature_is_the_engines_fault(alone: Ranks, tmp_path: Path) -> None:
    """No parameter is wrong: transformers with the trainer's weights says which side is."""
    (report,) = alone.run(report_of, "llama", tmp_path, {}, "temperature_forgotten")
    assert broken(report) == "engine"
    assert report["failure"]["parameter"] is None
    assert report["failure"]["kind"].startswith("the engine computes something else")


def test_every_fault_is_tried() -> None:
    tried = {one.fault for one in (*ON_ONE_RANK, *ON_TWO_RANKS)} | {"temperature_forgotten"}
    assert tried == set(FAULTS)
    assert len(tried) >= 12
