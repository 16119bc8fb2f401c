"""The embedded engine's weights: the trainer's own, or its own at addresses that never change."""

from __future__ import annotations

import gc
import resource
from pathlib import Path

import pytest
import torch
from bounds import Bound
from engine_helpers import (
    DEADLINE_S,
    Factory,
    Served,
    assert_logprobs,
    filling,
    named_weights,
    new_engine,
    nudge,
    request,
    run,
    serve_alias,
    serve_local,
)

from stretto.engines import EngineError
from stretto.engines.embedded import EmbeddedEngine
from stretto.models.checkpoint import load_model
from stretto.sync.binding import tensor_differences
from stretto.sync.coordinates import atoms_of
from stretto.sync.layouts import fsdp_layout, replica_layout
from stretto.sync.publication import Publisher
from stretto.sync.transports.alias import can_alias
from stretto.sync.views import Views
from stretto.types import Version


def engine_of(served: Served) -> EmbeddedEngine:
    assert isinstance(served.engine, EmbeddedEngine)
    return served.engine


def addresses(served: Served) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in engine_of(served).weights().items()}


def test_a_step_on_adopted_tensors_is_seen_by_the_next_token_and_copies_nothing(tiny_model: Path) -> None:
    served = serve_alias(tiny_model)
    shared = {name: tensor.data_ptr() for name, tensor in served.reference.named_parameters()}
    assert addresses(served) == shared
    one = request(0, served.prompt(12), range(3))
    before = run(served.engine, one)
    optimizer = torch.optim.AdamW(served.reference.parameters(), lr=1e-2)

    def step() -> None:
        ids = torch.tensor([served.prompt(40)])
        served.reference(ids, labels=ids).loss.backward()
        optimizer.step()

    served.publish(1, step)
    assert addresses(served) == shared == {n: p.data_ptr() for n, p in served.reference.named_parameters()}
    after = run(served.engine, one)
    for place, completion in after.items():
        assert_logprobs(served, one, completion)
        assert abs(completion.logprobs_T[0] - before[place].logprobs_T[0]) > 1e-3


def test_an_alias_publication_moves_no_byte(tiny_model: Path) -> None:
    served = serve_alias(tiny_model)
    served.publisher.open(Version(1, 1))
    assert served.publisher.close() == 0


def test_only_whole_tensors_of_the_same_dtype_can_be_aliased(tiny_model: Path) -> None:
    atoms = atoms_of(tiny_model)
    weights = dict(load_model(tiny_model, torch.float32).named_parameters())
    trainer, engine = fsdp_layout(atoms, "float32", 1), replica_layout(atoms, "float32", 1)
    assert can_alias(trainer, engine, weights)
    assert not can_alias(trainer, replica_layout(atoms, "bfloat16", 1), weights)
    assert not can_alias(fsdp_layout(atoms, "float32", 2), replica_layout(atoms, "float32", 2), weights)
    local = dict.fromkeys(weights, Shard())
    assert not can_alias(trainer, engine, local), "FSDP moves and frees its shards, also those of one rank"


class Shard:
    """What tells a DTensor from a tensor."""

    def to_local(self) -> torch.Tensor:
        return torch.empty(0)


def test_an_alias_that_was_broken_fails_the_publication(tiny_model: Path) -> None:
    served = serve_alias(tiny_model)
    served.publisher.open(Version(1, 1))
    norm = served.reference.model.norm.weight
    norm.data = norm.data.clone()
    with pytest.raises(RuntimeError, match=r"model\.norm\.weight"):
        served.publisher.close()
    assert served.engine.version == Version(1, 0)


def test_local_fills_stay_at_their_addresses_and_give_the_new_model(tiny_model: Path) -> None:
    served = serve_local(tiny_model)
    fixed = addresses(served)
    assert not set(fixed.values()) & {tensor.data_ptr() for tensor in served.reference.parameters()}
    one = request(0, served.prompt(12), range(2), max_new_tokens=4)
    for number in range(1, 21):
        served.publish(number, lambda number=number: nudge(served.reference, seed=number))
        assert addresses(served) == fixed
        for completion in run(served.engine, one).values():
            assert_logprobs(served, one, completion)
            assert completion.version_spans[0].version == Version(1, number)


def test_a_local_engine_keeps_the_old_weights_until_the_transfer(tiny_model: Path) -> None:
    served = serve_local(tiny_model)
    one = request(0, served.prompt(12), range(2))
    before = run(served.engine, one)
    nudge(served.reference, seed=0)
    assert run(served.engine, one) == before
    moved = served.publisher.open(Version(1, 1)) or served.publisher.close()
    assert moved == sum(tensor.nbytes for tensor in engine_of(served).weights().values())
    assert run(served.engine, one) != before


