"""Whether a run fits: its forecast beside what the device (or the machine) has left."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from stretto.config import RunConfig
from stretto.data import PromptSet
from stretto.memory import available_memory
from stretto.orchestration.footprint import Footprint, Forecast, ServerFootprint, Sizes, forecast
from stretto.orchestration.turns import Turns, decide
from stretto.world import World

_GIB = 2**30


@dataclass(frozen=True)
class Room:
    """A forecast and what becomes of it. `turns` is None when trainer and engine do not take turns on a CUDA device.

    `free` are the bytes left to `sharing` processes, None when the system does not say; `refusal` says why the run does
    not fit, with the numbers.
    """

    forecast: Forecast
    turns: Turns | None
    free: int | None
    sharing: int
    refusal: str | None

    @property
    def needed(self) -> int | None:
        """Bytes that all who share the memory take at the same time; None when not known."""
        process, server = self.forecast.process, self.forecast.server
        if process is None:
            return None
        if self.turns is not None:
            return self.turns.peak
        return self.sharing * process.total + (0 if server is None else _beside(server))


def room_for(config: RunConfig, directory: Path | None, world: World, sizes: Sizes, free: int | None) -> Room:
    """Forecast and, for a server on the trainer's devices, the turns. `free` bytes are left (None: not known).

    Raises ValueError as :func:`~stretto.orchestration.footprint.forecast` does.
    """
    cuda = world.device.type == "cuda"
    found = forecast(directory, config, world, sizes, free or 0)
    sharing = 1 if cuda else int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    turns, refusal = None, None
    if cuda and free is not None and found.process is not None and found.server is not None:
        try:
            turns = decide(found.process, found.server, config.memory, free)
        except ValueError as error:
            refusal = str(error)
    room = Room(found, turns, free, sharing, refusal)
    if refusal is None and free is not None and (needed := room.needed) is not None and needed > free:
        return Room(found, turns, free, sharing, _refusal(config, room, needed, free))
    return room


def sizes_of(config: RunConfig, data: PromptSet | None) -> Sizes:
    """What the prompts say; without them, the most that the configuration lets through."""
    if data is None:
        return Sizes(None, None, config.data.max_prompt_tokens, config.data.max_prompt_tokens)
    longest = [max((len(prompt.ids) for prompt in part), default=0) for part in (data.train, data.heldout)]
    return Sizes(len(data.train), len(data.heldout), *longest)


def free_bytes(world: World) -> int | None:
    """Bytes left on the device; on CPU those of the machine, where the system says so."""
    if world.device.type == "cuda":
        return torch.cuda.mem_get_info(world.device)[0]
    return available_memory()


def expected_peak(room: Room, world: World) -> int | None:
    """What `memory/peak_bytes` should be at the most: on CUDA what is allocated, without the context."""
    process = room.forecast.process
    if process is None:
        return None
    return process.total - (process.standing["process"] if world.device.type == "cuda" else 0)


def lines(room: Room, world: World) -> list[str]:
    """The forecast in GiB, and the verdict."""
    process, server = room.forecast.process, room.forecast.server
    if process is None:
        return ["Memory: not known, since no weight map says which weights of this family are on which Megatron rank"]
    said = ["Memory of the largest process, in GiB:", *_process_lines(process)]
    if server is not None:
        said += ["Memory of its server, in GiB:", *_server_lines(server, room.turns)]
    if room.turns is not None:
        said += _turn_lines(room.turns)
    if room.free is None:
        return said
    if room.refusal is not None:
        return [*said, f"it does NOT fit: {room.refusal}"]
    who = f"{room.sharing} process{'es' if room.sharing > 1 else ''}{'' if server is None else ' and the server'}"
    needed = (room.needed or 0) / _GIB
    return [*said, f"{world.device.type}: {room.free / _GIB:.1f} GiB available, {needed:.1f} needed by {who}; it fits"]


def _process_lines(process: Footprint) -> list[str]:
    phases = (
        ("always", process.standing),
        ("while generating", process.rollout),
        ("while training", process.training),
        ("while updating", process.update),
    )
    return [
        *(_line(name, size, phase) for phase, parts in phases for name, size in parts.items()),
        _line("total", process.total, "at the same time"),
    ]


def _server_lines(server: ServerFootprint, turns: Turns | None) -> list[str]:
    pool = turns.pool if turns else server.wanted if server.pool is None else server.pool
    return [
        _line("weights", server.weights, "always" if turns is None or turns.release != "all" else "while generating"),
        _line("keys and values", pool, "while generating" if turns and turns.release != "nothing" else "always"),
        _line("rest", server.rest, "always"),
    ]


def _turn_lines(turns: Turns) -> list[str]:
    given = {"nothing": "nothing", "kv": "its keys and values", "all": "its weights, keys and values"}[turns.release]
    waits = "waits in host memory" if turns.offload else "stays on the device"
    return [
        f"While the trainer works the server gives back {given}; while the server does, the optimizer's state {waits}.",
        _line("on the device", turns.generating, "while generating"),
        _line("on the device", turns.learning, "while training"),
    ]


def _line(name: str, size: int, phase: str) -> str:
    return f"  {name:<17} {size / _GIB:8.3f}  {phase}"


def _beside(server: ServerFootprint) -> int:
    return server.weights + server.rest + (server.wanted if server.pool is None else server.pool)


def _refusal(config: RunConfig, room: Room, needed: int, free: int) -> str:
    todo = "lower trainer.micro_batch_tokens or engine.max_sequences"
    if config.engine.backend == "embedded":
        todo += ', or let a server hold the engine\'s weights once (engine.backend = "sglang" or "vllm", engine.tp)'
    todo += ", or start it all the same with memory.refuse = false"
    return f"{needed / _GIB:.1f} GiB needed, {free / _GIB:.1f} available; {todo}"
