"""Models that are integrated pass every rung that there is for them, on both trainers and however they are cut."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from check_cases import broken, report_of, verdicts
from family_cases import CASES, ENGINE_ALONE, WITHOUT_MEGATRON

from ranks import Ranks

MEGATRON: dict[str, Any] = {"trainer": "megatron"}

EMBEDDED = [name for name in CASES if name not in ENGINE_ALONE]
BUILT = [name for name in CASES if name not in WITHOUT_MEGATRON | ENGINE_ALONE]

CUTS: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", MEGATRON | {"tp": 2}),
    ("qwen3-tied", MEGATRON | {"tp": 2, "sequence_parallel": True}),
    ("qwen3-moe", MEGATRON | {"tp": 2, "ep": 2, "sequence_parallel": True}),
    ("llama-tied", MEGATRON | {"pp": 2}),
    ("gemma-tied", MEGATRON | {"pp": 2}),
    ("qwen3-moe-mixed", MEGATRON | {"pp": 2, "vpp": 2}),
    ("qwen3-moe", MEGATRON | {"ep": 2}),
    ("qwen3-moe", {"dp": 2}),
    ("llama-tied", {"dp": 2}),
]


def assert_passes(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["passed"], report["failure"] or [one for one in report["rungs"] if one["status"] == "fail"]
        assert {name for name, verdict in verdicts(report).items() if verdict == "skipped"} <= {"memory"}


@pytest.mark.parametrize("case", EMBEDDED)
def test_fsdp_with_the_embedded_engine(alone: Ranks, tmp_path: Path, case: str) -> None:
    assert_passes(alone.run(report_of, case, tmp_path, {}, None))


@pytest.mark.parametrize("case", BUILT)
def test_megatron_with_the_embedded_engine(alone: Ranks, tmp_path: Path, case: str) -> None:
    assert_passes(alone.run(report_of, case, tmp_path, MEGATRON, None))


@pytest.mark.skipif(find_spec("megatron.bridge") is None, reason="Megatron-Bridge is not installed")
@pytest.mark.parametrize("case", ["qwen3", "llama-tied"])
def test_megatron_with_the_names_of_a_bridge(alone: Ranks, tmp_path: Path, case: str) -> None:
    assert_passes(alone.run(report_of, case, tmp_path, MEGATRON | {"names": "bridge"}, None))


@pytest.mark.parametrize("settings", [{}, MEGATRON], ids=["fsdp", "megatron"])
def test_bfloat16_by_its_own_bounds(alone: Ranks, tmp_path: Path, settings: dict[str, Any]) -> None:
    (report,) = alone.run(report_of, "qwen3", tmp_path, settings | {"dtype": "bfloat16"}, None)
    assert_passes([report])
    logits = next(one for one in report["rungs"] if one["name"] == "logits")
    assert 1e-4 < logits["measured"] < logits["bound"]


@pytest.mark.parametrize(
    "cut", CUTS, ids=lambda cut: "-".join([cut[0], *(f"{key}{value}" for key, value in cut[1].items())])
)
def test_two_ranks(pair: Ranks, tmp_path: Path, cut: tuple[str, dict[str, Any]]) -> None:
    assert_passes(pair.run(report_of, cut[0], tmp_path, cut[1], None))


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_an_engine_that_is_not_live_is_planned_for(alone: Ranks, tmp_path: Path, engine: str) -> None:
    (report,) = alone.run(report_of, "qwen3-moe", tmp_path, {"engine": engine, "engine_tp": 4}, None)
    assert report["passed"], report["failure"]
    assert verdicts(report)["plan"] == "pass"
    assert verdicts(report)["engine"] == "skipped"
    assert "live" in next(one["reason"] for one in report["rungs"] if one["name"] == "engine")


def test_layers_that_take_no_packed_rows_are_trained_in_padded_ones(alone: Ranks, tmp_path: Path) -> None:
    (report,) = alone.run(report_of, "qwen3-next", tmp_path, {"engine": "sglang"}, None)
    assert verdicts(report)["gradients"] == "pass", report["failure"]


def test_a_model_that_the_embedded_engine_cannot_serve(alone: Ranks, tmp_path: Path) -> None:
    (report,) = alone.run(report_of, "qwen3-next", tmp_path, {}, None)
    assert broken(report) == "mapped"
    assert "SGLang or the vLLM engine" in report["failure"]["evidence"]


def test_a_trainer_that_has_no_such_model(alone: Ranks, tmp_path: Path) -> None:
    (report,) = alone.run(report_of, "qwen3-vl", tmp_path, MEGATRON, None)
    assert broken(report) == "family"
    assert "use --trainer fsdp" in report["failure"]["evidence"]
