"""Live runs of the Megatron trainer on two processes, with the embedded engine: the run that the FSDP2 trainer has."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_helpers import (
    alive,
    command_of,
    complete,
    final_weights,
    kill,
    lines,
    metrics,
    start,
    trained_rows,
    wait_until,
    write_run,
)
from safetensors.torch import load
from transformers import AutoModelForCausalLM

import stretto
from stretto.config import load_config
from stretto.models.scaffold.bridges import installed_bridges

pytest.importorskip("megatron.core")

STEPS = 4
TP2, PP2 = {"tp": 2}, {"pp": 2}
Runs = Callable[[dict[str, Any]], Path]


def run_file_of(directory: Path, model: Path, trainer: dict[str, Any]) -> Path:
    return write_run(
        directory,
        model,
        steps=STEPS,
        trainer=trainer,
        eval={"every": 2},
        checkpoint={"every": 1, "keep": 9},
        telemetry={"samples_per_step": 100},
    )


@pytest.fixture(scope="module")
def fsdp_run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of the FSDP2 trainer on one process."""
    return stretto.train(load_config(run_file_of(tmp_path_factory.mktemp("fsdp"), tiny_model, {}))).run_dir


@pytest.fixture(scope="module")
def megatron_run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Directories of runs on two processes that nothing disturbed, by what their trainer has."""
    done: dict[str, Path] = {}

    def run(trainer: dict[str, Any]) -> Path:
        if str(trainer) not in done:
            run_file = run_file_of(tmp_path_factory.mktemp("megatron"), tiny_model, {"backend": "megatron"} | trainer)
            complete("train", run_file, processes=2)
            done[str(trainer)] = run_file.parent / "run"
        return done[str(trainer)]

    return run


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    """The last step's, as they were exported."""
    return load(final_weights(run_dir, STEPS))


def samples(run_dir: Path, step: int) -> dict[int, list[str]]:
    """Responses by row, as far as the first rank saw them."""
    found: dict[int, list[str]] = {}
    for sample in lines(run_dir / "samples.jsonl"):
        if sample["kind"] == "train" and sample["step"] == step:
            found.setdefault(sample["row"], []).append(sample["response"])
    return found


@pytest.mark.parametrize("sizes", [TP2, PP2], ids=str)
def test_a_run_is_that_of_the_fsdp_trainer(fsdp_run: Path, megatron_run: Runs, sizes: dict[str, int]) -> None:
    run_dir = megatron_run(sizes)
    assert trained_rows(run_dir) == trained_rows(fsdp_run)
    ours, theirs = samples(run_dir, 1), samples(fsdp_run, 1)
    assert 2 * len(ours) == len(theirs) == 4
    assert ours.items() <= theirs.items(), "the first batch is the same to the token"
    found, expected = metrics(run_dir), metrics(fsdp_run)
    assert found.keys() == expected.keys() == set(range(STEPS + 1))
    for step, values in expected.items():
        assert found[step].keys() == values.keys()
        for name in values.keys() - {"sync/bytes"}:
            assert found[step][name] == pytest.approx(values[name], abs=1e-4, rel=1e-4), (step, name)
    assert [step for step in expected if "eval/score" in expected[step]] == [0, 2, 4]
    assert max(line["mismatch/logprob_diff_max"] for step, line in found.items() if step) < 1e-4
    # Both replicas' engines are whole copies, which the layers and rows of both ranks fill.
    assert {line["sync/bytes"] for step, line in found.items() if step} == {2 * 4 * parameters(run_dir)}


def parameters(run_dir: Path) -> int:
    return sum(tensor.numel() for tensor in weights(run_dir).values())


@pytest.mark.parametrize("sizes", [TP2, PP2], ids=str)
def test_its_export_loads_in_transformers(
    fsdp_run: Path, megatron_run: Runs, tiny_model: Path, sizes: dict[str, int]
) -> None:
    run_dir = megatron_run(sizes)
    directory = run_dir / "checkpoints" / f"step_{STEPS:08d}" / "hf"
    _, said = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(said[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ours, theirs, first = weights(run_dir), weights(fsdp_run), load((tiny_model / "model.safetensors").read_bytes())
    assert ours.keys() == theirs.keys() == first.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=1e-4)
        assert (tensor - first[name]).abs().max() > 1e-3, "it was trained"


def assert_same_run(run_dir: Path, whole: Path) -> None:
    assert metrics(run_dir) == metrics(whole)
    assert trained_rows(run_dir) == trained_rows(whole)
    assert final_weights(run_dir, STEPS) == final_weights(whole, STEPS)


def test_a_pipeline_goes_on_from_its_checkpoint(megatron_run: Runs, tmp_path: Path) -> None:
    whole, run_dir = megatron_run(PP2), tmp_path / "run"
    shutil.copytree(whole, run_dir)
    for step in range(2, STEPS + 1):
        shutil.rmtree(run_dir / "checkpoints" / f"step_{step:08d}")
    complete("train", "--resume", run_dir, processes=2)
    assert_same_run(run_dir, whole)


def test_a_killed_tensor_parallel_run_goes_on_as_if_it_had_not_been(
    megatron_run: Runs, tiny_model: Path, tmp_path: Path
) -> None:
    whole, run_dir = megatron_run(TP2), tmp_path / "run"
    process = start("train", run_file_of(tmp_path, tiny_model, {"backend": "megatron"} | TP2), processes=2)
    wait_until((run_dir / "checkpoints" / "step_00000001").exists, process)
    below = kill(process, also=lambda pids: [pid for pid in pids if "-m stretto" in command_of(pid)])
    wait_until(lambda: not any(map(alive, below)))
    assert len(lines(run_dir / "metrics.jsonl")) <= STEPS, "it was killed on its way"
    complete("train", "--resume", run_dir, processes=2)
    assert_same_run(run_dir, whole)


@pytest.mark.skipif(installed_bridges() is None, reason="needs Megatron-Bridge")
def test_bridge_names_make_the_run_of_raw_names(megatron_run: Runs) -> None:
    raw, bridge = megatron_run(TP2), megatron_run(TP2 | {"names": "bridge"})
    assert_same_run(bridge, raw)
