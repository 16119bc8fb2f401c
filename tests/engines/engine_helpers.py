"""What the engine tests share: served models, requests, and what transformers says about a response."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bounds import Bound
from torch import Tensor

from stretto.engines import RolloutEngine
from stretto.engines.embedded import EmbeddedEngine
from stretto.models.checkpoint import load_model, load_tokenizer
from stretto.orchestration.engines import serve_files
from stretto.sync.layouts import replica_layout
from stretto.sync.plan import Plan
from stretto.sync.publication import Publisher
from stretto.sync.transports import AliasTransport, PlannedTransport
from stretto.types import Completion, Request, Sampling, Version

CPU = torch.device("cpu")
DEADLINE_S = 120.0
TEXT = "It was the best of times, it was the worst of times; 12 + 30 = 42, he said (twice)."


@dataclass
class Served:
    """An engine, the transformers model whose weights it was given, and the publisher between the two."""

    engine: RolloutEngine
    reference: Any
    publisher: Publisher
    tokenizer: Any
    resumes_exactly: bool = True
    """Whether a pause changes no token: an engine may draw anew what follows it."""
    filters: frozenset[str] = frozenset({"top_k", "top_p", "min_p"})
    """Which filters it serves at any temperature."""
    mixes_filters: bool = True
    """Whether a request's filters change no token of its neighbours, which have none."""
    long: int = 120
    """New tokens of a response that is still under way when a test acts on it."""
    real_tolerance: float = 1e-5
    """Of a real model's log-probs: kernels that add in another order are a few bits of its logits off."""
    exactness: float = 2e-5
    """How far transformers' log-probs are from float64's, in the engine's type and on its device."""
    bound: Bound = field(default_factory=Bound)
    fresh: Callable[[Path], AbstractContextManager[RolloutEngine]] = field(default_factory=lambda: fresh_engine)
    """Another engine of the kind, that has the weights of a checkpoint from its files."""
    held_bytes: Callable[[], int] = field(default_factory=lambda: own_bytes)
    """Memory of the process that holds the weights."""

    def publish(self, number: int, change: Callable[[], None] = lambda: None) -> Version:
        """Change the reference's weights and publish them as version (1, number)."""
        version = Version(1, number)
        self.publisher.open(version)
        change()
        self.publisher.close()
        return version

    def prompt(self, length: int, start: int = 0) -> tuple[int, ...]:
        """The first `length` tokens of a fixed text, begun at character `start`."""
        ids = self.tokenizer.encode((TEXT * 10)[start:], add_special_tokens=False)
        return tuple(ids[:length])


Factory = Callable[..., Served]


def serve_alias(directory: Path, *, max_sequences: int = 8, eos_ids: Sequence[int] = ()) -> Served:
    """An embedded engine that generates with the reference's own tensors."""
    engine, reference, tokenizer = _parts(directory, max_sequences, eos_ids)
    weights = named_weights(reference, engine)
    engine.adopt(weights)
    return published(engine, reference, tokenizer, AliasTransport(weights, engine.weights()))


def serve_local(
    directory: Path,
    *,
    max_sequences: int = 8,
    eos_ids: Sequence[int] = (),
    device: torch.device = CPU,
    **differences: Any,
) -> Served:
    """An embedded engine whose own buffers are filled from the reference."""
    engine, reference, tokenizer = _parts(directory, max_sequences, eos_ids, device)
    engine.allocate()
    transport = filling(engine, lambda: named_weights(reference, engine))
    return published(engine, reference, tokenizer, transport, **differences)


def serve_cuda(directory: Path, *, max_sequences: int = 8, eos_ids: Sequence[int] = ()) -> Served:
    """The same on a GPU, in float32, whose kernels add in other orders; skips the test where there is none."""
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    device = torch.device("cuda", 0)
    return serve_local(
        directory,
        max_sequences=max_sequences,
        eos_ids=eos_ids,
        device=device,
        exactness=1e-4,
        bound=Bound(each=1e-4),
        fresh=partial(fresh_engine, device=device),
        held_bytes=torch.cuda.memory_allocated,
    )


ENGINES: dict[str, Factory] = {
    "embedded-alias": serve_alias,
    "embedded-local": serve_local,
    "embedded-cuda": serve_cuda,
}


def new_engine(
    directory: Path,
    *,
    dtype: torch.dtype = torch.float32,
    max_length: int = 256,
    max_sequences: int = 4,
    eos_ids: Sequence[int] = (),
    device: torch.device = CPU,
) -> EmbeddedEngine:
    """An embedded engine without weights yet."""
    return EmbeddedEngine(
        directory,
        load_tokenizer(directory),
        device=device,
        dtype=dtype,
        eos_ids=eos_ids,
        max_length=max_length,
        max_sequences=max_sequences,
    )


