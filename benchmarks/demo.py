"""The demo for several seeds: what it learned, how long that took, and whether transformers agrees.

    python benchmarks/demo.py [--seeds 0 1 2] [--out runs/demo] [--reuse RUN_DIR ...]

Each seed is one `stretto train examples/addition/run.toml`. The final checkpoint is then exported, and its answers to
the held-out prompts are generated greedily by transformers alone, without Stretto's engine. Writes results/demo.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from record import write_result

from stretto.config import RunConfig, load_config
from stretto.data import load_prompts
from stretto.models.checkpoint import load_tokenizer
from stretto.orchestration.export import export
from stretto.rewards.resolve import resolve
from stretto.types import Prompt

RUN_FILE = Path(__file__).parents[1] / "examples" / "addition" / "run.toml"
BATCH = 50


def train(seed: int, out: Path) -> Path:
    """Run the demo with `seed`; returns its directory, which must not hold a run yet."""
    run_dir = out / f"seed-{seed}"
    command = [sys.executable, "-m", "stretto", "train", str(RUN_FILE), "--seed", str(seed), "--run_dir", str(run_dir)]
    subprocess.run(command, check=True)
    return run_dir


def read_run(run_dir: Path) -> dict[str, Any]:
    """What the run itself says: held-out scores, seconds and curves."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["step"] > 0]
    scores = [(line["step"], line["eval/score"]) for line in lines if "eval/score" in line]
    phases = ("rollout", "reward", "train", "sync", "eval", "checkpoint")
    return {
        "steps": max(line["step"] for line in lines),
        "held_out_before": scores[0][1],
        "held_out_after": scores[-1][1],
        "training_seconds": sum(line["time/step"] for line in steps),
        "seconds_by_phase": {name: sum(line.get(f"time/{name}", 0.0) for line in steps) for name in phases},
        "peak_memory_gib": max(line.get("memory/peak_bytes", 0) for line in steps) / 2**30,
        "curves": {
            "reward/mean": [(line["step"], line["reward/mean"]) for line in steps if "reward/mean" in line],
            "eval/score": scores,
        },
    }


def score_with_transformers(run_dir: Path) -> float:
    """Mean reward of transformers' greedy answers to the held-out prompts, with the exported final checkpoint."""
    config = load_config(run_dir / "config.toml")
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        export(run_dir, model)
        tokenizer = load_tokenizer(model)
        prompts = load_prompts(config, tokenizer).heldout
        answers = generate(model, tokenizer, prompts, config)
    reward = resolve(config.reward.functions[0])
    columns = {name: [prompt.fields[name] for prompt in prompts] for name in prompts[0].fields}
    scores = reward(prompts=[prompt.text for prompt in prompts], completions=answers, **columns)
    return sum(scores) / len(scores)


def generate(directory: Path, tokenizer: Any, prompts: Sequence[Prompt], config: RunConfig) -> list[str]:
    """Greedy answers, in batches that are padded on the left."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    answers: list[str] = []
    for start in range(0, len(prompts), BATCH):
        texts = [prompt.text for prompt in prompts[start : start + BATCH]]
        inputs = tokenizer(texts, return_tensors="pt", padding=True)
        with torch.inference_mode():
            ids = model.generate(
                **inputs,
                do_sample=False,
                max_new_tokens=config.rollout.max_new_tokens,
                pad_token_id=tokenizer.pad_token_id,
            )
        new = ids[:, inputs["input_ids"].shape[1] :]
        answers += tokenizer.batch_decode(new, skip_special_tokens=True)
    return answers


def main() -> None:
    """Train (or reuse) every run, evaluate it, and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="where the runs go")
    parser.add_argument("--reuse", type=Path, nargs="+", metavar="RUN_DIR", help="evaluate these runs; train nothing")
    args = parser.parse_args()
    runs: dict[str, Any] = {}
    for run_dir in args.reuse or (train(seed, args.out) for seed in args.seeds):
        seed = load_config(run_dir / "config.toml").seed
        result = read_run(run_dir) | {"held_out_after_transformers": score_with_transformers(run_dir)}
        runs[str(seed)] = result
        shown = {name: round(value, 4) for name, value in result.items() if isinstance(value, float)}
        print(f"seed {seed}: {shown}", flush=True)
    print(write_result("demo", {"run_file": str(RUN_FILE.relative_to(RUN_FILE.parents[2])), "seeds": runs}))


if __name__ == "__main__":
    main()
