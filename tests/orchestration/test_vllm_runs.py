"""Live runs whose engine is a real vLLM server: both trainers, and every step's log-probs against the trainer's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from run_helpers import alive, command_of, complete, descendants, kill, metrics, start, wait_until, write_run

STEPS = 3
TP2 = {"backend": "megatron", "tp": 2}


def run_file(directory: Path, qwen3: Path, vllm: str, trainer: dict[str, Any], sync: dict[str, Any]) -> Path:
    options = {"enforce_eager": True, "gpu_memory_utilization": 0.12}
    return write_run(
        directory,
        qwen3,
        steps=STEPS,
        trainer={"lr": 1e-2} | trainer,
        engine={"backend": "vllm", "python": vllm, "max_sequences": 16, "vllm": options},
        rollout={"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 12, "temperature": 0.7},
        algorithm={},
        eval={},
        data={"source": "rows.jsonl"},
        sync={key: one for key, one in ({"checksums": True, "timeout_s": 60.0} | sync).items() if one is not None},
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("trainer", "processes", "sync"),
    [({}, 1, {}), ({}, 1, {"transport": "collective"}), (TP2, 2, {})],
    ids=["fsdp", "fsdp over gloo", "megatron tp 2"],
)
def test_what_the_server_samples_has_the_log_probs_that_the_trainer_gives_it(
    tmp_path: Path,
    qwen3: Path,
    vllm: str,
    trainer: dict[str, Any],
    processes: int,
    sync: dict[str, Any],
) -> None:
    file = run_file(tmp_path / "run-files", qwen3, vllm, trainer, sync)
    complete("train", file, processes=processes)
    found = metrics(file.parent / "run")
    assert sorted(found) == list(range(STEPS + 1))
    for step in range(1, STEPS + 1):
        assert found[step]["sync/version"] == step
        assert found[step]["mismatch/logprob_diff_max"] < 3e-5, f"step {step}"
    assert found[STEPS]["reward/mean"] != found[1]["reward/mean"], "the weights did change"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", ["disk", "http"])
def test_deltas_through_files_keep_the_log_probs_of_the_server_exact(
    tmp_path: Path, qwen3: Path, vllm: str, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    parcels = tmp_path / "parcels"
    with ExitStack() as stack:
        sync: dict[str, Any] = {"transport": transport, "delta": True, "checksums": None}
        if transport == "http":
            monkeypatch.setenv("STRETTO_RECEIVER_KEY", "of this test")
            sync["receivers"] = [stack.enter_context(receiver(parcels))]
        else:
            sync["directory"] = str(parcels)
        # So low a rate changes only the small weights: the others round to what they were.
        file = run_file(tmp_path / "run-files", qwen3, vllm, {"lr": 1e-9}, sync)
        complete("train", file)
        found = metrics(file.parent / "run")
        for step in range(1, STEPS + 1):
            assert found[step]["mismatch/logprob_diff_max"] < 3e-5, f"step {step}"
            assert found[step]["sync/bytes"] > 0
            assert found[step]["sync/full_bytes"] == found[1]["sync/full_bytes"] > 0
        assert [entry.name for entry in parcels.iterdir() if not entry.name.startswith(".stretto")] == []


@contextmanager
def receiver(directory: Path) -> Iterator[str]:
    """The address of a receiver of parcels."""
    words = [sys.executable, "-m", "stretto.sync.receiver", "--directory", str(directory)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[3]
        process.terminate()


@pytest.mark.timeout(300)
def test_no_server_outlives_a_run_that_is_killed(tmp_path: Path, qwen3: Path, vllm: str) -> None:
    file = run_file(tmp_path / "run-files", qwen3, vllm, {}, {})
    run = start("train", file)
    log = file.parent / "run" / "metrics.jsonl"
    wait_until(lambda: log.exists() and len(log.read_text().splitlines()) > 1, run)
    servers = [pid for pid in descendants(run.pid) if "vllm" in command_of(pid)]
    assert servers, "the server's processes are the run's"
    below = kill(run)
    wait_until(lambda: not any(map(alive, below)))
