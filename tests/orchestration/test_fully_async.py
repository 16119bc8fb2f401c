"""Fully asynchronous runs on a local Ray cluster, against colocated runs of the same file."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from run_helpers import (
    DEADLINE_S,
    alive,
    command_of,
    complete,
    descendants,
    kill,
    lines,
    start,
    wait_until,
    write_run,
)

from stretto.config import load_config
from stretto.orchestration.ray.cluster import _bundles, _check_room

ASYNC = {"launch": {"backend": "ray"}}


def run(directory: Path, model: Path, /, **sections: Any) -> list[dict[str, Any]]:
    """The metrics of each step of a run."""
    usual: dict[str, Any] = {
        "steps": 5,
        "checkpoint": {"every": 0},
        "eval": {"every": 0},
        "trainer": {"updates_per_batch": 1, "dtype": "float32"},
    }
    file = write_run(directory, model, **{**usual, **sections})
    said = complete("train", file)
    assert "report.html" in said
    return lines(directory / "run" / "metrics.jsonl")


def fully_async(bound: int, **mode: Any) -> dict[str, Any]:
    return ASYNC | {"mode": {"kind": "fully_async", "max_staleness": bound, **mode}}


@pytest.fixture(scope="module")
def colocated(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(tmp_path_factory.mktemp("colocated"), tiny_model)


@pytest.mark.parametrize("trainers", [1, 2])
def test_no_staleness_is_the_colocated_run(
    tmp_path: Path, tiny_model: Path, colocated: list[dict[str, Any]], trainers: int
) -> None:
    found = run(tmp_path, tiny_model, **fully_async(0), placement={"trainers": trainers})
    for ours, theirs in zip(found, colocated, strict=True):
        for name in {"train/loss", "train/grad_norm", "reward/mean", "eval/score"} & theirs.keys():
            assert ours[name] == pytest.approx(theirs[name], abs=1e-6, rel=1e-5), (name, ours["step"])


@pytest.mark.parametrize("bound", [1, 3])
def test_nothing_older_than_the_bound_is_trained(tmp_path: Path, tiny_model: Path, bound: int) -> None:
    found = run(tmp_path, tiny_model, **fully_async(bound), placement={"engines": 2})[1:]
    assert len(found) == 5
    for line in found:
        assert 0 <= line["async/lag_max"] <= bound
        assert sum(line["async/lag_histogram"]) == 16
        generated, trained, dropped = (line[f"tokens/{name}"] for name in ("generated", "trained", "dropped"))
        assert generated == trained + dropped + line["tokens/in_flight"]


def test_the_same_file_runs_colocated_on_ray(tmp_path: Path, tiny_model: Path, colocated: list[dict[str, Any]]) -> None:
    found = run(tmp_path, tiny_model, launch={"backend": "ray"}, placement={"trainers": 2})
    for ours, theirs in zip(found, colocated, strict=True):
        for name in {"train/loss", "reward/mean", "eval/score"} & theirs.keys():
            assert ours[name] == pytest.approx(theirs[name], abs=1e-6, rel=1e-5), (name, ours["step"])


def test_what_the_cluster_cannot_hold_is_refused_with_the_numbers(tmp_path: Path, tiny_model: Path) -> None:
    file = write_run(tmp_path, tiny_model, **fully_async(1), placement={"trainers": 2, "engines": 3})
    config = load_config(file)
    bundles = _bundles(config, gpus=True)
    with pytest.raises(ValueError, match=r"9 CPUs of 8 and 5 GPUs of 4 of the cluster: 6 processes"):
        _check_room(bundles, {"CPU": 8, "GPU": 4}, config)
    _check_room(bundles, {"CPU": 9, "GPU": 5}, config)


@pytest.mark.parametrize(
    ("part", "how", "metric"),
    [
        ("EngineReplica", signal.SIGKILL, "async/replaced"),
        ("EngineReplica", signal.SIGSTOP, "async/replaced"),
        ("RewardWorker", signal.SIGKILL, "async/replaced"),
        ("TrainerRank", signal.SIGKILL, "async/restarts"),
    ],
    ids=["engine killed", "engine stopped", "reward worker killed", "trainer rank killed"],
)
def test_a_part_that_is_gone_is_replaced_as_one_part_and_nothing_is_lost(
    tmp_path: Path, tiny_model: Path, part: str, how: signal.Signals, metric: str
) -> None:
    file = write_run(
        tmp_path,
        tiny_model,
        **fully_async(2, stale="reroll"),
        steps=30,
        data={"heldout": 0},
        placement={"engines": 2, "trainers": 2, "lease_s": 8.0},
        rollout={"max_new_tokens": 40},
        checkpoint={"every": 4},
        eval=None,
        trainer={"updates_per_batch": 1},
        algorithm={"kl_coef": 0.0},
    )
    process = start("train", file)
    run_dir = tmp_path / "run"
    wait_until(lambda: (run_dir / "metrics.jsonl").exists() and len(lines(run_dir / "metrics.jsonl")) > 5, process)
    parts = [pid for pid in descendants(process.pid) if part in command_of(pid)]
    os.kill(parts[-1], how)
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, said
    found = lines(run_dir / "metrics.jsonl")
    assert [line["step"] for line in found] == list(range(31)), said
    assert found[-1][metric] >= 1  # a busy machine may let a lease of another part run out
    assert all(line["async/lag_max"] <= 2 for line in found[1:])
    tokens = {name: found[-1][f"tokens/{name}"] for name in ("generated", "trained", "dropped", "in_flight")}
    assert tokens["generated"] == tokens["trained"] + tokens["dropped"] + tokens["in_flight"]
    # 120 samples of 24 prompts: each five times, but for what was in flight at the end.
    rows = Counter(row for line in lines(run_dir / "ledger.jsonl") for row in line["trained"])
    assert rows.total() == 30 * 4
    assert set(rows.values()) <= {4, 5, 6}
    assert not [pid for pid in parts if alive(pid)]


def test_a_run_whose_controller_is_killed_leaves_nothing_and_goes_on_from_its_checkpoint(
    tmp_path: Path, tiny_model: Path
) -> None:
    file = write_run(
        tmp_path,
        tiny_model,
        **fully_async(1, stale="reroll"),
        steps=16,
        checkpoint={"every": 4},
        eval=None,
        data={"heldout": 0},
    )
    process, run_dir = start("train", file, "--launch", "ray"), tmp_path / "run"
    wait_until(lambda: (run_dir / "checkpoints" / "step_00000008").exists(), process)
    below = kill(process)
    wait_until(lambda: not [pid for pid in below if alive(pid)])
    complete("train", "--resume", run_dir)
    found = lines(run_dir / "metrics.jsonl")
    assert [line["step"] for line in found] == list(range(17))
    tokens = {name: found[-1][f"tokens/{name}"] for name in ("generated", "trained", "dropped", "in_flight")}
    assert tokens["generated"] == tokens["trained"] + tokens["dropped"] + tokens["in_flight"]
    rows = [row for line in lines(run_dir / "ledger.jsonl") for row in line["trained"]]
    assert len(rows) == 16 * 4
    # 64 of 24 prompts an epoch, nothing dropped: had one been lost or trained twice, it would be seen once or 4 times.
    assert set(Counter(rows).values()) == {2, 3}
