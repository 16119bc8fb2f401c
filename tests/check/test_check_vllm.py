"""`stretto check --live`: a real server is held to the trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stretto.cli import main
from stretto.models.language import WeightMap
from stretto.orchestration.check import CheckSettings, check
from vllm_here import vllm_python

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 512,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
}
OPTIONS = {"enforce_eager": True}


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    return str(tmp_path / "config.json")


@pytest.mark.timeout(600)
def test_vllm_passes(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--engine", "vllm", "--live", "--engine-python", vllm_python(), "--engine-option", "enforce_eager=true"]
    assert main(["check", model, *words, "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    rungs = {rung["name"]: rung for rung in report["rungs"]}
    assert all(rungs[name]["status"] == "pass" for name in rungs if name != "memory")
    assert "what it has not packed was read again" in rungs["round trip"]["reason"]
    assert rungs["step and sync"]["measured"] < 1e-4


@pytest.mark.timeout(600)
def test_a_wrong_name_in_vllms_column_of_the_map_is_named(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = WeightMap.engine_name
    monkeypatch.setattr(
        WeightMap, "engine_name", lambda self, *words: own(self, *words).replace("down_proj", "down_projection")
    )
    report = check(CheckSettings(model, engine="vllm", live=True, engine_python=vllm_python(), engine_options=OPTIONS))
    assert not report.passed
    (broken,) = [rung for rung in report.rungs if rung.outcome.status == "fail"]
    assert broken.name == "round trip"
    assert broken.outcome.failure is not None
    assert "down_projection" in broken.outcome.failure.evidence


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"engine": "embedded", "live": True}, "the embedded engine always is"),
        ({"engine": "vllm", "engine_python": "/venv/bin/python"}, "add --live"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        CheckSettings("model", **settings)
