from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from stretto.cli import main
from stretto.models import registry
from stretto.models.scaffold import bridges
from stretto.orchestration.new_model import new_model

SIZES = {"vocab_size": 51, "hidden_size": 48, "intermediate_size": 28, "num_hidden_layers": 3}
GRANITE = {"num_attention_heads": 8, "num_key_value_heads": 2, "embedding_multiplier": 12.0, **SIZES}


@pytest.fixture(autouse=True)
def in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory is the test's, and maps that it loads are forgotten behind it."""
    monkeypatch.chdir(tmp_path)
    registry.families()
    monkeypatch.setattr(registry, "_CLAIMS", {name: list(claims) for name, claims in registry._CLAIMS.items()})


def configured(kind: str, **sizes: Any) -> str:
    """A directory with nothing but a config.json."""
    directory = Path(kind)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": kind, **sizes}))
    return kind


def test_an_unknown_architecture_gets_a_map_that_plan_can_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-model", configured("granite", **GRANITE)]) == 0
    said = capsys.readouterr().out
    assert "GraniteForCausalLM (GraniteConfig): no weight map claims it" in said
    assert "Wrote granite_map.py" in said
    assert "nothing unresolved" in said
    assert "stretto check granite --map granite_map.py" in said
    assert "embedding_multiplier = 12.0" in said
    sides = ["--source", "fsdp:ranks=3", "--target", "sglang:tp=2"]
    assert main(["plan", "granite", *sides]) == 2
    assert "no weight map claims GraniteConfig" in capsys.readouterr().err
    assert main(["plan", "granite", *sides, "--map", "granite_map.py", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["family"] == "granite"


def test_a_map_begun_in_part_lists_what_is_left_and_plan_refuses_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-model", configured("mamba", **SIZES), "--out", "begun.py"]) == 0
    said = capsys.readouterr().out
    assert "  backbone.layers.{layer}.mixer.in_proj.weight [" in said
    assert "finish the map" in said
    words = ["plan", "mamba", "--source", "fsdp", "--target", "embedded", "--map", "begun.py"]
    assert main(words) == 2
    complaint = capsys.readouterr().err
    assert "the mamba map is not finished" in complaint
    assert "mixer.in_proj.weight" in complaint


def test_a_known_architecture_needs_no_new_map(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new-model", str(tiny_model)]) == 0
    said = capsys.readouterr().out
    assert "LlamaConfig has a weight map (stretto.models.llama.llama); nothing is written" in said
    assert f"stretto check {tiny_model}" in said
    assert not list(tmp_path.iterdir())


def test_it_says_whether_megatron_bridge_has_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = configured("granite", **GRANITE)
    known = bridges.Bridges("9.9", frozenset({"GraniteForCausalLM"}))
    ways = {"has": known, "not": bridges.Bridges("9.9", frozenset()), "absent": None}
    said = {}
    for way, found in ways.items():
        monkeypatch.setattr("stretto.orchestration.new_model.installed_bridges", lambda found=found: found)
        said[way] = new_model(model, Path(f"{way}.py"))
    assert 'megatron-bridge 9.9 has this model: trainer.names = "bridge"' in said["has"]
    assert "megatron-bridge 9.9 does not have this model" in said["not"]
    assert "Megatron-Bridge is not installed" in said["absent"]
    assert "pip install" in said["absent"]


def test_a_file_that_exists_is_not_touched(capsys: pytest.CaptureFixture[str]) -> None:
    model = configured("granite", **GRANITE)
    Path("granite_map.py").write_text("precious")
    assert main(["new-model", model]) == 2
    assert "granite_map.py exists; name another file with --out" in capsys.readouterr().err
    assert Path("granite_map.py").read_text() == "precious"


def test_bad_input_is_said_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    model = configured("granite", **GRANITE)
    Path("no_config").mkdir()
    Path("odd.json").write_text(json.dumps({"model_type": "no_such_type"}))
    Path("torn.json").write_text("{")
    for words, said in (
        (["./gone"], "gone is neither a checkpoint directory nor a config.json"),
        (["gone.json"], "gone.json is neither a checkpoint directory nor a config.json"),
        (["no_config"], "no_config has no config.json"),
        (["odd.json"], "cannot read the configuration of odd.json"),
        (["torn.json"], "cannot read the configuration of torn.json"),
        ([model, "--out", "no/map.py"], "there is no directory"),
    ):
        assert main(["new-model", *words]) == 2
        assert said in capsys.readouterr().err


def test_the_command_itself(stretto: Callable[..., CompletedProcess[str]]) -> None:
    model = configured("granite", **GRANITE)
    done = stretto("new-model", model, "--out", "map.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert Path("map.py").is_file()
