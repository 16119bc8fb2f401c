"""What `sync.py` measures in each of its processes."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron_grpo import TINY, write_checkpoint
from rollout import QWEN3_06B
from sync_rates import copy_rate, host_rates, sglang_update

from stretto.config import RunConfig, config_from_dict
from stretto.engines import RolloutEngine
from stretto.orchestration.engines import connect, open_engine
from stretto.orchestration.footprint import Sizes
from stretto.orchestration.model import Model
from stretto.orchestration.room import free_bytes, room_for
from stretto.orchestration.switch import Switch
from stretto.orchestration.training import open_trainer
from stretto.orchestration.turns import USABLE, Turns, decide
from stretto.sync.publication import Publisher
from stretto.sync.transports import EngineTransport
from stretto.trainers import Trainer
from stretto.types import Batch, Completion, Request, Rollout, Sampling, Version
from stretto.world import World, join_world, leave_world

QWEN3_4B = QWEN3_06B | {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
}
MODELS: dict[str, dict[str, Any]] = {"0.6b": QWEN3_06B, "4b": QWEN3_4B, "tiny": TINY | {"head_dim": 32}}
TRAINERS, SETTINGS = ("fsdp", "megatron"), ("resident", "pressed")
SERVER: dict[str, dict[str, Any]] = {
    "sglang": {
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "cuda_graph_max_bs_decode": 8,
    },
    "vllm": {"enforce_eager": True, "gpu_memory_utilization": 0.2},
}
PREFILL_GRAPHS = {"cuda_graph_bs_prefill": [64, 128, 256]}
SMALL = {"micro_batch_tokens": 1024}
"""The optimizer steps here are only there to change the weights."""
PROMPT = tuple(range(5, 37))
SIZES = Sizes(64, 0, 64, 0)
FULL = 0.985
"""How much of the memory that a forecast may fill the pressed setting takes while it generates."""
BEGIN = time.monotonic()


@dataclass(frozen=True)
class Case:
    """One server: `python` is its interpreter."""

    model: str
    setting: str
    engine: str
    python: str | None

    @property
    def tiny(self) -> bool:
        return self.model == "tiny"


def say(text: str) -> None:
    """What a run that is cut short leaves behind."""
    print(f"{time.monotonic() - BEGIN:7.1f} s  {text}", file=sys.stderr, flush=True)


def configuration(case: Case, trainer: str, directory: Path, options: dict[str, Any]) -> RunConfig:
    """A run of one process."""
    return config_from_dict(
        {
            "model": {"path": str(directory), "max_length": 512},
            "data": {"source": "reasoning_gym:chain_sum"},
            "reward": {"functions": ["reasoning_gym"]},
            "rollout": {"temperature": 0.7, "prompts_per_step": 8},
            "engine": {
                "backend": case.engine,
                "max_sequences": 64,
                case.engine: options,
                **({"python": case.python} if case.python else {}),
            },
            "trainer": {"backend": trainer, "lr": 1e-5, "dtype": "float32" if case.tiny else "bfloat16", **SMALL},
        }
    )


def measure(case: Case, trainers: list[str], publications: int) -> Iterator[dict[str, Any]]:
    """Each trainer's result in turn, with one server for all."""
    world = join_world(120.0)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        stack.callback(leave_world)
        directory = Path(scratch)
        write_checkpoint(directory, MODELS[case.model])
        say(f"{case.model}, {case.setting}: weights are made")
        rates = {"device_copy_bytes_per_s": copy_rate(world.device), **host_rates(world.device)}
        say(str(rates))
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
        shares = {name: share_of(case, name, directory, world, trainers) for name in trainers}
        turns = shares[trainers[0]].turns
        options = SERVER[case.engine]
        if case.engine == "sglang" and turns.release == "nothing":
            options = options | PREFILL_GRAPHS
        config = configuration(case, trainers[0], directory, options)
        engine = open_engine(config, world, Model.load(config), stack, None if case.tiny else turns)
        say("the server serves")
        for name in trainers:
            config = configuration(case, name, directory, options)
            yield run_trainer(case, name, config, shares[name], engine, world, directory, publications, rates)


@dataclass(frozen=True)
class Share:
    """How a trainer takes turns with the server, and the bytes of its optimizer's state."""

    turns: Turns
    optimizer_bytes: int


def share_of(case: Case, trainer: str, directory: Path, world: World, trainers: list[str]) -> Share:
    """As a run would decide; in the pressed setting, of a pool that each of `trainers` can just stand beside."""
    free = free_bytes(world) or 0
    configs = {name: configuration(case, name, directory, SERVER[case.engine]) for name in trainers}
    rooms = {name: room_for(config, directory, world, SIZES, free) for name, config in configs.items()}
    process, server = rooms[trainer].forecast.process, rooms[trainer].forecast.server
    assert process is not None
    assert server is not None
    optimizer = process.standing["optimizer"]
    if case.setting == "resident":
        return Share(rooms[trainer].turns or Turns("nothing", False, 0, None, 0, 0), optimizer)
    beside = [one.forecast.process for one in rooms.values() if one.forecast.process]
    most = max(one.generating - one.standing["optimizer"] for one in beside) + server.weights + server.rest
    pool = int(USABLE * FULL * free) - most
    turns = decide(process, replace(server, pool=pool), configs[trainer].memory, free)
    assert (turns.release, turns.offload) == ("kv", True), turns
    return Share(replace(turns, share=server.share(pool, free)), optimizer)


