"""Publications into other processes through memory that both see."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from inside_engine import EngineRanks
from map_oracle import Side, local_tensors, random_values
from test_execute import WEIGHTS, shifted
from torch import Tensor

from ranks import Ranks
from stretto.sync import reread, windows
from stretto.sync.layout import Atoms
from stretto.sync.layouts import EngineSizes, loader_layout
from stretto.sync.links import SharedReceiver, SharedSender
from stretto.sync.plan import Plan
from stretto.sync.session import Destination, Options, Source
from stretto.sync.transports import EngineTransport
from stretto.types import Version
from stretto.world import World

ATOMS = Atoms.of(WEIGHTS)
ENGINE = Side("engine", EngineSizes("sglang", tp=2, vocab_multiple=4), dtype="float32")
ALONE = World(0, 1, torch.device("cpu"))
OPTIONS = Options("ipc", "auto", 4096, True, 30.0)


def engine_tensors(seed: int) -> list[dict[str, Tensor]]:
    return [local_tensors(WEIGHTS, ENGINE, rank, random_values(WEIGHTS, seed)) for rank in range(2)]


def blank(tensors: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    return [{name: torch.full_like(one, torch.nan) for name, one in held.items()} for held in tensors]


def files(seed: int) -> dict[str, Tensor]:
    return local_tensors(WEIGHTS, Side("checkpoint", dtype="float32"), 0, random_values(WEIGHTS, seed))


def whole_engine(**settings: Any) -> EngineRanks:
    """Two ranks that load whole tensors by themselves."""
    return EngineRanks(blank([files(0), files(0)]), derived=("lm_head is packed",), **settings)


def destination(engine: EngineRanks | None) -> Destination:
    return Destination(engine, 2, ENGINE.layout(ATOMS), loader_layout(ATOMS, "float32", 2))


def trainer(side: Side, rank: int, seed: Callable[[], int]) -> Source:
    def weights() -> dict[str, Tensor]:
        return local_tensors(WEIGHTS, side, rank, shifted(random_values(WEIGHTS, seed()), side))

    return Source(side.layout(ATOMS), weights)


def wrong(engine: EngineRanks, expected: list[dict[str, Tensor]]) -> list[str]:
    return [
        f"{rank}: {name}"
        for rank in range(2)
        for name, one in engine.tensors(rank).items()
        if not torch.equal(one.nan_to_num(), expected[rank][name].float().nan_to_num())
    ]


@pytest.mark.parametrize("kind", ["ipc", "collective"])
@pytest.mark.parametrize(("checksums", "extra_bytes"), [(False, 4096), (True, 4096), (False, 2**20)])
def test_every_rank_of_an_engine_gets_its_shards_at_their_addresses(
    opened: list[Any], checksums: bool, extra_bytes: int, kind: Literal["ipc", "collective"]
) -> None:
    engine = EngineRanks(blank(engine_tensors(0)))
    opened.append(engine)
    step = 0
    options = Options(kind, "auto", extra_bytes, checksums, 30.0)
    transport = EngineTransport(ALONE, trainer(Side("fsdp", 1), 0, lambda: step), destination(engine), options)
    opened.append(transport)
    assert transport.refused == []
    addresses = [engine.addresses(rank) for rank in range(2)]
    for step in range(3):
        written = transport.transfer(Version(0, step))
        assert written == sum(
            int(one.isfinite().sum()) * one.element_size() for held in engine_tensors(0) for one in held.values()
        )
        assert wrong(engine, engine_tensors(step)) == []
    assert [engine.addresses(rank) for rank in range(2)] == addresses


@pytest.mark.parametrize("kind", ["ipc", "collective"])
@pytest.mark.parametrize("derived", [(), ("lm_head is packed",)])
def test_a_tensor_with_another_value_is_found_when_its_turn_comes(
    opened: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    kind: Literal["ipc", "collective"],
    derived: tuple[str, ...],
) -> None:
    monkeypatch.setattr(reread, "SAMPLE_BYTES", 256)
    engine = EngineRanks(engine_tensors(1), derived=derived)
    opened.append(engine)
    source, options = trainer(Side("fsdp", 1), 0, lambda: 1), Options(kind, "auto", 4096, False, 30.0)
    transport = EngineTransport(ALONE, source, destination(engine), options)
    opened.append(transport)
    assert bool(transport.refused) == bool(derived)
    rounds = len(windows.windows(Plan.of(source.layout, ENGINE.layout(ATOMS), [1, 2]), 256))
    assert rounds > 2
    assert [name for number in range(rounds) for name in transport.reread(number)] == []
    changed = sorted(engine_tensors(1)[1])[::3]
    for name in changed:
        engine.change(1, name)
    assert sorted(name for number in range(rounds) for name in transport.reread(number)) == changed
    assert [name for number in range(rounds) for name in transport.reread(rounds + number)] != []


def test_a_parameter_that_was_given_up_for_a_packed_copy_is_loaded_and_not_compared(opened: list[Any]) -> None:
    held = engine_tensors(1)
    name = sorted(name for name, one in held[0].items() if one.ndim == 2)[0]
    held[0][name] = torch.empty(0)
    engine = EngineRanks(held)
    opened.append(engine)
    source = trainer(Side("fsdp", 1), 0, lambda: 1)
    transport = EngineTransport(ALONE, source, destination(engine), OPTIONS)
    opened.append(transport)
    assert transport.refused == [f"{name} was given up for a packed copy"]
    assert transport.unlike == []
    assert transport.reread(None) == []
    engine.change(1, name)
    assert transport.reread(None) == [name]


def test_an_engine_with_derived_tensors_gets_whole_ones_through_its_loader(
    opened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "WINDOW_BYTES", 2048)
    engine = whole_engine(window=2048)
    opened.append(engine)
    step = 0
    transport = EngineTransport(ALONE, trainer(Side("fsdp", 1), 0, lambda: step), destination(engine), OPTIONS)
    opened.append(transport)
    assert any("lm_head is packed" in reason for reason in transport.refused)
    for step in range(2):
        transport.transfer(Version(0, step))
        assert wrong(engine, [files(step), files(step)]) == []


def test_a_stream_of_whole_tensors_fills_an_engine(opened: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "WINDOW_BYTES", 2048)
    engine = EngineRanks(blank(engine_tensors(0)), window=2048)
    opened.append(engine)
    layout = Side("checkpoint", dtype="float32").layout(ATOMS)
    source = Source(layout, dict, lambda: reversed(files(3).items()))
    transport = EngineTransport(ALONE, source, destination(engine), OPTIONS)
    opened.append(transport)
    transport.transfer(Version(0, 1))
    assert wrong(engine, engine_tensors(3)) == []


def from_two_ranks(
    world: World, side: Side, write: Literal["auto", "loader"], kind: Literal["ipc", "collective"]
) -> list[str]:
    """The first rank leads the engine."""
    multiprocessing.current_process()._config["daemon"] = False  # a daemon may have no children
    held = engine_tensors(0) if write == "auto" else [files(0), files(0)]
    engine = EngineRanks(blank(held)) if world.first else None
    step = 0
    options = Options(kind, write, 4096, True, 60.0)
    transport = EngineTransport(world, trainer(side, world.rank, lambda: step), destination(engine), options)
    found: list[str] = []
    for step in range(2):
        transport.transfer(Version(0, step))
        if engine is not None:
            found += wrong(engine, engine_tensors(step) if write == "auto" else [files(step), files(step)])
    transport.close()
    if engine is not None:
        engine.close()
    return found


@pytest.mark.parametrize("kind", ["ipc", "collective"])
@pytest.mark.parametrize("write", ["auto", "loader"])
def test_two_ranks_of_a_trainer_send_what_each_has(pair: Ranks, write: str, kind: str) -> None:
    assert pair.run(from_two_ranks, Side("fsdp", 2), write, kind) == [[], []]


@pytest.mark.parametrize("write", ["direct", "loader"])
def test_a_trainer_whose_weights_are_missing_writes_nothing(opened: list[Any], write: str) -> None:
    held = {"direct": engine_tensors, "loader": lambda seed: [files(seed), files(seed)]}[write]
    engine = EngineRanks(held(7), derived=("lm_head is packed",) if write == "loader" else ())
    opened.append(engine)
    good = trainer(Side("fsdp", 1), 0, lambda: 1)
    broken = False
    source = Source(good.layout, lambda: {} if broken else good.weights())
    transport = EngineTransport(ALONE, source, destination(engine), OPTIONS)
    opened.append(transport)
    broken = True
    with pytest.raises(RuntimeError, match=r"publication of .* failed.*has no tensor"):
        transport.transfer(Version(0, 1))
    assert not transport.touched, "the old version may serve on"
    assert wrong(engine, held(7)) == []
    broken = False
    transport.transfer(Version(0, 2))
    assert wrong(engine, held(1)) == [], "and the next publication goes through"


def test_an_engine_rank_that_dies_midway_is_named_and_may_be_mixed(opened: list[Any]) -> None:
    engine = EngineRanks(engine_tensors(7))
    opened.append(engine)
    good = trainer(Side("fsdp", 1), 0, lambda: 1)
    reached = threading.Event()

    def weights() -> dict[str, Tensor]:
        if reached.is_set():
            os.kill(engine.processes[1].pid, signal.SIGKILL)
        return good.weights()

    transport = EngineTransport(ALONE, Source(good.layout, weights), destination(engine), OPTIONS)
    opened.append(transport)
    reached.set()
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 1 ended in receive|process \d+ is gone"):
        transport.transfer(Version(0, 1))
    assert time.monotonic() - begin < 15.0
    assert transport.touched, "a rank that does not say may have been written into"


def test_a_corrupted_bucket_is_refused_by_its_name(opened: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EngineRanks(engine_tensors(7))
    opened.append(engine)
    transport = EngineTransport(ALONE, trainer(Side("fsdp", 1), 0, lambda: 1), destination(engine), OPTIONS)
    opened.append(transport)
    link = transport._session._link
    usual = link.start

    def flip(slot: int, out: Any, into: Any) -> Any:
        link._slots[slot][3] ^= 1
        return usual(slot, out, into)

    monkeypatch.setattr(link, "start", flip)
    with pytest.raises(RuntimeError, match=r"engine rank 0.*changed on the way.*bucket 0 from process 0"):
        transport.transfer(Version(0, 1))
    assert transport.touched
    transport.transfer(Version(0, 2))
    assert wrong(engine, engine_tensors(1)) == []


def test_a_loader_that_moves_a_parameter_is_named_for_captured_graphs_would_miss_it(opened: list[Any]) -> None:
    engine = whole_engine(moves=True)
    opened.append(engine)
    transport = EngineTransport(ALONE, trainer(Side("fsdp", 1), 0, lambda: 1), destination(engine), OPTIONS)
    opened.append(transport)
    with pytest.raises(RuntimeError, match=r"engine rank 0.*moved parameters to other addresses: [\w.]+"):
        transport.transfer(Version(0, 1))
    assert transport.touched


@pytest.mark.parametrize("buckets", range(1, 8))
def test_slots_are_free_again_after_any_number_of_buckets(buckets: int) -> None:
    """The answers of a receiver come in the order of its buckets, of which either slot may have the last."""
    ours, theirs = multiprocessing.Pipe()
    connecting = threading.Thread(target=receive_buckets, args=(theirs, buckets))
    connecting.start()
    sender = SharedSender(ALONE.device, {1: ours}, 128, timeout_s=10.0)
    for index in range(buckets):
        sender.buffer("out", index % 2, 1, 64).fill_(index)
        sender.start(index % 2, (1, []), None)
    sender.settle()
    connecting.join(10.0)
    assert not connecting.is_alive()
    sender.close()


def receive_buckets(connection: Any, buckets: int) -> None:
    receiver = SharedReceiver(ALONE.device, {0: connection}, timeout_s=10.0)
    for index in range(buckets):
        (work,) = receiver.start(index % 2, None, (0, []))
        work.wait()
        assert (receiver.buffer("in", index % 2, 0, 64) == index).all()
        receiver.release(index % 2, 0)
