from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stretto.cli import main
from stretto.sync.parallel import MegatronSizes
from stretto.sync.spec import Side, parse_side

LLAMA = {
    "model_type": "llama",
    "dtype": "float32",
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
LAYER = 2 * 48 + 2 * 48 * 48 + 2 * 12 * 48 + 3 * 64 * 48
EMBEDDING = 128 * 48
PARAMETERS = 6 * LAYER + 2 * EMBEDDING + 48
"""Elements of the model above, counted by hand."""


@pytest.fixture(autouse=True)
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config.json, and nothing else, in the working directory."""
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(LLAMA))


def planned(capsys: pytest.CaptureFixture[str], source: str, target: str, *words: str) -> dict[str, Any]:
    assert main(["plan", "config.json", "--source", source, "--target", target, "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("text", "side"),
    [
        ("megatron", Side("megatron")),
        ("megatron:tp=4,pp=2,te", Side("megatron", {"tp": 4, "pp": 2, "te": True})),
        ("megatron:pp=2,pp_layers=3/1", Side("megatron", {"pp": 2, "pp_layers": (3, 1)})),
        ("megatron:te=0,grouped=true", Side("megatron", {"te": False, "grouped": True})),
        ("fsdp:dp=8,dtype=float32", Side("fsdp", {"dp": 8}, "float32")),
        ("checkpoint", Side("checkpoint")),
        ("embedded:replicas=2", Side("embedded", {"replicas": 2})),
        ("vllm:tp=4,ep=2,replicas=3", Side("vllm", {"tp": 4, "ep": 2, "replicas": 3})),
    ],
)
def test_a_side_is_a_name_and_its_sizes(text: str, side: Side) -> None:
    assert parse_side(text) == side


def test_the_sizes_of_megatron_are_those_of_its_layout() -> None:
    side = parse_side("megatron:tp=2,pp=2,vpp=2,ep=2,etp=1,dp=3,vocab_divisor=64,grouped")
    sizes = MegatronSizes(tp=2, pp=2, vpp=2, ep=2, etp=1, dp=3, vocab_divisor=64, grouped_experts=True)
    assert side.megatron == sizes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("megatrom:tp=2", "there is no side 'megatrom' (did you mean 'megatron'?"),
        ("", "there is no side ''"),
        ("sglang:pp=2", "sglang has no key 'pp' (did you mean 'tp' or 'ep'?"),
        ("checkpoint:tp=2", "checkpoint has no key 'tp'"),
        ("megatron:tp=two", "megatron: tp is 'two'; it must be a whole number of at least 1"),
        ("megatron:tp=0", "megatron: tp is '0'; it must be a whole number of at least 1"),
        ("megatron:tp", "megatron: tp is ''; it must be a whole number"),
        ("megatron:tp=2,tp=4", "megatron: tp is given twice"),
        ("megatron:tp=2,", "megatron has no key ''"),
        ("megatron:te=maybe", "megatron: te is 'maybe'; it must be 1 or 0"),
        ("megatron:pp=2,pp_layers=3-3", "megatron: pp_layers is '3-3'; it must be whole numbers"),
        ("megatron:pp=2,pp_layers=2/2/2", "pp_layers has 3 numbers and there are 2 stages"),
        ("megatron:ep=4", "do not divide into ep x etp"),
        ("fsdp:ranks=2,dp=2", "two names of one number"),
        ("fsdp:dtype=int8", "fsdp: dtype is 'int8'; it must be one of"),
    ],
)
def test_a_side_that_cannot_be_is_refused_and_the_nearest_named(text: str, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_side(text)
    assert said in str(caught.value)


def test_bytes_are_counted_from_a_configuration_alone(capsys: pytest.CaptureFixture[str]) -> None:
    report = planned(capsys, "megatron:tp=2,pp=3", "sglang:tp=2,replicas=2", "--link", "2")
    norms = 48 * 13
    held = 4 * ((PARAMETERS - norms) // 2 + norms)
    assert report["received_bytes"] == {"least": held, "mean": held, "most": held, "ranks": [held] * 4}
    assert report["held_bytes"]["target"]["ranks"] == [held] * 4
    middle = 4 * (2 * (LAYER - 96) // 2 + 2 * 96)
    assert report["held_bytes"]["source"]["ranks"][2:4] == [middle] * 2
    assert sum(report["sent_bytes"]["ranks"]) == report["moved_bytes"] == 4 * held
    assert sum(link["bytes"] for link in report["link_bytes"]) == report["moved_bytes"]
    assert report["least_seconds"] == pytest.approx(max(held, report["sent_bytes"]["most"]) / 2e9)
    assert (report["source_dtype"], report["target_dtype"]) == ("float32", "float32")
    assert report["digest"] == planned(capsys, "megatron:tp=2,pp=3", "sglang:tp=2,replicas=2")["digest"]


def test_what_travels_has_the_target_s_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    wide = planned(capsys, "fsdp:ranks=2", "embedded")
    narrow = planned(capsys, "fsdp:ranks=2", "embedded:dtype=bfloat16")
    assert (wide["moved_bytes"], narrow["moved_bytes"]) == (4 * PARAMETERS, 2 * PARAMETERS)
    both = planned(capsys, "fsdp:ranks=2,dtype=float32", "embedded", "--dtype", "bfloat16")
    assert (both["source_dtype"], both["target_dtype"]) == ("float32", "bfloat16")


def test_colocated_ranks_receive_only_what_they_lack(capsys: pytest.CaptureFixture[str]) -> None:
    apart = planned(capsys, "fsdp:ranks=2", "embedded:replicas=2")
    together = planned(capsys, "fsdp:ranks=2", "embedded:replicas=2", "--colocate")
    assert apart["moved_bytes"] == 2 * 4 * PARAMETERS
    assert together["moved_bytes"] == 4 * PARAMETERS
    assert {(link["from"], link["to"]) for link in together["link_bytes"]} == {
        ("source 0", "source 1"),
        ("source 1", "source 0"),
    }
    assert planned(capsys, "fsdp:ranks=1", "embedded", "--colocate")["link_bytes"] == []


def test_layers_that_do_not_divide_are_shared_out_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(capsys, "megatron:pp=4", "checkpoint")["uneven_stages"] == {"source": [2, 2, 1, 1]}
    assert planned(capsys, "megatron:pp=2,vpp=2", "checkpoint")["uneven_stages"] == {"source": [2, 2, 1, 1]}
    assert planned(capsys, "checkpoint", "megatron:pp=4,pp_layers=1/2/2/1")["uneven_stages"] == {}
    assert planned(capsys, "megatron:pp=3", "checkpoint")["uneven_stages"] == {}
    assert main(["plan", "config.json", "--source", "megatron:pp=4", "--target", "checkpoint"]) == 0
    said = capsys.readouterr().out
    assert "the source's 6 layers do not divide over 4 stages: 2/2/1/1, the first get one more" in said


def test_the_report_reads_as_the_data_does(capsys: pytest.CaptureFixture[str]) -> None:
    report = planned(capsys, "megatron:tp=2,dp=2", "vllm:tp=2", "--link", "0.001")
    words = ["plan", ".", "--source", "megatron:tp=2,dp=2", "--target", "vllm:tp=2", "--link", "0.001"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "LlamaConfig: 6 layers" in said
    assert "source  megatron(tp=2, dp=2), 4 ranks, float32" in said
    assert f"digest     {report['digest']}" in said
    assert f"time       at least {report['least_seconds']:.4g} s at 0.001 GB/s a rank" in said
    assert "dropped" in said
    first = report["link_bytes"][0]
    assert f"{first['from']} -> {first['to']}" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--source", "fspd", "--target", "embedded"], "there is no side 'fspd' (did you mean 'fsdp'?"),
        (
            ["--source", "megatron:tp=3", "--target", "embedded"],
            "megatron: tp=3 does not divide the model's 2 kv heads",
        ),
        (["--source", "fsdp", "--target", "sglang:tp=16"], "query heads of a kv head"),
        (["--source", "fsdp", "--target", "sglang:tp=2,ep=3"], "ep=3 does not divide tp=2"),
        (
            ["--source", "megatron:pp=2,pp_layers=3/2", "--target", "embedded"],
            "adds up to 5 and the model has 6 layers",
        ),
        (["--source", "megatron:pp=8", "--target", "embedded"], "leave one of 8 stages empty"),
        (["--source", "fsdp", "--target", "embedded:replicas=2", "--colocate"], "--colocate puts rank r of the target"),
        (["--source", "fsdp", "--target", "embedded", "--link", "0"], "--link is 0; it must be a number"),
        (["--source", "fsdp", "--target", "embedded", "--dtype", "bf16"], "there is no dtype 'bf16'"),
        (["--source", "fsdp", "--target", "embedded", "--map", "no.py"], "no.py is not a file"),
    ],
)
def test_bad_input_exits_with_2_and_a_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "config.json", *words]) == 2
    output = capsys.readouterr()
    assert said in output.err
    assert "Traceback" not in output.err
    assert output.out == ""


def test_a_model_without_a_map_is_told_how_to_get_one(capsys: pytest.CaptureFixture[str]) -> None:
    Path("config.json").write_text(json.dumps(LLAMA | {"model_type": "granite"}))
    assert main(["plan", ".", "--source", "fsdp", "--target", "embedded"]) == 2
    assert "no weight map claims GraniteConfig" in capsys.readouterr().err


def test_both_sides_must_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", ".", "--source", "fsdp"])
    assert caught.value.code == 2
    assert "--target" in capsys.readouterr().err


def test_help_shows_the_verbs_and_the_sides(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["--help"], ("\n    plan        say how", "\n    new-model   begin the")),
        (["plan", "-h"], ("pp_layers=8/8/7", "vllm likewise")),
    ):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 0
        shown = capsys.readouterr().out
        assert all(text in shown for text in said)
