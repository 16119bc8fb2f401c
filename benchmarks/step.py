"""Seconds of one GRPO step on one GPU: Stretto with a server and embedded, TRL's GRPOTrainer, and the server alone.

    python benchmarks/step.py [--only sglang,bare,trl,embedded] [--steps 3] [--tiny [--engine vllm --python PYTHON]]

Random weights of Qwen3-0.6B's shapes, 32 prompts of 128 tokens, 8 samples of 512 tokens each, which nothing ends
early. Each system runs in a process of its own, but for the bare requests: they go to the very server that Stretto
adopts, before it does and after. TRL runs with whichever of transformers' caches is faster.
`$STRETTO_RESULTS/step.json` is written after every system, and keeps what an earlier call with `--only` found.
`--tiny` shows on a CPU that it runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from record import earlier_result, write_result
from step_work import MODEL, Work, work_of, write_model
from sync_work import say

ORDER = ("server", "trl", "embedded")


def child(options: argparse.Namespace, work: Work) -> None:
    """Be one of the processes: make the checkpoint, or measure; every result is a file in `scratch`."""

    def keep(name: str, result: dict[str, Any]) -> None:
        aside = options.scratch / f"{name}.part"
        aside.write_text(json.dumps(result))
        aside.rename(options.scratch / f"{name}.result")

    if options.process == "checkpoint":
        write_model(options.scratch / MODEL, options.tiny)
    elif options.process == "server":
        from step_stretto import run_server

        run_server(work, options.scratch, options.engine, options.python, options.only, keep)
    elif options.process == "embedded":
        from step_stretto import run_embedded

        keep("embedded", run_embedded(work, options.scratch))
    else:
        from step_trl import run_trl

        keep("trl", run_trl(work, options.scratch))


class Measurement:
    """What was found so far, and the processes that find it."""

    def __init__(self, options: argparse.Namespace, work: Work, words: Sequence[str], scratch: Path):
        self._options, self._words, self._scratch = options, words, scratch
        self._name = "step_tiny" if options.tiny else "step"
        self._settings = asdict(work) | {"model": "tiny" if options.tiny else "qwen3-0.6b shapes"}
        earlier = earlier_result(self._name, self._settings).get("systems", {})
        self._systems: dict[str, Any] = {name: one for name, one in earlier.items() if name not in options.only}
        self._failed: dict[str, str] = {}
        self._end = time.monotonic() + options.limit_s

    def run(self, process: str) -> bool:
        """Run one of the processes to its end; keeps each result as it comes. Returns whether it went well."""
        command = [sys.executable, __file__, *self._words, "--process", process, "--scratch", str(self._scratch)]
        say(f"{process}: begins")
        running = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while running.poll() is None:
            try:
                running.wait(1.0)
            except subprocess.TimeoutExpired:
                if time.monotonic() > self._end:
                    running.kill()
            self._collect()
        self._collect()
        if running.returncode:
            self._failed[process] = f"ended with exit code {running.returncode}"
        say(f"{process}: {self._failed.get(process, 'done')}")
        self._write()
        return not running.returncode

    def _collect(self) -> None:
        found = {file.stem: file for file in self._scratch.glob("*.result") if file.stem not in self._systems}
        for name, file in found.items():
            self._systems[name] = json.loads(file.read_text())
            say(f"{name}: {self._systems[name]['seconds']}")
        if found:
            self._write()

    def _write(self) -> None:
        found = {
            "settings": self._settings,
            "systems": self._systems,
            "ratios": ratios(self._systems, self._options.engine),
        }
        write_result(self._name, found | ({"failed": self._failed} if self._failed else {}))


def ratios(systems: dict[str, Any], engine: str) -> dict[str, float]:
    """Those that the systems measured so far allow."""
    found = {}
    if {engine, "bare"} <= systems.keys():
        found["rollout_vs_bare"] = systems["bare"]["seconds"]["rollout"] / systems[engine]["seconds"]["rollout"]
    for name in {engine, "embedded"} & systems.keys() if "trl" in systems else ():
        key = "step_vs_trl" if name == engine else f"step_vs_trl_{name}"
        found[key] = systems["trl"]["seconds"]["step"] / systems[name]["seconds"]["step"]
    return {name: round(value, 3) for name, value in found.items()}


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The options; `--process` and `--scratch` are for the processes that this one starts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), help="systems to measure, with commas between")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each system")
    parser.add_argument("--limit-s", type=float, default=560.0, help="seconds after which what runs is ended")
    parser.add_argument("--engine", choices=["sglang", "vllm"], default="sglang")
    parser.add_argument("--python", help="interpreter of the engine's server")
    parser.add_argument("--tiny", action="store_true", help="shows on a CPU that it runs")
    parser.add_argument("--process", choices=["checkpoint", *ORDER], help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    systems = (options.engine, "bare", "trl", "embedded")
    options.only = options.only or systems
    if unknown := set(options.only) - set(systems):
        parser.error(f"--only knows {', '.join(systems)}, not {', '.join(sorted(unknown))}")
    return options


def main() -> int:
    words = sys.argv[1:]
    options = parse(words)
    work = work_of(options.tiny, options.steps)
    if options.process:
        child(options, work)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        measurement = Measurement(options, work, words, Path(scratch))
        if not measurement.run("checkpoint"):
            return 1
        needed = {"server" if name in (options.engine, "bare") else name for name in options.only}
        went_well = [measurement.run(process) for process in ORDER if process in needed]
    return 0 if all(went_well) else 1


if __name__ == "__main__":
    sys.exit(main())
