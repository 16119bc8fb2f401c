"""Why the addition run used to sag after it had learned: the same run under different learning-rate rules.

    python benchmarks/late_sag.py [--seeds 0 1] [--steps 80] [--variants ...]

Each variant is examples/addition/run.toml with a few keys changed, evaluated every 10 steps on 200 held-out prompts.
Reported: the best and the last held-out score, and the drop between them. Runs in float32 on whatever device there is.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from record import write_result

RUN = Path(__file__).parents[1] / "examples" / "addition" / "run.toml"
CONSTANT = ["--trainer.schedule", "constant"]
VARIANTS = {
    "as shipped": [],
    "constant lr 1e-5": CONSTANT,
    "constant lr 2e-5": [*CONSTANT, "--trainer.lr", "2e-5"],
    "constant lr 2e-5, 8 prompts": [*CONSTANT, "--trainer.lr", "2e-5", "--rollout.prompts_per_step", "8"],
    "constant lr 2e-5, 8 prompts, no std": [
        *(*CONSTANT, "--trainer.lr", "2e-5", "--rollout.prompts_per_step", "8"),
        *("--algorithm.advantage", "grpo_no_std"),
    ],
}


def curve(variant: str, seed: int, steps: int) -> dict[str, Any]:
    """Held-out score by step, and the share of groups with signal, of one run."""
    with tempfile.TemporaryDirectory() as scratch:
        words = ["--run_dir", f"{scratch}/run", "--seed", str(seed), "--steps", str(steps), "--eval.every", "10"]
        words += ["--trainer.dtype", "float32", "--engine.dtype", "float32"]
        command = [sys.executable, "-m", "stretto", "train", str(RUN), *words, *VARIANTS[variant]]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=3600)
        lines = [json.loads(line) for line in (Path(scratch) / "run" / "metrics.jsonl").read_text().splitlines()]
    scores = {line["step"]: line["eval/score"] for line in lines if "eval/score" in line}
    best = max(scores.values())
    return {
        "variant": variant,
        "seed": seed,
        "held_out": scores,
        "best": best,
        "last": scores[steps],
        "sag": best - scores[steps],
        "reward": [line.get("reward/mean") for line in lines[1:]],
        "zero_variance_share": [line.get("reward/zero_variance_share") for line in lines[1:]],
        "seconds_per_step": sum(line["time/step"] for line in lines[1:]) / steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    args = parser.parse_args()
    runs = []
    for variant in args.variants:
        for seed in args.seeds:
            runs.append(curve(variant, seed, args.steps))
            one = runs[-1]
            print(
                f"{variant:<38} seed {seed}  best {one['best']:.3f}  last {one['last']:.3f}  sag {one['sag']:+.3f}",
                flush=True,
            )
            write_result("late_sag", {"steps": args.steps, "runs": runs})


if __name__ == "__main__":
    main()
