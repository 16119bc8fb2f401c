"""A GRPO run on Megatron-Core: Qwen3-0.6B's shapes with random weights, tensor parallel over the GPUs of this machine.

    python benchmarks/megatron_grpo.py [--tp 2] [--pp 1] [--steps 10] [--dtype bfloat16] [--tiny]

It shows that such a run works and where its time goes, not that it learns. The task is made of the model's own tokens
(their number is their text), the reward is the share of even numbers, so that rewards differ within a group. `--tiny`
shows on a CPU that it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from record import write_result
from rollout import QWEN3_06B

TINY = QWEN3_06B | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}
REWARD = '''
def even(completion):
    """The share of even numbers among the tokens."""
    import re

    numbers = re.findall(r"[0-9]+", completion)
    return sum(int(number) % 2 == 0 for number in numbers) / max(1, len(numbers))
'''
LIMIT_S = 420


def write_checkpoint(directory: Path, shape: dict[str, Any], *, endless: bool = False) -> None:
    """Random weights, and a tokenizer in which token n is the word tn. Nothing ends the text of an `endless` one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    end = None if endless else shape["vocab_size"] - 1
    config = Qwen3Config(**shape, dtype=torch.bfloat16, bos_token_id=None, eos_token_id=end)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(directory)
    words = {f"t{n}": n for n in range(shape["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    last = f"t{shape['vocab_size'] - 1}"
    special = {"pad_token": last} if endless else {"pad_token": last, "eos_token": last}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(directory)


def write_run(directory: Path, options: argparse.Namespace) -> Path:
    """The run file with its data and its reward."""
    import tomli_w

    rows = [{"prompt": " ".join(f"t{n * k % 400}" for k in range(1, 33))} for n in range(1, 129)]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "reward.py").write_text(REWARD)
    run = {
        "run_dir": str(directory / "out"),
        "steps": options.steps,
        "model": {"path": str(directory / "model"), "max_length": 1024},
        "data": {"source": str(directory / "rows.jsonl")},
        "reward": {"functions": [f"{directory / 'reward.py'}:even"]},
        "rollout": {"prompts_per_step": 16, "samples_per_prompt": 8, "max_new_tokens": 16 if options.tiny else 128},
        "engine": {"dtype": options.dtype},
        "trainer": {
            "backend": "megatron",
            "tp": options.tp,
            "pp": options.pp,
            "dtype": options.dtype,
            "lr": 1e-5,
            "micro_batch_tokens": 16384,
        },
        "checkpoint": {"every": 0},
    }
    path = directory / "run.toml"
    path.write_text(tomli_w.dumps(run))
    return path


def train(run: Path, ranks: int) -> list[dict[str, Any]]:
    """Run it under torchrun; returns the metrics of every step."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "-m", "stretto", "train", str(run)], check=True, timeout=LIMIT_S, env=environment)
    return [json.loads(line) for line in (run.parent / "out" / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        write_checkpoint(directory / "model", TINY if options.tiny else QWEN3_06B)
        lines = [line for line in train(write_run(directory, options), options.tp * options.pp) if line["step"] > 0]
    shown = (
        "reward/mean",
        "train/loss",
        "train/grad_norm",
        "mismatch/kl",
        "time/step",
        "time/rollout",
        "time/train",
        "time/sync",
    )
    steps = [{key: line[key] for key in ("step", *shown) if key in line} for line in lines]
    later = lines[1:] or lines
    result = {
        "settings": vars(options),
        "steps": steps,
        "median_sync_seconds": statistics.median(line["sync/seconds"] for line in later),
        "sync_bytes": later[-1]["sync/bytes"],
        "all_metrics_of_the_last_step": lines[-1],
    }
    print(json.dumps(steps, indent=1))
    print(f"reward {lines[0]['reward/mean']:.3f} -> {lines[-1]['reward/mean']:.3f}")
    if not options.tiny:
        write_result(f"megatron_grpo_tp{options.tp}_pp{options.pp}", result)


if __name__ == "__main__":
    main()