@dataclass
class Bench:
    """A trainer beside the server."""

    trainer: Trainer
    engine: RolloutEngine
    publisher: Publisher
    transport: EngineTransport
    switch: Switch
    world: World
    number: int = 0

    def publish(self, batch: Batch | None) -> dict[str, float]:
        """One optimizer step (none without a batch) and the switch after it, by phase, in milliseconds."""
        self.number += 1
        self.publisher.open(Version(self.number, 0))
        laps = Laps(self.world.device)
        self.switch.to_trainer(self.trainer)
        laps("to_trainer")
        if batch is not None:
            self.trainer.step(batch)
        laps("train")
        self.switch.to_publication(self.trainer)
        laps("offload")
        self.publisher.close()
        laps("publish")
        self.switch.to_engine()
        laps("reclaim")
        generate(self.engine, 1, 1)
        laps("first_token")
        inside = {f"publish: {name}": 1000 * value for name, value in self.transport.seconds.items()}
        after = ("offload", "publish", "reclaim", "first_token")
        return laps.found | inside | {"switch_total": sum(laps.found[name] for name in after)}


class Laps:
    """Milliseconds between calls, once the device has finished."""

    def __init__(self, device: torch.device):
        self._device = device
        self.found: dict[str, float] = {}
        finish(device)
        self._begin = time.perf_counter()

    def __call__(self, name: str) -> None:
        finish(self._device)
        now = time.perf_counter()
        self.found[name], self._begin = 1000 * (now - self._begin), now


def run_trainer(
    case: Case,
    name: str,
    config: RunConfig,
    share: Share,
    engine: RolloutEngine,
    world: World,
    directory: Path,
    publications: int,
    rates: dict[str, float],
) -> dict[str, Any]:
    """One trainer's publications into the server that runs."""
    turns = share.turns
    with ExitStack() as stack:
        switch = Switch(engine, turns, world)
        trainer = stack.enter_context(open_trainer(directory, config, world))
        transport = connect(trainer, engine, config, world)
        assert isinstance(transport, EngineTransport)
        publisher = Publisher(engine, transport)
        stack.callback(publisher.hang_up)
        say(f"{name}: connected by {transport.name}; not written directly because: {transport.refused[:3]}")
        bench = Bench(trainer, engine, publisher, transport, switch, world)
        bench.number = 100 * TRAINERS.index(name)
        bench.publish(None)
        before = difference(trainer, engine)
        say(f"{name}: log-probs {before}")
        batch = Batch(rollouts(generate(engine, 8, 16)), [1.0, -1.0] * 4)
        taken = [bench.publish(batch) for _ in range(publications)]
        for one in taken:
            say(str({key: round(value, 1) for key, value in one.items()}))
        after = difference(trainer, engine)
        again = [timed(lambda: generate(engine, 1, 1), world.device) for _ in range(4)]
        copies = host_copies(share, trainer, switch, world.device) if turns.offload else {}
        moved = sum(tensor.numel() for tensor in trainer.weights().values()) * (4 if case.tiny else 2)
        peer = sglang_update(engine, trainer) if (case.engine, name) == ("sglang", "fsdp") and not copies else {}
        if copies:
            say(str(copies))
    median = {key: statistics.median(one[key] for one in taken[1:]) for key in taken[0]}
    found = {
        "model": case.model,
        "setting": case.setting,
        "trainer": name,
        "engine": case.engine,
        "transport": transport.name,
        "written": "loader" if transport.refused else "direct",
        "bytes": moved,
        "logprobs_first": before,
        "logprobs_last": after,
        "switch_total_ms": median.pop("switch_total"),
        "phases_ms": median,
        "bare_first_token_ms": statistics.median(again),
        "turns": {"release": turns.release, "offload": turns.offload, "pool_bytes": turns.pool},
        **rates,
        "share_of_copy_ceiling": 4 * moved / rates["device_copy_bytes_per_s"] / (median["publish"] / 1000),
    }
    if copies:
        copies["offload_share_of_host_link"] = copies["offload_bytes_per_s"] / rates["device_to_host_bytes_per_s"]
        copies["onload_share_of_host_link"] = copies["onload_bytes_per_s"] / rates["host_to_device_bytes_per_s"]
    return found | peer | copies


def host_copies(share: Share, trainer: Trainer, switch: Switch, device: torch.device) -> dict[str, float]:
    """The rate of the optimizer's copies to host memory and back, in the trainer's turn: only then both have room."""
    out, back = [], []
    switch.to_trainer(trainer)
    for _ in range(3):
        out.append(timed(trainer.offload, device))
        back.append(timed(trainer.onload, device))
    switch.to_publication(trainer)
    switch.to_engine()
    size = share.optimizer_bytes
    return {
        "optimizer_bytes": size,
        "offload_bytes_per_s": size / statistics.median(out) * 1000,
        "onload_bytes_per_s": size / statistics.median(back) * 1000,
    }


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


def timed(act: Any, device: torch.device) -> float:
    """Milliseconds."""
    finish(device)
    begin = time.perf_counter()
    act()
    finish(device)
    return 1000 * (time.perf_counter() - begin)


def finish(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()
