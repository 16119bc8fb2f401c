"""Seconds of one GRPO step: Stretto, inline as `stretto train` runs it, against TRL's GRPOTrainer on the same work.

    python benchmarks/step_vs_trl.py [--steps 6] [--rounds 2] [--threads 2] [--workloads short long] [--tiny]

Both sides have the same checkpoint (smollm2, fp32), prompts in the same order, samples a prompt and response lengths:
the end-of-sequence token is one that is practically never drawn. TRL runs at its fastest settings on CPU. Each side
runs in a process of its own, in turns (Stretto, TRL, TRL, Stretto, ...). A step is timed from the end of the one before
it, everything included; the first two steps of every process are not counted. `--tiny` is to see that it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

WARM_UP = 2
SIDES = ("stretto", "trl")
EXAMPLE = Path(__file__).parents[1] / "examples" / "addition"
# A special token of SmolLM2 that stands in for the end of a text, so that neither side ends a response early.
NEVER_DRAWN = "<file_sep>"


@dataclass(frozen=True)
class Workload:
    """One step: `prompts` x `samples` responses of `new` tokens; a prompt shows `lines` solved additions first."""

    prompts: int
    samples: int
    new: int
    lines: int


WORKLOADS = {"short": Workload(16, 8, 5, 1), "long": Workload(4, 8, 64, 5)}


def odd_digits(completions: list[str], **columns: Any) -> list[float]:
    """The share of odd digits, which differs within nearly every group. Both sides take TRL's signature."""
    return [sum(c in "13579" for c in text) / max(1, len(text)) for text in completions]


def rows(lines: int) -> list[dict[str, str]]:
    """The prompts of the addition example, each with the solved prompts that come after it in front."""
    plain = [json.loads(line) for line in (EXAMPLE / "addition.jsonl").read_text().splitlines()]
    solved = [f"{row['prompt'].splitlines()[-1]} {row['answer']}\n" for row in plain]
    more = ["".join(solved[(at + k) % len(solved)] for k in range(1, lines)) for at in range(len(plain))]
    return [
        {"prompt": before + row["prompt"], "answer": row["answer"]} for before, row in zip(more, plain, strict=True)
    ]


def make_endless(source: Path, target: Path) -> None:
    """A copy of the checkpoint whose end-of-sequence token is NEVER_DRAWN."""
    shutil.copytree(source, target)
    from transformers import AutoTokenizer

    token = AutoTokenizer.from_pretrained(source).convert_tokens_to_ids(NEVER_DRAWN)
    changes = {"config.json": token, "generation_config.json": token, "tokenizer_config.json": NEVER_DRAWN}
    for name, value in changes.items():
        settings = json.loads((target / name).read_text())
        settings["eos_token" if name.startswith("tokenizer") else "eos_token_id"] = value
        (target / name).write_text(json.dumps(settings))


def run_stretto(work: Workload, model: Path, scratch: Path, steps: int) -> dict[str, Any]:
    """Seconds of each step, mean response length, and the share of samples that needed a backward pass."""
    import stretto
    from stretto.config import config_from_dict

    (scratch / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(work.lines)))
    raw = {
        "run_dir": str(scratch / "run"),
        "steps": WARM_UP + steps,
        "model": {"path": str(model)},
        "data": {"source": str(scratch / "rows.jsonl"), "shuffle": False},
        "reward": {"functions": [f"{Path(__file__).resolve()}:odd_digits"]},
        "rollout": {
            "prompts_per_step": work.prompts,
            "samples_per_prompt": work.samples,
            "max_new_tokens": work.new,
        },
        "trainer": {"lr": 1e-6},
        "checkpoint": {"every": 0},
    }
    stretto.train(config_from_dict(raw))
    lines = [json.loads(line) for line in (scratch / "run" / "metrics.jsonl").read_text().splitlines()]
    counted = [line for line in lines if line["step"] > WARM_UP]
    return {
        "seconds": [line["time/step"] for line in counted],
        "phases": {
            phase: statistics.median(line.get(f"time/{phase}", 0.0) for line in counted)
            for phase in ("rollout", "reward", "train", "sync")
        },
        "response_length": statistics.mean(line["rollout/response_length_mean"] for line in counted),
        "active_share": statistics.mean(line["train/active_share"] for line in counted),
    }


