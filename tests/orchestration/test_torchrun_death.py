"""No child outlives its parent: torchrun is that of the ranks, a rank that of its reward workers."""

from __future__ import annotations

from pathlib import Path

from run_helpers import alive, kill, start, wait_until, write_run


def test_ranks_and_reward_workers_die_with_torchrun(tiny_model: Path, tmp_path: Path) -> None:
    run_file = write_run(tmp_path, tiny_model, steps=500, run_dir=str(tmp_path / "run"))
    process = start("train", run_file, processes=2)
    wait_until((tmp_path / "run" / "ledger.jsonl").exists, process)  # a step was trained
    below = kill(process)
    assert len(below) >= 4  # two ranks, and at least one reward worker of each
    wait_until(lambda: not any(map(alive, below)))
