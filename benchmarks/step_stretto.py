"""Stretto's side of step.py: with a server, which is also measured without Stretto, and with the embedded engine."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from step_work import MODEL, PHASES, Work, told
from sync_work import SERVER, say

import stretto
from stretto.config import RunConfig, config_from_dict
from stretto.engines.server import ServerEngine
from stretto.engines.server.client import Call
from stretto.engines.server.dialect import Dialect, Part
from stretto.engines.server.sample import Sample
from stretto.engines.sglang import Sglang
from stretto.engines.vllm import Vllm
from stretto.orchestration.engines import open_engine
from stretto.orchestration.model import Model
from stretto.types import Request, Sampling
from stretto.world import join_world, leave_world

BARE = "bare"
ROWS = 32
"""Of a micro-batch, as in TRL's run: every one has the same shape, for which the model is compiled once."""
REWARD = f"{Path(__file__).resolve().with_name('step_vs_trl.py')}:odd_digits"
OPTIONS: dict[str, dict[str, Any]] = {
    # Beside the server there has to be room for the trainer's activations: 0.25 holds three times this batch's KV.
    "sglang": SERVER["sglang"]
    | {"mem_fraction_static": 0.25, "cuda_graph_max_bs_decode": 256, "disable_prefill_cuda_graph": True},
    "vllm": SERVER["vllm"],
}


def run_config(work: Work, scratch: Path, engine: dict[str, Any]) -> RunConfig:
    """The run of every engine: rows of equal length, so padded batches have no padding and need no mask."""
    rows = scratch / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": text, "answer": ""}) + "\n" for text in work.texts(seed=0)))
    raw: dict[str, Any] = {
        "run_dir": str(scratch / f"run-{engine['backend']}"),
        "steps": work.warm_up + work.steps,
        "model": {"path": str(scratch / MODEL), "max_length": 2 * (work.prompt + work.new)},
        "data": {"source": str(rows), "shuffle": False},
        "reward": {"functions": [REWARD]},
        "rollout": {
            "prompts_per_step": work.prompts,
            "samples_per_prompt": work.samples,
            "max_new_tokens": work.new,
        },
        "engine": {"max_sequences": max(8, work.responses), **engine},
        "trainer": {
            "lr": 1e-6,
            "batching": "padded",
            "micro_batch_tokens": ROWS * (work.prompt + work.new),
            "logit_chunk_tokens": 4096,
            "compile": torch.cuda.is_available(),
        },
        "checkpoint": {"every": 0},
    }
    return config_from_dict(raw)


def run_stretto(work: Work, config: RunConfig) -> dict[str, Any]:
    """The whole run, its seconds as it logs them itself."""
    stretto.train(config)
    lines = [json.loads(line) for line in (Path(config.run_dir) / "metrics.jsonl").read_text().splitlines()]
    timed = [line for line in lines if line["step"] > work.warm_up]
    lengths = {line["rollout/response_length_mean"] for line in timed}
    if lengths != {float(work.new)}:
        raise RuntimeError(f"responses of {lengths} tokens instead of {work.new}: not the same work")
    steps = [{name: line[f"time/{name}"] for name in ("step", *PHASES) if f"time/{name}" in line} for line in timed]
    peak = max(line["memory/peak_bytes"] for line in lines if "memory/peak_bytes" in line)
    return told(work, steps, peak_bytes=peak, mismatch_kl=[line["mismatch/kl"] for line in timed])


def run_embedded(work: Work, scratch: Path) -> dict[str, Any]:
    """FSDP2 and the embedded engine."""
    return run_stretto(work, run_config(work, scratch, {"backend": "embedded"}))


def run_server(
    work: Work,
    scratch: Path,
    backend: str,
    python: str | None,
    wanted: Sequence[str],
    keep: Callable[[str, dict[str, Any]], None],
) -> None:
    """One server for both of `wanted`, each of whose results `keep` is given: adopted by a run, and asked directly.

    It is asked both before and after the run, since its speed drifts by a tenth within minutes.
    """
    options: dict[str, Any] = {"backend": backend, backend: OPTIONS[backend], **({"python": python} if python else {})}
    config = run_config(work, scratch, options)
    world = join_world(config.rollout.timeout_s)
    with ExitStack() as stack:
        stack.callback(leave_world)
        server = open_engine(config, world, Model.load(config), stack)
        assert isinstance(server, ServerEngine)
        say(f"{backend} serves")
        bare: list[dict[str, float]] = []
        if BARE in wanted:
            bare += ask_bare(work, server.base_url, backend, Model.load(config), seed=1)
        if backend in wanted:
            adopted = run_config(work, scratch, {"backend": backend, "url": server.base_url})
            keep(backend, run_stretto(work, adopted))
        if BARE in wanted:
            bare += ask_bare(work, server.base_url, backend, Model.load(config), seed=3)
            keep(BARE, told(work, bare))


def ask_bare(work: Work, url: str, backend: str, model: Model, *, seed: int) -> list[dict[str, float]]:
    """Seconds of a step's requests, word for word, sent all at once and decoded; other prompts in every round."""
    on_gpu = torch.cuda.is_available()
    dialect: Dialect = (
        Sglang(tp=1, options={}) if backend == "sglang" else Vllm(filters=False, on_gpu=on_gpu, options={})
    )
    texts, rounds = work.texts(seed=seed), []
    for at in range(0, len(texts), work.prompts):
        calls = [dialect.generate(part) for part in _parts(work, texts, at, model)]
        begin = time.perf_counter()
        answers = [dialect.answer(one) for one in asyncio.run(_ask(url, calls))]
        rounds.append({"rollout": time.perf_counter() - begin})
        if any(len(answer.ids) != work.new for answer in answers):
            raise RuntimeError(f"the server did not answer with {work.new} tokens each: not the same work")
    return rounds[work.warm_up :]


def _parts(work: Work, texts: Sequence[str], at: int, model: Model) -> Iterator[Part]:
    """The samples of one step, whose prompts begin at `at`."""
    sampling = Sampling(max_new_tokens=work.new)
    for number, text in enumerate(texts[at : at + work.prompts], start=at):
        request = Request(number, tuple(model.tokenizer(text)["input_ids"]), tuple(range(work.samples)), sampling)
        for index in range(work.samples):
            yield Sample(request, index, ()).part(f"bare-{number:06d}-{index:06d}")


async def _ask(url: str, calls: Sequence[Call]) -> list[Any]:
    import aiohttp

    connector, limit = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=600.0)
    async with aiohttp.ClientSession(url, connector=connector, timeout=limit, raise_for_status=True) as session:

        async def one(call: Call) -> Any:
            async with session.post(call.path, json=call.body) as answer:
                return await answer.json()

        return await asyncio.gather(*map(one, calls))
