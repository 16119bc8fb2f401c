"""What a finished run leaves behind, and what may be done with its directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from run_helpers import final_weights, lines, metrics, write_run
from transformers import AutoModelForCausalLM, AutoTokenizer

import stretto
from stretto.cli import main
from stretto.config import load_config
from stretto.orchestration.rundir import claim
from stretto.world import World

ALWAYS = {
    *("reward/mean", "reward/std", "reward/zero_variance_share", "reward/failed_share", "reward/part/letters"),
    *("rollout/response_length_mean", "rollout/truncated_share", "rollout/tokens_per_s"),
    *("train/loss", "train/entropy", "train/grad_norm", "train/clip_fraction", "train/lr", "train/kl_reference"),
    *("mismatch/kl", "mismatch/logprob_diff_mean", "mismatch/logprob_diff_max", "sync/seconds", "sync/version"),
    *("tokens/generated", "tokens/trained", "tokens/dropped", "tokens/in_flight", "tokens/per_s"),
    *("time/rollout", "time/reward", "time/train", "time/sync", "time/step", "memory/peak_bytes"),
}


def test_every_step_has_the_metrics_that_a_run_must_have(whole_run: Path) -> None:
    records = lines(whole_run / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(13))
    for record in records[1:]:
        assert record.keys() >= ALWAYS
        assert ("eval/score" in record) == (record["step"] in (5, 10, 12))
        phases = [name for name in record if name.startswith("time/") and name != "time/step"]
        assert 0 < sum(record[name] for name in phases) <= record["time/step"]
        assert record["tokens/per_s"] > 0
        assert record["memory/peak_bytes"] > 10**7
    assert "eval/score" in records[0], "the model is evaluated before it is trained"
    assert records[1]["train/kl_reference"] < records[-1]["train/kl_reference"], "the policy left its reference"
    assert max(record["mismatch/logprob_diff_max"] for record in records[1:]) < 1e-5
    assert max(record["train/grad_norm"] for record in records[1:]) > 0.1


def test_a_run_leaves_samples_a_report_and_its_configuration(whole_run: Path) -> None:
    samples = lines(whole_run / "samples.jsonl")
    assert {sample["kind"] for sample in samples} == {"train", "eval"}
    assert {sample["step"] for sample in samples if sample["kind"] == "eval"} == {0, 5, 10, 12}
    report = (whole_run / "report.html").read_text()
    assert "<svg" in report
    assert "://" not in report.replace("http://www.w3.org", ""), "it loads nothing from elsewhere"
    again = load_config(whole_run / "config.toml")
    assert again == load_config(whole_run.parent / "run.toml")


def test_the_best_model_is_remembered(whole_run: Path) -> None:
    scores = {line["step"]: line["eval/score"] for line in lines(whole_run / "metrics.jsonl") if "eval/score" in line}
    best = json.loads((whole_run / "best" / "best.json").read_text())
    assert best["score"] == max(score for step, score in scores.items() if step)
    assert scores[best["step"]] == best["score"]
    assert AutoModelForCausalLM.from_pretrained(whole_run / "best").config.vocab_size == 98


def test_a_run_from_python_is_the_run_of_the_command(tmp_path: Path, tiny_model: Path, whole_run: Path) -> None:
    result = stretto.train(load_config(write_run(tmp_path, tiny_model)))
    assert metrics(result.run_dir) == metrics(whole_run)
    assert final_weights(result.run_dir) == final_weights(whole_run)
    measured = metrics(whole_run)
    assert (result.steps, result.heldout_before) == (12, measured[0]["eval/score"])
    assert (result.heldout_after, result.run_dir) == (measured[12]["eval/score"], tmp_path / "run")


def test_any_kept_checkpoint_is_exported_for_transformers(whole_run: Path, tiny_model: Path, tmp_path: Path) -> None:
    assert main(["export", str(whole_run), str(tmp_path / "last")]) == 0
    assert main(["export", str(whole_run), str(tmp_path / "early"), "--step", "3"]) == 0
    last, early, first = (
        AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path / "last", tmp_path / "early", tiny_model)
    )
    assert (tmp_path / "last" / "model.safetensors").read_bytes() == final_weights(whole_run)
    assert last.dtype == first.dtype
    before, middle, after = (dict(model.named_parameters()) for model in (first, early, last))
    assert before.keys() == after.keys() == middle.keys()
    assert not any(torch.equal(before[name], middle[name]) for name in before)
    assert not any(torch.equal(middle[name], after[name]) for name in before)
    assert AutoTokenizer.from_pretrained(tmp_path / "last")("ab")["input_ids"] == [67, 68]


def test_a_second_run_in_the_same_directory_is_refused(whole_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (whole_run / "metrics.jsonl").read_bytes()
    assert main(["train", str(whole_run.parent / "run.toml")]) == 2
    assert f"already holds a run; continue it with `stretto train --resume {whole_run}`" in capsys.readouterr().err
    assert (whole_run / "metrics.jsonl").read_bytes() == before


def test_a_directory_in_use_cannot_be_resumed(whole_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with claim(whole_run, World(0, 1, torch.device("cpu"))):
        assert main(["train", "--resume", str(whole_run)]) == 2
    assert "is in use by another process" in capsys.readouterr().err


def test_resuming_a_finished_run_changes_nothing(whole_run: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(whole_run, run_dir)
    assert main(["train", "--resume", str(run_dir)]) == 0
    for name in ("metrics.jsonl", "samples.jsonl", "ledger.jsonl", "best/best.json"):
        assert (run_dir / name).read_bytes() == (whole_run / name).read_bytes()


def test_without_checkpoints_between_only_the_last_step_is_kept(tmp_path: Path, tiny_model: Path) -> None:
    run_file = write_run(tmp_path, tiny_model, steps=2, checkpoint={"every": 0}, data={"heldout": 0}, eval=None)
    run_dir = stretto.train(load_config(run_file, ["--telemetry.tensorboard", "true"])).run_dir
    assert [entry.name for entry in (run_dir / "checkpoints").glob("step_*")] == ["step_00000002"]
    assert not (run_dir / "best").exists()
    assert any(run_dir.rglob("events.out.tfevents*"))


def test_only_the_first_rows_are_used_when_so_limited(tmp_path: Path, tiny_model: Path) -> None:
    run_file = write_run(tmp_path, tiny_model, steps=2, data={"heldout": 0, "limit": 4}, eval=None)
    run_dir = stretto.train(load_config(run_file)).run_dir
    assert [sorted(line["trained"]) for line in lines(run_dir / "ledger.jsonl")] == [[0, 1, 2, 3]] * 2
