"""A run that is killed and resumed is the run that was never killed (DESIGN, rules 6, 8 and 9)."""

from __future__ import annotations

import random
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from run_helpers import (
    alive,
    checkpoints,
    command_of,
    complete,
    final_weights,
    kill,
    metrics,
    start,
    trained_rows,
    wait_until,
    write_run,
)


def logged(run_dir: Path) -> int:
    """How many lines of metrics there are."""
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def writes(run_dir: Path) -> set[tuple[str, int]]:
    """The checkpoints that are being written, or were when a kill came: name and inode."""
    found = set()
    for entry in (run_dir / "checkpoints").glob(".writing-*"):
        try:
            found.add((entry.name, entry.stat().st_ino))
        except FileNotFoundError:  # it was renamed meanwhile: complete
            continue
    return found


def kill_inside_a_write(process: subprocess.Popen[str], run_dir: Path, dice: random.Random) -> list[int]:
    """Kill as soon as a checkpoint is being written, or some milliseconds later."""
    before = writes(run_dir)
    wait_until(lambda: bool(writes(run_dir) - before), process)
    time.sleep(dice.uniform(0, 0.01))
    return kill(process)


def kill_between_steps(process: subprocess.Popen[str], run_dir: Path, dice: random.Random) -> list[int]:
    """Kill a moment after the next line of metrics or the one after it."""
    before = (run_dir / "metrics.jsonl").stat().st_ino if logged(run_dir) else None
    # Resuming first cuts the files back to the checkpoint, into new ones.
    wait_until(lambda: logged(run_dir) > 0 and (run_dir / "metrics.jsonl").stat().st_ino != before, process)
    goal = logged(run_dir) + dice.randint(1, 2)
    wait_until(lambda: logged(run_dir) >= goal, process)
    time.sleep(dice.uniform(0, 0.05))
    return kill(process)


def test_a_run_killed_again_and_again_ends_as_one_never_killed(
    tmp_path: Path, tiny_model: Path, whole_run: Path
) -> None:
    dice = random.Random(20)
    run_file, run_dir = write_run(tmp_path, tiny_model), tmp_path / "run"
    torn = 0
    for inside, killing in [(True, kill_inside_a_write), (False, kill_between_steps)] * 2:
        process = start("train", "--resume", run_dir) if run_dir.exists() else start("train", run_file)
        below = killing(process, run_dir, dice)
        torn += inside and bool(writes(run_dir))
        assert below, "the reward worker was there"
        wait_until(lambda below=below: not any(map(alive, below)))
    assert torn, "no kill came inside a write"
    complete("train", "--resume", run_dir)
    assert metrics(run_dir) == metrics(whole_run)
    assert trained_rows(run_dir) == trained_rows(whole_run)
    assert final_weights(run_dir) == final_weights(whole_run)
    for name in ("model.safetensors", "config.json"):
        assert (run_dir / "best" / name).read_bytes() == (whole_run / "best" / name).read_bytes()
    assert checkpoints(run_dir) == ["latest.json", "step_00000012"], "only the newest is kept, and no leftovers"


def assert_same_curve(run_dir: Path, whole_run: Path) -> None:
    """The same prompts at every step, and the same curves but for rounding."""
    assert trained_rows(run_dir) == trained_rows(whole_run)
    found, expected = metrics(run_dir), metrics(whole_run)
    assert found.keys() == expected.keys()
    for step, values in expected.items():
        compared = {name: value for name, value in values.items() if name not in ("sync/bytes", "sync/version")}
        for name, value in compared.items():
            # The single worst token is where rounding shows first.
            bound = 1e-4 if name.endswith(("_max", "_max_deviation")) else 1e-5
            assert found[step][name] == pytest.approx(value, abs=bound, rel=bound), (step, name)


def test_a_run_of_two_processes_goes_on_with_one(tmp_path: Path, tiny_model: Path, whole_run: Path) -> None:
    run_file, run_dir = write_run(tmp_path, tiny_model), tmp_path / "run"
    process = start("train", run_file, processes=2)
    wait_until(lambda: logged(run_dir) > 7, process)
    below = kill(process, also=lambda pids: [pid for pid in pids if "-m stretto" in command_of(pid)])
    wait_until(lambda: not any(map(alive, below)))
    assert 0 < logged(run_dir) < 13, "it was killed on its way"
    complete("train", "--resume", run_dir)
    assert_same_curve(run_dir, whole_run)


def test_a_run_of_one_process_goes_on_with_two(tmp_path: Path, whole_run: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(whole_run, run_dir)
    for step in (6, 9, 12):
        shutil.rmtree(run_dir / "checkpoints" / f"step_{step:08d}")
    complete("train", "--resume", run_dir, processes=2)
    assert_same_curve(run_dir, whole_run)


def test_two_processes_have_the_curve_of_one(tmp_path: Path, tiny_model: Path, whole_run: Path) -> None:
    complete("train", write_run(tmp_path, tiny_model), processes=2)
    assert_same_curve(tmp_path / "run", whole_run)