@contextmanager
def fresh_engine(directory: Path, device: torch.device = CPU) -> Iterator[EmbeddedEngine]:
    """An embedded engine with the weights of a checkpoint from its files."""
    engine = new_engine(directory, device=device)
    engine.prepare(Version(1, 0))
    serve_files(engine, directory)
    engine.commit(Version(1, 0))
    yield engine
    engine.close()


def own_bytes() -> int:
    """Resident memory of this process."""
    gc.collect()
    return resident_bytes("self")


def resident_bytes(process: int | str) -> int:
    """Resident memory of a process that it shares with none."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) * 1024


def filling(engine: EmbeddedEngine, source: Callable[[], Mapping[str, Tensor]]) -> PlannedTransport:
    """Fills the engine's buffers from whole float32 tensors of one process."""
    target = engine.layout()
    plan = Plan.of(replica_layout(target.atoms, "float32", 1), target, [0])
    return PlannedTransport(plan, 0, source, engine.weights(), next(iter(engine.weights().values())).device)


def _parts(
    directory: Path, max_sequences: int, eos_ids: Sequence[int], device: torch.device = CPU
) -> tuple[EmbeddedEngine, Any, Any]:
    reference = load_model(directory, torch.float32).eval().to(device)
    length = reference.config.max_position_embeddings
    engine = new_engine(directory, max_length=length, max_sequences=max_sequences, eos_ids=eos_ids, device=device)
    return engine, reference, load_tokenizer(directory)


def published(engine: RolloutEngine, reference: Any, tokenizer: Any, transport: Any, **differences: Any) -> Served:
    """The engine with the reference's weights in it, as version (1, 0)."""
    served = Served(engine, reference, Publisher(engine, transport), tokenizer, **differences)
    served.publish(0)
    return served


def named_weights(reference: Any, engine: EmbeddedEngine) -> dict[str, Tensor]:
    """The reference's tensors by the names that the engine's layout asks for."""
    return {name: reference.get_parameter(name) for name in engine.layout().local(0)}


def request(id: int, prompt_ids: Sequence[int], seeds: Iterable[int] = (0,), **sampling: Any) -> Request:
    """A group; `sampling` has the fields of `Sampling` (8 new tokens unless it says otherwise)."""
    return Request(id, tuple(prompt_ids), tuple(seeds), Sampling(**{"max_new_tokens": 8, **sampling}))


def run(engine: RolloutEngine, *requests: Request) -> dict[tuple[int, int], Completion]:
    """Every completion by (request id, index); each must come exactly once."""
    completions = list(engine.generate(requests, deadline_s=DEADLINE_S))
    found = {(one.request_id, one.index): one for one in completions}
    assert len(found) == len(completions)
    assert set(found) == {(one.id, index) for one in requests for index in range(len(one.seeds))}
    assert all(one.seed == requests_by_id(requests)[one.request_id].seeds[one.index] for one in completions)
    return found


def requests_by_id(requests: Sequence[Request]) -> dict[int, Request]:
    """Requests by their id."""
    return {one.id: one for one in requests}


@torch.no_grad()
def reference_logits(reference: Any, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> Tensor:
    """Logits [T, V] (float64) that transformers gives for each response token, in one pass without a cache."""
    ids_1L = torch.tensor([[*prompt_ids, *response_ids]], device=reference.device)
    return reference(ids_1L, use_cache=False).logits[0, len(prompt_ids) - 1 : -1].double().cpu()


def reference_logprobs(
    reference: Any, prompt_ids: Sequence[int], response_ids: Sequence[int], temperature: float = 1.0
) -> Tensor:
    """Log-probs [T] (float64) of the response under transformers."""
    logprobs_TV = (reference_logits(reference, prompt_ids, response_ids) / temperature).log_softmax(-1)
    return logprobs_TV.gather(-1, torch.tensor(response_ids)[:, None])[:, 0]


def filtered_by_transformers(logits_NV: Tensor, filters: Mapping[str, float]) -> Tensor:
    """What transformers' own filters leave of the logits (-inf elsewhere), in the order top-k, top-p, min-p."""
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    warpers: dict[str, Any] = {"top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper, "min_p": MinPLogitsWarper}
    for name, warper in warpers.items():
        if name in filters:
            logits_NV = warper(filters[name])(torch.empty(0), logits_NV)
    return logits_NV


def assert_logprobs(served: Served, one: Request, completion: Completion) -> None:
    """The completion's log-probs are those of transformers, at the request's temperature (1 when greedy)."""
    temperature = one.sampling.temperature or 1.0
    served.bound.check(
        completion.logprobs_T,
        reference_logprobs(served.reference, one.prompt_ids, completion.response_ids, temperature),
    )


@torch.no_grad()
def nudge(reference: Any, seed: int, scale: float = 0.02) -> None:
    """What an optimizer step does: every parameter changes in place."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in reference.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter), alpha=scale)


@torch.no_grad()
def change_final_norm(reference: Any) -> None:
    """Change the logits of every token, but no key and no value, so that kept KV stays that of the new weights."""
    reference.model.norm.weight.mul_(0.7)
