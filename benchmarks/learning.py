"""Does it learn the same whatever trains and generates? One GRPO run of SmolLM2-135M for each pair, and seed noise.

    python benchmarks/learning.py [--model smollm2] [--runs NAME ...] [--steps 100] [--tiny]

The task is reasoning_gym's chain_sum with two terms of one or two digits, as two worked examples and an open line
(`15 - 43 = -28`, `4 - 1 = 3`, `23 - 60 =`). SmolLM2 begins with a mean reward of about 0.35; with two digits
throughout, or with three terms, it would be 0.05, with one digit 0.7, and as a chat next to nothing.

Every run has the same configuration, prompts and seed but for one with another seed, which says how far two equal
runs are apart. The server is SGLang's, one for all of them; *delta* publishes through files, only what changed. Every
tenth publication is compared with the trainer's weights and log-probs; each tensor of a delta has a digest.
`$STRETTO_RESULTS/learning.json` is written after every run, and keeps those of earlier calls with `--runs`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from learning_curves import compare, read_curves
from record import earlier_result, write_result
from sync_work import SERVER, say

import stretto
from stretto.config import config_from_dict
from stretto.data.procedural import read_procedural
from stretto.engines.server import ServerEngine
from stretto.models.checkpoint import resolve
from stretto.orchestration.engines import open_engine
from stretto.orchestration.model import Model
from stretto.world import join_world, leave_world

TASK = "reasoning_gym:chain_sum"
ARGUMENTS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
EXAMPLES = 2
SERVERS: dict[str, dict[str, Any]] = {
    "sglang": SERVER["sglang"]
    | {"cuda_graph_max_bs_decode": 128, "mem_fraction_static": 0.3, "disable_prefill_cuda_graph": True},
    "vllm": SERVER["vllm"],
}
REFERENCE, OTHER_SEED = "fsdp+embedded", "fsdp+embedded, other seed"
RUNS: dict[str, dict[str, Any]] = {
    REFERENCE: {},
    "fsdp+server": {"served": True},
    "megatron+server": {"served": True, "trainer": {"backend": "megatron"}},
    "fsdp+server, delta": {"served": True, "delta": True},
    OTHER_SEED: {"seed": 1},
}


def rows(count: int) -> list[dict[str, Any]]:
    """`count` rows as reasoning_gym makes them, their question cut down to the sum, after worked examples."""
    made = read_procedural(TASK, {**ARGUMENTS, "size": EXAMPLES + count}, seed=0)
    for row in made:
        row["prompt"] = row["prompt"].rpartition(": ")[2]
    head = "".join(f"{row['prompt']} {row['answer']}\n" for row in made[:EXAMPLES])
    return [row | {"prompt": head + row["prompt"]} for row in made[EXAMPLES:]]


def configuration(name: str, options: argparse.Namespace, scratch: Path, url: str | None) -> dict[str, Any]:
    """The run `name`, as stretto.config takes it; the server, if it has one, is at `url`."""
    special = RUNS[name]
    served = {"backend": options.engine, "url": url} if special.get("served") else {}
    files = {"transport": "disk", "directory": str(scratch / "parcels"), "delta": True} if special.get("delta") else {}
    return {
        "run_dir": str(scratch / "run"),
        "steps": options.steps,
        "seed": special.get("seed", 0),
        "model": {"path": str(options.model), "max_length": 256},
        "data": {"source": str(scratch / "rows.jsonl"), "heldout": 2 if options.tiny else 200},
        "reward": {"functions": ["reasoning_gym"]},
        "rollout": {
            "prompts_per_step": 2 if options.tiny else 16,
            "samples_per_prompt": 4 if options.tiny else 8,
            "max_new_tokens": 12,
            "stop": ["\n"],
        },
        "engine": {"max_sequences": 128, **served},
        "sync": {"verify_every": 10, **files},
        "trainer": {"lr": 1e-5, "schedule": "linear", "warmup_steps": 5, **special.get("trainer", {})},
        "checkpoint": {"every": 0},
    }


@contextmanager
def server(options: argparse.Namespace) -> Iterator[str]:
    """The address of a server that every run can adopt."""
    world = join_world(600.0)
    with ExitStack() as stack, tempfile.TemporaryDirectory() as scratch:
        stack.callback(leave_world)
        (Path(scratch) / "rows.jsonl").write_text("")
        raw = configuration(REFERENCE, options, Path(scratch), None)
        python = {"python": options.python} if options.python else {}
        raw["engine"] |= {"backend": options.engine, options.engine: SERVERS[options.engine], **python}
        config = config_from_dict(raw)
        engine = open_engine(config, world, Model.load(config), stack)
        assert isinstance(engine, ServerEngine)
        say("the server serves")
        yield engine.base_url


def run(name: str, options: argparse.Namespace, url: str | None) -> dict[str, Any]:
    """Train in a process of its own; returns the curves. CalledProcessError when the run fails."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "rows.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows(40 if options.tiny else 2000))
        )
        settings = folder / "run.json"
        settings.write_text(json.dumps(configuration(name, options, folder, url)))
        command = [sys.executable, __file__, "--train", str(settings)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=options.limit_s)
        return read_curves(folder / "run" / "metrics.jsonl")


def train(settings: Path) -> None:
    """What the process of a run does."""
    stretto.train(config_from_dict(json.loads(settings.read_text())))


def parse() -> argparse.Namespace:
    """The options; `--train` is for the processes that this one starts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="SmolLM2-135M-Instruct: a directory, or the pip package's")
    parser.add_argument("--runs", nargs="+", choices=list(RUNS))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--limit-s", type=float, default=400.0, help="seconds that one run may take")
    parser.add_argument("--engine", choices=list(SERVERS), default="sglang")
    parser.add_argument("--python", help="interpreter of the engine's server")
    parser.add_argument("--tiny", action="store_true", help="a few steps, on a CPU")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tiny:
        options.runs, options.steps = options.runs or [REFERENCE, OTHER_SEED], 2
    options.runs = options.runs or list(RUNS)
    return options


def main() -> int:
    """Every run, one after the other; one that fails does not keep the others from running."""
    options = parse()
    if options.train:
        train(options.train)
        return 0
    options.model = resolve(options.model)
    result = "learning_tiny" if options.tiny else "learning"
    settings = {"task": TASK, "arguments": ARGUMENTS, "examples": EXAMPLES, "steps": options.steps}
    runs = earlier_result(result, settings).get("runs", {})
    failed: dict[str, str] = {}
    with ExitStack() as stack:
        served = any(RUNS[name].get("served") for name in options.runs)
        url = stack.enter_context(server(options)) if served else None
        for name in options.runs:
            runs.pop(name, None)
            say(f"{name}: begins")
            try:
                runs[name] = run(name, options, url)
                say(f"{name}: reward {runs[name]['reward'][0]} -> {runs[name]['reward'][-1]}")
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                failed[name] = str(error)
                say(f"{name}: {error}")
            found = {"settings": settings, "comparison": compare(runs, REFERENCE, OTHER_SEED), "runs": runs}
            write_result(result, found | ({"failed": failed} if failed else {}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