def test_a_cast_rounds_once(tiny_model: Path) -> None:
    source = load_model(tiny_model, torch.float32)
    nudge(source, seed=3)
    engine = new_engine(tiny_model, dtype=torch.bfloat16)
    engine.allocate()
    publisher = Publisher(engine, filling(engine, lambda: named_weights(source, engine)))
    publisher.open(Version(1, 0))
    publisher.close()
    for name, tensor in engine.weights().items():
        assert tensor.dtype == torch.bfloat16
        assert tensor.view(torch.int16).equal(source.get_parameter(name).to(torch.bfloat16).view(torch.int16))
    completion = run(engine, request(0, tuple(range(2, 30)), (1, 2)))[0, 1]
    rounded = load_model(tiny_model, torch.float32)
    rounded.load_state_dict({name: tensor.float() for name, tensor in engine.weights().items()}, strict=False)
    served = Served(engine, rounded.eval(), publisher, None, bound=Bound(each=0.3))
    assert_logprobs(served, request(0, tuple(range(2, 30)), (1, 2)), completion)


@pytest.mark.parametrize("serve", [serve_alias, serve_local])
def test_a_tied_head_stays_tied(serve: Factory, tiny_model: Path) -> None:
    served = serve(tiny_model)
    assert "lm_head.weight" not in served.engine.layout().local(0)
    for number in (1, 2):
        served.publish(number, lambda number=number: nudge(served.reference, seed=number))
        module = engine_of(served)._module
        assert module.lm_head.weight.data_ptr() == module.model.embed_tokens.weight.data_ptr()
        assert module.lm_head.weight.equal(served.reference.lm_head.weight)


@pytest.mark.parametrize("serve", [serve_alias, serve_local])
def test_the_layout_is_that_of_the_checkpoint(serve: Factory, tiny_model: Path) -> None:
    served = serve(tiny_model)
    assert tensor_differences(served.engine.layout(), 0, dict(served.reference.named_parameters())) == []


def test_memory_is_flat_over_fifty_publications(tiny_model: Path) -> None:
    served = serve_local(tiny_model)
    weights = sum(tensor.nbytes for tensor in engine_of(served).weights().values())

    def publish(first: int, last: int) -> tuple[int, int]:
        for number in range(first, last):
            served.publish(number, lambda: nudge(served.reference, seed=0, scale=1e-3))
            run(served.engine, request(0, served.prompt(6), max_new_tokens=2))
        gc.collect()
        live = sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())
        return live, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    tensors, peak = publish(1, 11)
    tensors_later, peak_later = publish(11, 61)
    assert tensors_later == tensors
    assert peak_later - peak < 20 * weights, "fifty publications would keep fifty copies if each kept one"


def test_a_transfer_that_fails_halfway_leaves_the_engine_refusing_until_a_whole_publication(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve_local(tiny_model)
    engine = engine_of(served)
    publisher = Publisher(engine, filling(engine, lambda: named_weights(served.reference, engine)))
    nudge(served.reference, seed=1)
    publisher.open(Version(1, 1))
    with monkeypatch.context() as patch:
        patch.setattr(Views, "write_back", full_memory)
        with pytest.raises(RuntimeError, match="out of memory"):
            publisher.close()
    assert engine.version == Version(1, 0)
    one = request(0, served.prompt(5))
    engine.resume()
    for _ in range(2):
        with pytest.raises(EngineError, match="full publication must commit"):
            list(engine.generate([one], deadline_s=DEADLINE_S))
        with pytest.raises(RuntimeError, match="its transfer has begun"):
            publisher.cancel()

    publisher.open(Version(1, 2))
    publisher.cancel()
    with pytest.raises(EngineError, match="full publication must commit"):
        list(engine.generate([one], deadline_s=DEADLINE_S))
    publisher.open(Version(1, 2))
    publisher.close()
    completion = run(engine, one)[0, 0]
    assert completion.version_spans[0].version == Version(1, 2)
    assert_logprobs(served, one, completion)


def full_memory(views: Views) -> None:
    """In place of the last thing that a transfer does."""
    raise RuntimeError("out of memory")


def test_a_transfer_that_fails_before_it_writes_leaves_the_old_version_serving(tiny_model: Path) -> None:
    served = serve_local(tiny_model)
    engine, lost = engine_of(served), ["model.norm.weight"]

    def source() -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in named_weights(served.reference, engine).items() if name not in lost}

    publisher = Publisher(engine, filling(engine, source))
    publisher.open(Version(1, 1))
    with pytest.raises(ValueError, match=r"no tensor model\.norm\.weight at rank 0"):
        publisher.close()
    one = request(0, served.prompt(5))
    completion = run(engine, one)[0, 0]
    assert completion.version_spans[0].version == Version(1, 0)
    assert_logprobs(served, one, completion)
    lost.clear()
    nudge(served.reference, seed=1)
    publisher.open(Version(1, 2))
    publisher.close()
    assert_logprobs(served, one, run(engine, one)[0, 0])
