"""`stretto check` as a command: where its probe comes from, its ranks, its report and its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from check_cases import write_config

from stretto.cli import main
from stretto.errors import RunError
from stretto.orchestration.check import CheckSettings, Report, check
from stretto.orchestration.check.probe import make_probe

STEPS = ["family", "mapped", "plan", "round trip", "logits", "gradients", "engine", "step and sync", "memory"]


def command(*words: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "stretto", "check", *words],
        capture_output=True,
        text=True,
        timeout=280,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    return done.returncode, done.stdout or done.stderr


def test_a_small_checkpoint_is_checked_whole_with_its_own_weights(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(tiny_model), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert "its own weights" in report["about"]["probe"]
    assert [rung["name"] for rung in report["rungs"]] == STEPS
    assert {rung["status"] for rung in report["rungs"]} == {"pass"}
    assert report["failure"] is None
    assert not torch.distributed.is_initialized()


def test_the_table_says_why_of_every_rung(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tiny_model), "--layers", "2"]) == 0
    said = capsys.readouterr().out
    assert "2 of 3 layers, random weights" in " ".join(said.split())
    for step in STEPS:
        assert step in said


def test_several_ranks_are_started_and_the_first_reports(tmp_path: Path) -> None:
    """Through torchrun, from a configuration alone."""
    model = write_config("llama-tied", tmp_path)
    code, said = command(model, "--trainer", "megatron", "--pp", "2", "--json")
    assert code == 0, said
    report = json.loads(said)
    assert "on 2 cpu ranks" in report["about"]["trainer"]
    assert [rung["status"] for rung in report["rungs"]][:-1] == ["pass"] * 8


def test_a_rank_that_raises_is_the_failure_that_is_reported(tmp_path: Path) -> None:
    """The other one waits for it, and never gets to report a failure itself."""
    settings = CheckSettings(model=write_config("llama-tied", tmp_path), dp=2)
    report = check(settings, worker=(str(Path(__file__).parent / "dying_worker.py"),), deadline_s=240)
    rung = next(one for one in report.rungs if one.outcome.status == "fail")
    assert rung.name == "round trip"
    assert report.failure is not None
    assert "this rank has had enough" in report.failure.evidence
    assert [one.name for one in report.rungs] == STEPS


@pytest.mark.parametrize("end", ["raise RuntimeError('too late')", "os._exit(3)"])
def test_a_rank_that_dies_behind_the_last_rung_is_no_pass(tmp_path: Path, end: str) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import os, sys\n"
        "from pathlib import Path\n"
        "from stretto.orchestration.check import worker\n"
        "from stretto.orchestration.check.ladder import LADDER\n"
        "from stretto.orchestration.check.report import Outcome, Report, Rung\n"
        "def climb(settings, probe, work, world, told):\n"
        "    told(report := Report({}, [Rung(name, Outcome('pass', '')) for name, _ in LADDER]))\n"
        "    world.barrier()\n"
        "    if world.rank == 1:\n"
        f"        {end}\n"
        "    return report\n"
        "worker.climb = climb\n"
        "sys.exit(worker.run(worker.Job.read(Path(sys.argv[1]))))\n"
    )
    settings = CheckSettings(model=write_config("llama-tied", tmp_path), dp=2)
    with pytest.raises(RunError, match="every rung passed and then a rank failed"):
        check(settings, worker=(str(worker),), deadline_s=240)


def test_ranks_that_do_not_end_are_killed(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import os, pathlib, sys, time\n"
        f"(pathlib.Path({str(tmp_path)!r}) / f'{{os.getpid()}}.pid').touch()\n"
        "time.sleep(600)\n"
    )
    settings = CheckSettings(model=write_config("llama-tied", tmp_path), dp=2)
    with pytest.raises(RunError, match=r"did not end within 20 s; check fewer layers \(--layers\)"):
        check(settings, worker=(str(worker),), deadline_s=20)
    pids = [int(file.stem) for file in tmp_path.glob("*.pid")]
    assert pids
    for pid in pids:
        wait_for_end(pid)


def wait_for_end(pid: int, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while Path(f"/proc/{pid}").exists() and "zombie" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.1)


def test_an_unknown_family_needs_a_map_for_megatron_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import Olmo2Config

    Olmo2Config(
        vocab_size=51,
        hidden_size=32,
        intermediate_size=28,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    ).save_pretrained(tmp_path)
    model = str(tmp_path / "config.json")
    assert main(["check", model]) == 0
    assert "every tensor is itself" in " ".join(capsys.readouterr().out.split())
    assert main(["check", model, "--trainer", "megatron", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["rungs"][0]["status"] == "fail"
    assert "stretto new-model" in report["failure"]["evidence"]


def test_files_that_do_not_fit_the_model_are_named(tiny_model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.gate.weight"] = tensors.pop("model.layers.1.mlp.gate_proj.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    report = check(CheckSettings(model=str(tmp_path)))
    assert report.failure is not None
    assert report.failure.parameter == "model.layers.1.mlp.gate_proj.weight"
    assert report.failure.kind == "another name"
    assert "nearest there: model.layers.1.mlp.gate.weight" in report.failure.evidence


BAD: list[tuple[list[str], str]] = [
    (["nowhere/at/all"], "neither a checkpoint directory"),
    (["MODEL", "--tp", "2"], "--tp is for --trainer megatron"),
    (["MODEL", "--sp"], "--sp is for --trainer megatron"),
    (["MODEL", "--names", "bridge"], "--names is for --trainer megatron"),
    (["MODEL", "--trainer", "megatron", "--sp"], "needs --tp above 1"),
    (["MODEL", "--trainer", "megatron", "--vpp", "2"], "vpp needs pp"),
    (["MODEL", "--trainer", "megatron", "--pp", "8"], "8 pipeline stages"),
    (["MODEL", "--trainer", "megatron", "--ep", "3", "--dp", "2"], "do not divide"),
    (["MODEL", "--engine-tp", "2"], "--engine-tp is for sglang and vllm"),
    (["MODEL", "--layers", "9"], "at most the model's 3"),
    (["MODEL", "--map", "nowhere.py"], "--map nowhere.py is not a file"),
    (["MODEL", "--trainer", "megatron", "--names", "bridge", "--map", "m.py"], "Megatron-Bridge has maps of its own"),
]


@pytest.mark.parametrize(("words", "said"), BAD, ids=lambda one: " ".join(one) if isinstance(one, list) else "")
def test_bad_input_is_exit_code_2(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["check", *(str(tiny_model) if word == "MODEL" else word for word in words)]) == 2
    assert said in capsys.readouterr().err


def test_torchrun_around_it_is_refused(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["check", str(tiny_model)]) == 2
    assert "without torchrun" in capsys.readouterr().err


def test_a_probe_has_every_kind_of_layer_and_no_weight_at_its_neutral_value(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoConfig

    write_config("deepseek-v3", tmp_path)
    probe = make_probe(str(tmp_path / "config.json"), tmp_path / "work", dtype="float32", layers=0, stages=1)
    assert AutoConfig.from_pretrained(probe.directory).num_hidden_layers == 2  # one dense, one of experts
    tensors = load_file(probe.directory / "model.safetensors")
    flat = [name for name, one in tensors.items() if one.std() == 0 or not one.isfinite().all()]
    assert not flat
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in tensors


def test_a_probe_that_does_not_fit_into_memory_is_refused(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    LlamaConfig(hidden_size=2**16, intermediate_size=2**18, num_attention_heads=64).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="GB of memory"):
        make_probe(str(tmp_path / "config.json"), tmp_path, dtype="float32", layers=0, stages=1)


def test_a_report_survives_being_written(tiny_model: Path) -> None:
    raw: dict[str, Any] = {
        "passed": False,
        "about": {"model": "m"},
        "rungs": [
            {"name": "a", "seconds": 1.0, "status": "pass", "reason": "r", "measured": 1e-6, "bound": 1e-4},
            {"name": "b", "seconds": 0.0, "status": "fail", "reason": "s", "measured": None, "bound": None},
        ],
        "failure": {"parameter": "p", "kind": "k", "evidence": "e"},
    }
    assert Report.from_dict(raw).to_dict() == raw
