"""Real servers for the tests: each model's starts once a session, and every test speaks to it anew."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from bounds import ROUNDED
from engine_helpers import Served, published, resident_bytes

from stretto.engines.server import ServerEngine
from stretto.engines.sglang import SglangEngine
from stretto.engines.vllm import VllmEngine
from stretto.models.checkpoint import load_model, load_tokenizer
from stretto.sync.binding import dtype_name
from stretto.sync.coordinates import atoms_of
from stretto.sync.layouts import EngineSizes, engine_layout, loader_layout, replica_layout
from stretto.sync.session import Destination, Options, Source
from stretto.sync.transports import EngineTransport
from stretto.world import World
from vllm_here import vllm_python

MAX_LENGTH = 1024
QUICK: Mapping[str, Any] = {"enforce_eager": True, "enable_prefix_caching": False}


@dataclass(frozen=True)
class Kind:
    """How the tests start one sort of server; `differences` are those of its `Served` from the embedded engine's."""

    backend: str
    engine: Callable[..., ServerEngine]
    python: str | None
    device: torch.device
    dtype: torch.dtype
    options: Mapping[str, Any]
    tp: int = 1
    differences: Mapping[str, Any] = field(default_factory=dict)

    def start(self, directory: Path, **changes: Any) -> ServerEngine:
        """A server of its own, or with `url` that one."""
        settings: dict[str, Any] = {
            "dtype": self.dtype,
            "eos_ids": (),
            "max_length": MAX_LENGTH,
            "max_sequences": 32,
            "tp": self.tp,
            "layout": None,
            "options": self.options,
            "python": self.python,
            "url": None,
            "device": self.device,
            "start_timeout_s": 240.0,
            **changes,
        }
        return self.engine(directory, load_tokenizer(directory), **settings)


def vllm() -> Kind:
    """vLLM on CPU in float32; skips the test where there is none."""
    differences = {"resumes_exactly": False, "filters": frozenset(), "real_tolerance": 3e-5, "long": 440}
    return Kind("vllm", VllmEngine, vllm_python(), torch.device("cpu"), torch.float32, QUICK, differences=differences)


def sglang() -> Kind:
    """SGLang on a GPU in bfloat16 and its deterministic mode; skips the test where there is none.

    STRETTO_SGLANG_PYTHON names its interpreter, STRETTO_SGLANG_TP its ranks (1).
    """
    python = os.environ.get("STRETTO_SGLANG_PYTHON")
    if not python or not torch.cuda.is_available():
        pytest.skip("needs CUDA, and an interpreter that has SGLang in STRETTO_SGLANG_PYTHON")
    options = {
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_prefill_cuda_graph": True,
        "cuda_graph_max_bs_decode": 8,
        "mem_fraction_static": 0.5,
        "max_total_tokens": 32768,  # the pool: a fresh server finds memory beside the one that runs
        "enable_memory_saver": True,
        "enable_deterministic_inference": True,
    }
    differences = {
        "resumes_exactly": False,
        "filters": frozenset({"top_k", "top_p"}),
        "mixes_filters": False,  # it sorts a batch in which one has them, and then draws from the sorted
        "long": 440,
        "exactness": 0.2,
        "bound": ROUNDED,
    }
    tp = int(os.environ.get("STRETTO_SGLANG_TP", "1"))
    return Kind("sglang", SglangEngine, python, torch.device("cuda", 0), torch.bfloat16, options, tp, differences)


class Servers:
    """One server a model. `stand_ins` are served in the place of models whose heads are too small for the kernels."""

    def __init__(self, kind: Kind, stand_ins: Mapping[Path, Path], logs: Path):
        self._kind, self._stand_ins, self._logs = kind, stand_ins, logs
        self._servers: dict[Path, ServerEngine] = {}
        self._open: list[Any] = []

    def server(self, directory: Path) -> ServerEngine:
        """The model's server itself, for a test that leaves it running."""
        if directory not in self._servers:
            self._servers[directory] = self._kind.start(directory, log=self._logs / f"{directory.name}.log")
        return self._servers[directory]

    def serve(self, directory: Path, *, max_sequences: int = 8, eos_ids: Sequence[int] = ()) -> Served:
        """A new engine at the model's server, with new weights: those of the reference."""
        kind, directory = self._kind, self._stand_ins.get(directory, directory)
        server = self.server(directory)
        engine = kind.start(
            directory,
            url=server.base_url,
            options={},
            max_sequences=max_sequences,
            eos_ids=eos_ids,
            log=self._logs / "unused.log",
        )
        self._open.append(engine)
        reference: Any = load_model(directory, kind.dtype).eval().to(kind.device)
        transport = engine_transport(kind, directory, engine, reference)
        self._open.append(transport)
        return published(
            engine,
            reference,
            load_tokenizer(directory),
            transport,
            fresh=self._fresh,
            held_bytes=lambda: held_bytes(kind.device, server),
            **kind.differences,
        )

    @contextmanager
    def _fresh(self, directory: Path) -> Iterator[ServerEngine]:
        """A server of its own that has read the checkpoint by itself."""
        engine = self._kind.start(directory, receiver=False, log=self._logs / f"fresh-{directory.name}.log")
        try:
            yield engine
        finally:
            engine.close()

    def end_test(self) -> None:
        """Close what the test opened."""
        while self._open:
            self._open.pop().close()

    def close(self) -> None:
        """End the servers."""
        for engine in self._servers.values():
            engine.close()


def engine_transport(
    kind: Kind, directory: Path, engine: ServerEngine, reference: Any, **options: Any
) -> EngineTransport:
    """Carries the reference's weights into the engine's processes."""
    atoms, dtype = atoms_of(directory, None), dtype_name(kind.dtype)
    source = replica_layout(atoms, dtype, 1)
    direct = engine_layout(atoms, dtype, EngineSizes(kind.backend, tp=kind.tp))
    engine.set_layout(direct)
    settings = {"extra_bytes": 1 << 20, "checksums": True, "timeout_s": 60.0, **options}
    return EngineTransport(
        World(0, 1, kind.device),
        Source(source, lambda: {name: reference.get_parameter(name) for name in source.local(0)}),
        Destination(engine, kind.tp, direct, loader_layout(atoms, dtype, kind.tp)),
        Options("ipc", "auto", **settings),
    )


def worker_of(server: ServerEngine) -> int:
    """The process of a vLLM server that computes."""
    return next(one for one in processes_of(server) if command_of(one).startswith("VLLM::Worker"))


def processes_of(server: ServerEngine) -> list[int]:
    """Everything below the server's launcher, and that."""
    from stretto.engines.server.launcher import _descendants

    assert server.process is not None
    return [server.process.id, *_descendants(server.process.id)]


def command_of(process: int) -> str:
    """Its command line, or what it calls itself."""
    return Path(f"/proc/{process}/cmdline").read_text()


def held_bytes(device: torch.device, server: ServerEngine) -> int:
    """Memory in use where the weights are: in the worker, or on the GPU."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return resident_bytes(worker_of(server))