def run_trl(work: Workload, model: Path, scratch: Path, steps: int) -> dict[str, Any]:
    """Seconds of each step and mean response length."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.trainer.grpo_trainer import GRPOTrainer

    lengths: list[int] = []

    def reward(completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
        lengths.extend(map(len, completion_ids))
        return list(odd_digits(completions))

    settings = grpo_settings(scratch, prompts=work.prompts, samples=work.samples, new=work.new, steps=WARM_UP + steps)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list(rows(work.lines)),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
    )
    ends = _step_ends(trainer)
    trainer.train()
    seconds = [after - before for before, after in pairwise(ends)]
    return {"seconds": seconds[WARM_UP - 1 :], "response_length": statistics.mean(lengths)}


def grpo_settings(
    scratch: Path, *, prompts: int, samples: int, new: int, steps: int, rows: int | None = None, on_gpu: bool = False
) -> Any:
    """TRL's settings for a step as Stretto makes it, in passes of `rows` responses (all when None)."""
    from trl.trainer.grpo_config import GRPOConfig

    responses = prompts * samples
    rows = min(rows or responses, responses)
    return GRPOConfig(
        output_dir=str(scratch / "trl"),
        use_cpu=not on_gpu,
        bf16=on_gpu,
        gradient_checkpointing=False,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=responses // rows,
        num_generations=samples,
        max_completion_length=new,
        num_iterations=1,
        beta=0.0,
        temperature=1.0,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        shuffle_dataset=False,
        max_steps=steps,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def _step_ends(trainer: Any) -> list[float]:
    """The times at which the trainer's steps end, filled as it goes."""
    from transformers import TrainerCallback

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    trainer.add_callback(Clock())
    return ends


def measure(side: str, name: str, model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run one side in a process of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "result.json"
        command = [sys.executable, __file__, "--side", side, "--workloads", name, "--model", str(model)]
        command += ["--steps", str(args.steps), "--scratch", scratch, *(["--tiny"] if args.tiny else [])]
        environment = os.environ | {"OMP_NUM_THREADS": str(args.threads), "TOKENIZERS_PARALLELISM": "false"}
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
        return json.loads(out.read_text())


def compare(name: str, model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Both sides in turns: medians over all their steps, and how many times as fast Stretto's are."""
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for turn in range(args.rounds):
        for side in SIDES if turn % 2 == 0 else reversed(SIDES):
            found[side].append(measure(side, name, model, args))
            print(f"{name} {side}: {[round(s, 2) for s in found[side][-1]['seconds']]} s a step", flush=True)
    work = workload(name, args.tiny)
    for side, parts in found.items():
        if any(part["response_length"] != work.new for part in parts):
            raise SystemExit(f"{side} ended responses before {work.new} tokens: the sides did not do the same work")
    medians = {side: statistics.median(s for part in parts for s in part["seconds"]) for side, parts in found.items()}
    return {
        "workload": asdict(work),
        "median_seconds": medians,
        "ratio_trl_to_stretto": medians["trl"] / medians["stretto"],
        "runs": found,
    }


def workload(name: str, tiny: bool) -> Workload:
    """The workload, cut down to a few tokens when it only has to run."""
    return replace(WORKLOADS[name], prompts=2, samples=2, new=3) if tiny else WORKLOADS[name]


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; `--side` and `--scratch` are for the processes that this one starts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="steps counted in each process")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each side")
    parser.add_argument("--threads", type=int, default=2, help="OpenMP threads of each process")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--model", default="smollm2", help="a checkpoint with SmolLM2's tokenizer")
    parser.add_argument("--tiny", action="store_true", help="a few tokens, nothing written")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main() -> None:
    """Compare on every workload and keep the result; with `--side`, be one of the processes."""
    args = parse()
    if args.side is not None:
        run = run_stretto if args.side == "stretto" else run_trl
        result = run(workload(args.workloads[0], args.tiny), Path(args.model), args.scratch, args.steps)
        (args.scratch / "result.json").write_text(json.dumps(result))
        return
    from record import write_result

    from stretto.models.checkpoint import resolve

    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        make_endless(resolve(args.model), model)
        results = {name: compare(name, model, args) for name in args.workloads}
    for name, result in results.items():
        print(f"{name}: {result['median_seconds']}, TRL / Stretto = {result['ratio_trl_to_stretto']:.2f}")
    if not args.tiny:
        print(write_result("step_vs_trl", {"threads": args.threads, "workloads": results}))


if __name__ == "__main__":
    main()
