"""The switch from training to generation: from the end of the optimizer step to the first token of the next rollout.

    python benchmarks/sync.py [--models 0.6b,4b] [--trainers fsdp,megatron] [--settings resident,pressed]
                              [--engine sglang] [--publications 8] [--tiny [--engine vllm --python PYTHON]]

Random weights of Qwen3's shapes, one GPU that the trainer and the engine's server share. *resident*: everything stays
on the device. *pressed*: the server has a pool of keys and values so large that it has to be given back while the
trainer works, and the optimizer's state has to wait in host memory. Each model and setting runs in a process of its
own, with one server for all trainers. Beside it, from the same run: SGLang's own update by tensors, the device's copy
rate (the switch reads and writes every weight twice: into a bucket, out of it) and the rate of the host link.
`$STRETTO_RESULTS/sync.json` is written after every process and keeps what earlier calls found.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from record import RESULTS, write_result
from sync_work import MODELS, SETTINGS, TRAINERS, Case, measure, say

LIMIT_S = 420


def child(case: Case, options: argparse.Namespace) -> None:
    """One model and setting; every trainer's result is a line."""
    for found in measure(case, options.trainers, options.publications):
        with options.into.open("a") as file:
            file.write(json.dumps(found) + "\n")


def run(case: Case, words: list[str], trainers: list[str], publications: int) -> list[dict[str, Any]]:
    """What a process of its own finds; less when it fails or takes too long."""
    with tempfile.TemporaryDirectory() as scratch:
        into = Path(scratch) / "found"
        command = [sys.executable, __file__, *words, "--into", str(into), "--models", case.model]
        command += ["--settings", case.setting, "--trainers", ",".join(trainers)]
        try:
            subprocess.run([*command, "--publications", str(publications)], timeout=LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            say(f"{case.model}, {case.setting}: ended after {LIMIT_S} s")
        return [json.loads(line) for line in into.read_text().splitlines()] if into.exists() else []


def earlier(name: str) -> list[dict[str, Any]]:
    """What is on record of other cases."""
    file = RESULTS / f"{name}.json"
    return json.loads(file.read_text()).get("cases", []) if file.exists() else []


def key(found: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(found[name] for name in ("model", "setting", "trainer", "engine"))


def names(known: dict[str, Any] | tuple[str, ...]) -> Any:
    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := set(chosen) - set(known):
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(known)}")
        return chosen

    return parse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=names(MODELS), default=["0.6b", "4b"])
    parser.add_argument("--trainers", type=names(TRAINERS), default=list(TRAINERS))
    parser.add_argument("--settings", type=names(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--engine", choices=["sglang", "vllm"], default="sglang")
    parser.add_argument("--publications", type=int, default=8)
    parser.add_argument("--python", help="interpreter of the engine's server")
    parser.add_argument("--tiny", action="store_true", help="shows on a CPU that it runs")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tiny:
        options.models, options.settings = ["tiny"], ["resident"]
    cases = [Case(m, s, options.engine, options.python) for m in options.models for s in options.settings]
    if options.into:
        child(cases[0], options)
        return
    name = "sync_tiny" if options.tiny else "sync"
    words = ["--engine", options.engine, *(["--python", options.python] if options.python else [])]
    on_record = {key(one): one for one in earlier(name)}
    for case in cases:
        for found in run(case, words, options.trainers, options.publications):
            on_record[key(found)] = found
            print(json.dumps(found, indent=1))
        write_result(name, {"cases": list(on_record.values())})


if __name__ == "__main__":
    main()
