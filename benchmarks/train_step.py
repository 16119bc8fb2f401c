"""Tokens a second of the FSDP2 trainer's step, as it is and compiled, on one GPU.

    python benchmarks/train_step.py [--micro 16384,32768] [--steps 3] [--profile] [--tiny]

Qwen3-0.6B's shapes with random weights, 32 prompts of 128 tokens with 8 responses of 512 each, padded rows without
padding. Flops are 6 for each weight outside the embedding and each token, and the attention's
(Chowdhery et al. 2022, PaLM, arXiv:2204.02311, appendix B), the head's on response tokens alone.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from megatron_grpo import TINY, write_checkpoint
from record import write_result
from rollout import QWEN3_06B
from sync_work import finish, say

from stretto.config import RunConfig, config_from_dict
from stretto.trainers.fsdp import FSDPTrainer
from stretto.types import Batch, FinishReason, Rollout
from stretto.world import World, join_world, leave_world


def configuration(directory: Path, micro: int, compiled: bool) -> RunConfig:
    """What decides a step."""
    return config_from_dict(
        {
            "model": {"path": str(directory)},
            "data": {"source": "reasoning_gym:chain_sum"},
            "reward": {"functions": ["reasoning_gym"]},
            "trainer": {
                "lr": 1e-6,
                "batching": "padded",
                "micro_batch_tokens": micro,
                "logit_chunk_tokens": 4096,
                "compile": compiled,
            },
        }
    )


def batch_of(shape: dict[str, Any], prompts: int, samples: int, prompt: int, new: int) -> Batch:
    """Random tokens; half of the responses are good."""
    ids = torch.randint(0, shape["vocab_size"], (prompts, prompt + samples * new)).tolist()
    rollouts = [
        Rollout(
            prompt_ids=tuple(row[:prompt]),
            response_ids=tuple(row[prompt + index * new : prompt + (index + 1) * new]),
            logprobs_T=(-12.0,) * new,
            loss_mask_T=(1,) * new,
            temperature=1.0,
            finish_reason=FinishReason.LENGTH,
            version_spans=(),
            group_id=group,
            seed=index,
            source_row=group,
        )
        for group, row in enumerate(ids)
        for index in range(samples)
    ]
    return Batch(rollouts, [1.0, -1.0] * (len(rollouts) // 2))


def flops(shape: dict[str, Any], batch: Batch) -> float:
    """Of forward and backward."""
    width, heads, kv, head = (
        shape[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    layer = width * head * (2 * heads + 2 * kv) + 3 * width * shape["intermediate_size"]
    total = 0.0
    for one in batch.rollouts:
        length = len(one.prompt_ids) + len(one.response_ids)
        total += 6 * shape["num_hidden_layers"] * (layer * length + heads * head * length * length)
        total += 6 * width * shape["vocab_size"] * len(one.response_ids)
    return total


def measure(directory: Path, batch: Batch, micro: int, compiled: bool, steps: int, world: World, profile: bool) -> Any:
    """Seconds of a step after the first two, and the peak of memory."""
    trainer = FSDPTrainer(directory, configuration(directory, micro, compiled), world)
    seconds = []
    for number in range(2 + steps):
        finish(world.device)
        begin = time.perf_counter()
        trainer.step(batch)
        finish(world.device)
        seconds.append(time.perf_counter() - begin)
        say(f"micro {micro}, compiled {compiled}: step {number + 1} {seconds[-1]:.2f} s")
    if profile:
        with torch.profiler.profile() as taken:
            trainer.step(batch)
        print(taken.key_averages().table(sort_by="self_device_time_total", row_limit=25, max_name_column_width=60))
    return {"first_s": seconds[0], "step_s": statistics.median(seconds[2:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro", type=lambda text: [int(one) for one in text.split(",")], default=[16384, 32768])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="shows on a CPU that it runs")
    options = parser.parse_args()
    shape = TINY if options.tiny else QWEN3_06B
    batch = batch_of(shape, 2, 2, 8, 8) if options.tiny else batch_of(shape, 32, 8, 128, 512)
    tokens = sum(len(one.prompt_ids) + len(one.response_ids) for one in batch.rollouts)
    world, found = join_world(600.0), []
    with tempfile.TemporaryDirectory() as scratch:
        write_checkpoint(Path(scratch), shape)
        for micro in [64] if options.tiny else options.micro:
            for compiled in (False, True):
                if world.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                one = measure(Path(scratch), batch, micro, compiled, options.steps, world, options.profile)
                peak = torch.cuda.max_memory_allocated() if world.device.type == "cuda" else 0
                rate = {"tokens_per_s": tokens / one["step_s"], "flops_per_s": flops(shape, batch) / one["step_s"]}
                found.append({"micro_batch_tokens": micro, "compiled": compiled, **one, **rate, "peak_bytes": peak})
                say(str(found[-1]))
                gc.collect()
    leave_world()
    write_result("train_step_tiny" if options.tiny else "train_step", {"tokens": tokens, "cases": found})


if __name__ == "__main__":
    main()
