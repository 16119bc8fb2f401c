"""Small runs on the tiny model: their files, their processes, and what they leave behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tomli_w

DEADLINE_S = 240.0

STARTED: list[subprocess.Popen[str]] = []
"""Every process that a test started; a failed test leaves some of them running."""

REWARD = '''
def letters(completion):
    """The share of letters among the characters."""
    return sum(c.isalpha() for c in completion) / max(1, len(completion))
'''

ROWS = [{"prompt": f"{a}{b}", "answer": a} for a in "abcdefgh" for b in "xyz"]


def write_run(directory: Path, model: Path, /, **sections: Any) -> Path:
    """A run file in `directory` with its data and its reward beside it; `sections` are laid over the usual ones.

    None leaves a section out.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (directory / "reward.py").write_text(REWARD)
    usual: dict[str, Any] = {
        "run_dir": str(directory / "{name}"),
        "steps": 12,
        "seed": 3,
        "model": {"path": str(model)},
        "data": {"source": "rows.jsonl", "heldout": 4},
        "reward": {"functions": ["reward.py:letters"]},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 6},
        "trainer": {"lr": 1e-3, "schedule": "linear", "warmup_steps": 2, "updates_per_batch": 2},
        "algorithm": {"kl_coef": 0.05},
        "eval": {"every": 5},
        "checkpoint": {"every": 3},
    }
    for name, value in sections.items():
        usual[name] = {**usual.get(name, {}), **value} if isinstance(value, Mapping) else value
    path = directory / "run.toml"
    path.write_text(tomli_w.dumps({name: value for name, value in usual.items() if value is not None}))
    return path


def start(*words: str | Path, processes: int = 1) -> subprocess.Popen[str]:
    """`stretto WORDS` in processes of its own; with several, through torchrun."""
    command = [sys.executable, "-m"]
    if processes > 1:
        command += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    outside = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    process = subprocess.Popen(
        [*command, "stretto", *map(str, words)],
        env=outside | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    STARTED.append(process)
    return process


def complete(*words: str | Path, processes: int = 1) -> str:
    """Run `stretto WORDS` to its end, which must be a good one, and return what it said."""
    with start(*words, processes=processes) as process:
        said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, said
    return said


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    """Poll until `condition` holds; a `process` that ends first, or a deadline, is a failure."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if process is not None and process.poll() is not None:
            raise AssertionError(f"the run ended with {process.returncode} first: {process.communicate()[0]}")
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.003)


def descendants(pid: int) -> list[int]:
    """Process ids below `pid`, as /proc lists them."""
    parents = {int(entry.name): _parent(entry) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    found, fresh = [], [pid]
    while fresh:
        fresh = [child for child, parent in parents.items() if parent in fresh]
        found += fresh
    return found


def kill(process: subprocess.Popen[str], also: Callable[[list[int]], list[int]] = lambda below: []) -> list[int]:
    """SIGKILL the process, and those of its descendants that `also` picks; returns all its descendants."""
    below = descendants(process.pid)
    for pid in (process.pid, *also(below)):
        os.kill(pid, signal.SIGKILL)
    with process:
        process.communicate(timeout=DEADLINE_S)
    return below


def alive(pid: int) -> bool:
    """Whether the process still runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def command_of(pid: int) -> str:
    """The command line of a process."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def _parent(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return -1


def lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics(run_dir: Path) -> dict[int, dict[str, Any]]:
    """What was measured at each step, without what depends on the machine's speed and memory."""
    found: dict[int, dict[str, Any]] = {}
    for line in lines(run_dir / "metrics.jsonl"):
        step = line.pop("step")
        assert step not in found, f"step {step} was logged twice"
        found[step] = {name: value for name, value in line.items() if not _of_the_machine(name)}
    return found


def _of_the_machine(name: str) -> bool:
    return name.startswith(("time/", "memory/")) or name.endswith("per_s") or name == "sync/seconds"


def trained_rows(run_dir: Path) -> dict[int, list[int]]:
    """The rows trained on at each step, sorted."""
    return {line["step"]: sorted(line["trained"]) for line in lines(run_dir / "ledger.jsonl")}


def checkpoints(run_dir: Path) -> list[str]:
    """Everything that lies in `checkpoints/`, by name."""
    return sorted(entry.name for entry in (run_dir / "checkpoints").glob("*"))


def final_weights(run_dir: Path, step: int = 12) -> bytes:
    """The exported weights of a step, as they lie on disk."""
    return (run_dir / "checkpoints" / f"step_{step:08d}" / "hf" / "model.safetensors").read_bytes()


def tokens_of(sample: Mapping[str, Any]) -> int:
    """Response tokens of a record of samples.jsonl: the tiny model has one token a character."""
    return len(sample["response"].replace("<eos>", ".").replace("<unk>", "."))
