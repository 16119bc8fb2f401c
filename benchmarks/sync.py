"""The switch from training to generation: from the end of the optimizer step to the first token of the next rollout.

    python benchmarks/sync.py [--model 0.6b] [--trainer fsdp] [--engine sglang] [--publications 10] [--tiny]

Random weights of Qwen3's shapes, one GPU that the trainer and the engine's server share, everything resident. After the
last publication the engine's log-probs are compared with the trainer's, and the copy rate of the device is taken, of
which the switch has to read and write every weight twice (into a bucket, out of it).
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from megatron_grpo import TINY, write_checkpoint
from record import write_result
from rollout import QWEN3_06B

from stretto.config import RunConfig, config_from_dict
from stretto.engines import RolloutEngine
from stretto.orchestration.engines import connect, open_engine
from stretto.orchestration.model import Model
from stretto.orchestration.training import open_trainer
from stretto.sync.publication import Publisher
from stretto.trainers import Trainer
from stretto.types import Batch, Completion, Request, Rollout, Sampling, Version
from stretto.world import join_world, leave_world

QWEN3_4B = QWEN3_06B | {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
}
SHAPES = {"0.6b": QWEN3_06B, "4b": QWEN3_4B, "tiny": TINY | {"head_dim": 32}}
SERVER: dict[str, dict[str, Any]] = {
    "sglang": {
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "mem_fraction_static": 0.4,
        "cuda_graph_max_bs_decode": 8,
        "disable_prefill_cuda_graph": True,
    },
    "vllm": {"enforce_eager": True, "gpu_memory_utilization": 0.3},
}
PROMPT = tuple(range(5, 37))
BEGIN = time.monotonic()


def say(text: str) -> None:
    """What a run that is cut short leaves behind."""
    print(f"{time.monotonic() - BEGIN:7.1f} s  {text}", file=sys.stderr, flush=True)


def configuration(options: argparse.Namespace, directory: Path) -> RunConfig:
    """A run of one process."""
    return config_from_dict(
        {
            "model": {"path": str(directory), "max_length": 512},
            "data": {"source": "reasoning_gym:chain_sum"},
            "reward": {"functions": ["reasoning_gym"]},
            "rollout": {"temperature": 0.7},
            "engine": {
                "backend": options.engine,
                "max_sequences": 64,
                options.engine: SERVER[options.engine],
                **({"python": options.python} if options.python else {}),
            },
            "trainer": {"backend": options.trainer, "lr": 1e-5, "dtype": "float32" if options.tiny else "bfloat16"},
            "sync": {"extra_mib": options.extra_mib},
        }
    )


def generate(engine: RolloutEngine, count: int, new: int) -> list[Completion]:
    """`count` samples of `new` tokens, each of another prompt."""
    sampling = Sampling(max_new_tokens=new, temperature=0.7)
    requests = [Request(n, (*PROMPT, 40 + n), (n,), sampling) for n in range(count)]
    return list(engine.generate(requests, deadline_s=120.0))


def rollouts(samples: list[Completion]) -> list[Rollout]:
    """The samples as the trainer takes them."""
    return [
        Rollout.of(one, (*PROMPT, 40 + one.request_id), temperature=0.7, group_id=one.request_id, source_row=0)
        for one in samples
    ]


def difference(trainer: Trainer, engine: RolloutEngine) -> dict[str, float]:
    """Engine against trainer, over the tokens of fresh samples: |difference| and KL (k3: Schulman, 2020)."""
    made = rollouts(generate(engine, 8, 32))
    ours = [value for row in trainer.logprobs(made) for value in row]
    theirs = [value for one in made for value in one.logprobs_T]
    gap = torch.tensor(ours, dtype=torch.float64) - torch.tensor(theirs, dtype=torch.float64)
    return {
        "logprob_diff_mean": float(gap.abs().mean()),
        "logprob_diff_max": float(gap.abs().max()),
        "kl": float((gap.exp() - 1 - gap).mean()),
    }


def switch(
    publisher: Publisher, trainer: Trainer, engine: RolloutEngine, batch: Batch, number: int, device: torch.device
) -> dict[str, float]:
    """One optimizer step and the switch after it, by phase, in milliseconds."""
    publisher.open(Version(0, number))
    trainer.step(batch)
    _finish(device)
    marks = [time.perf_counter()]
    publisher.close()
    marks.append(time.perf_counter())
    generate(engine, 1, 1)
    marks.append(time.perf_counter())
    publish, first = (1000 * (b - a) for a, b in itertools.pairwise(marks))
    return {"publish_ms": publish, "first_token_ms": first, "switch_total_ms": publish + first}


def copy_rate(device: torch.device) -> float:
    """Bytes a second that one device copy reads and writes."""
    size = 2**30 if device.type == "cuda" else 2**26
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    seconds = []
    for _ in range(5):
        _finish(device)
        begin = time.perf_counter()
        target.copy_(source)
        _finish(device)
        seconds.append(time.perf_counter() - begin)
    return 2 * size / min(seconds)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Everything on one device."""
    config = configuration(options, directory)
    world = join_world(120.0)
    with ExitStack() as stack:
        stack.callback(leave_world)
        model = Model.load(config)
        engine = open_engine(config, world, model, stack)
        say("the engine serves")
        trainer = stack.enter_context(open_trainer(directory, config, world))
        transport = connect(trainer, engine, config, world)
        publisher = Publisher(engine, transport)
        stack.callback(publisher.hang_up)
        say(f"connected by {transport.name}; not written directly because: {getattr(transport, 'refused', [])[:3]}")
        publisher.open(Version(0, 1))
        moved = publisher.close()
        say(f"first publication, {moved / 1e9:.2f} GB")
        before = difference(trainer, engine)
        say(f"log-probs {before}")
        made = rollouts(generate(engine, 8, 16))
        batch = Batch(made, [1.0, -1.0] * 4)
        taken = [switch(publisher, trainer, engine, batch, 2 + n, world.device) for n in range(options.publications)]
        for one in taken:
            say(str(one))
        after = difference(trainer, engine)
        say(f"log-probs {after}")
        rate = copy_rate(world.device)
    median = {name: statistics.median(one[name] for one in taken[1:]) for name in taken[0]}
    return {
        "model": options.model,
        "trainer": options.trainer,
        "engine": options.engine,
        "transport": transport.name,
        "bytes": moved,
        "first": before,
        "last": after,
        **median,
        "device_copy_bytes_per_s": rate,
        "share_of_copy_ceiling": 4 * moved / rate / (median["publish_ms"] / 1000),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*SHAPES], default="0.6b")
    parser.add_argument("--trainer", choices=["fsdp", "megatron"], default="fsdp")
    parser.add_argument("--engine", choices=[*SERVER], default="sglang")
    parser.add_argument("--publications", type=int, default=10)
    parser.add_argument("--extra-mib", type=int, default=512)
    parser.add_argument("--python", help="interpreter of the engine's server")
    parser.add_argument("--tiny", action="store_true", help="shows on a CPU that it runs")
    options = parser.parse_args()
    options.model = "tiny" if options.tiny else options.model
    with tempfile.TemporaryDirectory() as scratch:
        write_checkpoint(Path(scratch), SHAPES[options.model])
        say("weights are made")
        found = measure(options, Path(scratch))
    for name, value in found.items():
        print(f"{name:26} {value}")
    write_result("sync" if not options.tiny else "sync_tiny", found)


if __name__ == "__main__":
    main()
