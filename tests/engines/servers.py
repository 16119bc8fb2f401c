"""Real vLLM servers for the tests: each model's starts once a session, and every test speaks to it anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from engine_helpers import Served, published

from stretto.engines.vllm import VllmEngine
from stretto.models.checkpoint import load_model, load_tokenizer
from stretto.sync.coordinates import atoms_of
from stretto.sync.layouts import EngineSizes, engine_layout, loader_layout, replica_layout
from stretto.sync.session import Destination, Options, Source
from stretto.sync.transports import EngineTransport
from stretto.world import World
from vllm_here import vllm_python

CPU = torch.device("cpu")
MAX_LENGTH = 512
QUICK: Mapping[str, Any] = {"enforce_eager": True, "enable_prefix_caching": False}


def vllm_engine(directory: Path, **changes: Any) -> VllmEngine:
    """A server of its own, or with `url` that one."""
    settings: dict[str, Any] = {
        "dtype": torch.float32,
        "eos_ids": (),
        "max_length": MAX_LENGTH,
        "max_sequences": 32,
        "tp": 1,
        "layout": None,
        "options": QUICK,
        "python": vllm_python(),
        "url": None,
        "device": CPU,
        "start_timeout_s": 240.0,
        **changes,
    }
    return VllmEngine(directory, load_tokenizer(directory), **settings)


class VllmServers:
    """One server a model. `wide` is served in the place of `tiny`, whose heads are too small for vLLM's CPU kernels."""

    def __init__(self, tiny: Path, wide: Path, logs: Path):
        self._stand_in = {tiny: wide}
        self._logs = logs
        self._servers: dict[Path, VllmEngine] = {}
        self._open: list[Any] = []

    def serve(self, directory: Path, *, max_sequences: int = 8, eos_ids: Sequence[int] = ()) -> Served:
        """A new engine at the model's server, with new weights: those of the reference."""
        directory = self._stand_in.get(directory, directory)
        if directory not in self._servers:
            self._servers[directory] = vllm_engine(directory, log=self._logs / f"{directory.name}.log")
        engine = vllm_engine(
            directory,
            url=self._servers[directory].base_url,
            options={},
            max_sequences=max_sequences,
            eos_ids=eos_ids,
            log=self._logs / "unused.log",
        )
        self._open.append(engine)
        reference: Any = load_model(directory, torch.float32).eval()
        transport = engine_transport(directory, engine, reference)
        self._open.append(transport)
        differences = {"resumes_exactly": False, "filters": False, "real_tolerance": 3e-5, "long": 440}
        return published(engine, reference, load_tokenizer(directory), transport, **differences)

    def end_test(self) -> None:
        """Close what the test opened."""
        while self._open:
            self._open.pop().close()

    def close(self) -> None:
        """End the servers."""
        for engine in self._servers.values():
            engine.close()


def engine_transport(directory: Path, engine: VllmEngine, reference: Any) -> EngineTransport:
    """Carries the reference's weights into the engine's process."""
    atoms = atoms_of(directory, None)
    source = replica_layout(atoms, "float32", 1)
    names: Callable[[], dict[str, torch.Tensor]] = lambda: {  # noqa: E731
        name: reference.get_parameter(name) for name in source.local(0)
    }
    direct = engine_layout(atoms, "float32", EngineSizes("vllm"))
    engine.set_layout(direct)
    return EngineTransport(
        World(0, 1, CPU),
        Source(source, names),
        Destination(engine, 1, direct, loader_layout(atoms, "float32", 1)),
        Options("ipc", "auto", 1 << 20, True, 60.0),
    )
