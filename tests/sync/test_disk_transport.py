"""Publications through a directory, into processes that stand where an engine's ranks are."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from inside_engine import EngineRanks
from llama_engine import Llama
from map_oracle import Side
from test_engine_transport import (
    ALONE,
    ATOMS,
    destination,
    files,
    trainer,
    wrong,
)
from torch import Tensor

from ranks import Ranks
from stretto.sync import windows
from stretto.sync.layouts import checkpoint_layout
from stretto.sync.session import Source
from stretto.sync.transports import DiskTransport
from stretto.sync.transports.files import FileOptions
from stretto.types import Version
from stretto.world import World

TARGET = checkpoint_layout(ATOMS, "float32")
CHECKPOINT = Side("checkpoint", dtype="float32").layout(ATOMS)


def options(*, delta: bool = False, timeout_s: float = 30.0) -> FileOptions:
    return FileOptions(TARGET, delta, 4096, timeout_s)


def holding(seed: int) -> EngineRanks:
    """Two ranks that load whole tensors by themselves."""
    return EngineRanks([files(seed), files(seed)], window=2048)


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineRanks]:
    """For the tests that do not break it."""
    made = holding(9)
    yield made
    made.close()


@pytest.fixture(scope="module")
def llama(tiny_model: Path) -> Iterator[Llama]:
    made = Llama(tiny_model)
    yield made
    made.engine.close()


def changing(values: Callable[[], dict[str, Tensor]]) -> Source:
    """A trainer that holds the checkpoint's tensors."""
    return Source(CHECKPOINT, values)


def on_disk(llama: Llama, directory: Path, *, delta: bool = True) -> DiskTransport:
    return DiskTransport(ALONE, llama.source(), llama.destination(), llama.options(delta), directory)


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir() if not entry.name.startswith(".stretto"))


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "WINDOW_BYTES", 2048)


@pytest.mark.parametrize("delta", [False, True])
def test_every_version_reaches_every_rank_and_only_what_is_needed_lies_there(
    opened: list[Any], tmp_path: Path, engine: EngineRanks, delta: bool
) -> None:
    step = 0
    transport = DiskTransport(
        ALONE, trainer(Side("fsdp", 1), 0, lambda: step), destination(engine), options(delta=delta), tmp_path / "sync"
    )
    opened.append(transport)
    for step in range(3):
        sent = transport.transfer(Version(1, step))
        assert wrong(engine, [files(step)] * 2) == []
        assert transport.touched
        assert names(tmp_path / "sync") == [f"1-{step}"], "random values have no delta"
        assert transport.full_bytes == sum(one.nbytes for one in files(0).values()) <= sent
    transport.close()
    assert list((tmp_path / "sync").iterdir()) == []


def test_a_parcel_is_a_checkpoint_that_others_can_read(opened: list[Any], tmp_path: Path, engine: EngineRanks) -> None:
    from safetensors.torch import load_file

    transport = DiskTransport(ALONE, trainer(Side("fsdp", 1), 0, lambda: 4), destination(engine), options(), tmp_path)
    opened.append(transport)
    transport.transfer(Version(2, 7))
    found = [load_file(file) for file in sorted((tmp_path / "2-7").glob("*.safetensors"))]
    assert len(found) > 1, "in windows"
    held = {name: one for part in found for name, one in part.items()}
    assert held.keys() == files(4).keys()
    assert all(torch.equal(one, held[name]) for name, one in files(4).items())


def test_deltas_are_short_and_exact_until_a_whole_parcel_pays(opened: list[Any], tmp_path: Path, llama: Llama) -> None:
    transport = on_disk(llama, tmp_path)
    opened.append(transport)
    sizes = []
    for step in range(30):
        sizes.append(transport.transfer(Version(1, step)))
        assert llama.wrong() == []
        llama.change(step)
    assert sizes[1] < transport.full_bytes / 10, "only what changed"
    wholes = [step for step, size in enumerate(sizes) if size >= transport.full_bytes]
    assert len(wholes) > 1, "after deltas as long as a whole one comes a whole one"
    assert len(names(tmp_path)) == 30 - wholes[-1], "and those before it are gone"


def test_a_parcel_without_any_change_has_no_tensors(opened: list[Any], tmp_path: Path, engine: EngineRanks) -> None:
    transport = DiskTransport(ALONE, changing(lambda: files(3)), destination(engine), options(delta=True), tmp_path)
    opened.append(transport)
    transport.transfer(Version(1, 0))
    transport.transfer(Version(1, 1))
    assert [entry.name for entry in (tmp_path / "1-1").glob("*.safetensors")] == []
    assert wrong(engine, [files(3)] * 2) == []


def test_an_engine_that_was_started_anew_reads_a_delta(opened: list[Any], tmp_path: Path, llama: Llama) -> None:
    transport = on_disk(llama, tmp_path)
    opened.append(transport)
    transport.transfer(Version(1, 0))
    anew = EngineRanks([{name: torch.zeros_like(one) for name, one in llama.engine.tensors(0).items()}])
    opened.append(anew)
    reader: Any = transport._reader
    reader._engine = anew
    llama.change(1)
    assert transport.transfer(Version(1, 1)) < transport.full_bytes / 10
    assert all(torch.equal(one, llama.values[name]) for name, one in anew.tensors(0).items() if "lm_head" not in name)


def test_a_base_that_is_gone_makes_the_next_parcel_whole(opened: list[Any], tmp_path: Path, llama: Llama) -> None:
    transport = on_disk(llama, tmp_path)
    opened.append(transport)
    transport.transfer(Version(1, 0))
    (tmp_path / "1-0").rename(tmp_path / "elsewhere")
    llama.change(1)
    assert transport.transfer(Version(1, 1)) >= transport.full_bytes
    assert llama.wrong() == []


def corrupt(transport: DiskTransport, when: Iterator[bool], file: Callable[[], Path]) -> None:
    """Flip a bit of a file just before the engine is called in."""
    reader: Any = transport._reader
    usual = reader._engine

    class Meddling:
        def enter(self, payload: str, timeout_s: float) -> None:
            if next(when):
                path = file()
                data = bytearray(path.read_bytes())
                data[-1] ^= 1
                path.write_bytes(data)
            usual.enter(payload, timeout_s)

    reader._engine = Meddling()


@pytest.mark.parametrize("delta", [False, True])
def test_a_corrupted_tensor_is_named_and_the_old_version_serves_on(
    opened: list[Any], tmp_path: Path, llama: Llama, delta: bool
) -> None:
    transport = on_disk(llama, tmp_path, delta=delta)
    opened.append(transport)
    transport.transfer(Version(1, 0))
    before = llama.engine.tensors(0)
    corrupt(transport, iter([True, False, False]), lambda: sorted((tmp_path / "1-1").glob("*.safetensors"))[0])
    llama.change(2)
    with pytest.raises(
        RuntimeError, match=r"engine rank 0, verify: .*1-1: wrong (digest|bytes) of .*; the engines serve"
    ):
        transport.transfer(Version(1, 1))
    assert not transport.touched
    assert all(torch.equal(one, before[name]) for name, one in llama.engine.tensors(0).items())
    assert transport.transfer(Version(1, 2)) >= transport.full_bytes, "after a failure comes a whole one"
    assert names(tmp_path) == ["1-2"]
    assert llama.wrong() == []


def test_another_manifest_than_the_published_one_is_refused(
    opened: list[Any], tmp_path: Path, engine: EngineRanks
) -> None:
    transport = DiskTransport(ALONE, changing(lambda: files(1)), destination(engine), options(), tmp_path)
    opened.append(transport)
    before = [engine.tensors(rank)["embed"].tolist() for rank in range(2)]
    corrupt(transport, iter([True]), lambda: tmp_path / "1-0" / "parcel.json")
    with pytest.raises(RuntimeError, match="1-0 is not the parcel that was published: its manifest has another digest"):
        transport.transfer(Version(1, 0))
    assert not transport.touched
    assert [engine.tensors(rank)["embed"].tolist() for rank in range(2)] == before


def test_a_loader_that_fails_leaves_the_engine_touched(opened: list[Any], tmp_path: Path) -> None:
    held = files(9)
    lacking = sorted(held)[-1]
    engine = EngineRanks([held, {name: one for name, one in held.items() if name != lacking}], window=2048)
    opened.append(engine)
    transport = DiskTransport(ALONE, changing(lambda: files(1)), destination(engine), options(), tmp_path)
    opened.append(transport)
    with pytest.raises(RuntimeError, match=f"engine rank 1, load: KeyError: '{lacking}'") as caught:
        transport.transfer(Version(1, 0))
    assert transport.touched
    assert "serve" not in str(caught.value)


def test_an_engine_rank_that_dies_is_told_of(opened: list[Any], tmp_path: Path) -> None:
    engine = holding(9)
    opened.append(engine)
    killed = threading.Event()

    def values() -> dict[str, Tensor]:
        if killed.is_set():
            os.kill(engine.processes[1].pid, signal.SIGKILL)
        return files(1)

    transport = DiskTransport(ALONE, changing(values), destination(engine), options(), tmp_path)
    opened.append(transport)
    killed.set()
    with pytest.raises((RuntimeError, BrokenPipeError), match=r"rank 1 of the engine died|Broken pipe"):
        transport.transfer(Version(1, 0))
    assert not transport.touched


def test_an_engine_that_cannot_see_the_directory_is_told_of(
    opened: list[Any], tmp_path: Path, engine: EngineRanks
) -> None:
    transport = DiskTransport(
        ALONE, changing(lambda: files(1)), destination(engine), options(timeout_s=5.0), tmp_path / "here"
    )
    opened.append(transport)
    reader: Any = transport._reader

    class Elsewhere:
        def enter(self, payload: str, timeout_s: float) -> None:
            call = json.loads(payload) | {"parcel": "/nowhere/1-0"}
            engine.enter(json.dumps(call), timeout_s)

    reader._engine = Elsewhere()
    with pytest.raises(RuntimeError, match=r"engine rank 0 left no answer in .*does it see that directory"):
        transport.transfer(Version(1, 0))
    assert not transport.touched


def full_disk(directory: str) -> tuple[str, bool, list[str], list[str]]:
    """A real limit on the size of files, in a process of its own: what the transport says, and what is left."""
    engine = holding(9)
    folder = Path(directory)
    transport = DiskTransport(ALONE, changing(lambda: files(1)), destination(engine), options(), folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    said = ""
    try:
        transport.transfer(Version(1, 0))
    except RuntimeError as error:
        said = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    touched = transport.touched
    transport.transfer(Version(1, 1))
    found = wrong(engine, [files(1)] * 2)
    transport.close()
    engine.close()
    return said, touched, found, [entry.name for entry in folder.iterdir()]


def in_a_process(world: World, directory: str) -> Any:
    multiprocessing.current_process()._config["daemon"] = False  # a daemon may have no children
    windows.WINDOW_BYTES = 2048
    return full_disk(directory)


def test_a_directory_without_room_is_named_and_the_old_version_serves_on(alone: Ranks, tmp_path: Path) -> None:
    ((said, touched, found, left),) = alone.run(in_a_process, str(tmp_path))
    assert f"cannot write to {tmp_path} (sync.directory): File too large" in said
    assert "the engines serve the version before it on" in said
    assert not touched
    assert found == [], "and the next one goes through"
    assert left == []


def from_two_ranks(world: World, directory: str, streams: bool) -> list[str]:
    """The second rank leads the engine; the first one writes."""
    multiprocessing.current_process()._config["daemon"] = False
    windows.WINDOW_BYTES = 2048
    engine = holding(9) if not world.first else None
    step = 0
    source = trainer(Side("fsdp", 2), world.rank, lambda: step)
    if streams:
        source = Source(CHECKPOINT, dict, lambda: reversed(files(step).items()))
    transport = DiskTransport(world, source, destination(engine), options(delta=True), Path(directory))
    found: list[str] = []
    for step in range(2):
        sent = transport.transfer(Version(0, step))
        assert bool(sent) == world.first
        if engine is not None:
            found += wrong(engine, [files(step)] * 2)
    transport.close()
    if engine is not None:
        engine.close()
    return found


@pytest.mark.parametrize("streams", [False, True])
def test_any_rank_of_a_trainer_may_lead_the_engine(pair: Ranks, tmp_path: Path, streams: bool) -> None:
    assert pair.run(from_two_ranks, str(tmp_path), streams) == [[], []]
    assert list(tmp_path.iterdir()) == []


def without_room_for_the_first(world: World, directory: str) -> str:
    multiprocessing.current_process()._config["daemon"] = False
    windows.WINDOW_BYTES = 2048
    engine = holding(9) if world.first else None
    source = trainer(Side("fsdp", 2), world.rank, lambda: 1)
    transport = DiskTransport(world, source, destination(engine), options(), Path(directory))
    if world.first:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    try:
        transport.transfer(Version(0, 1))
    except RuntimeError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        transport.close()
        if engine is not None:
            engine.close()
    return "it went through"


def test_an_error_of_the_rank_that_writes_is_raised_on_every_rank(pair: Ranks, tmp_path: Path) -> None:
    for said in pair.run(without_room_for_the_first, str(tmp_path)):
        assert f"trainer rank 0: cannot write to {tmp_path}" in said


def test_a_directory_has_one_owner_and_what_a_dead_one_left_is_removed(
    opened: list[Any], tmp_path: Path, engine: EngineRanks
) -> None:
    (tmp_path / "7-3").mkdir()
    (tmp_path / "7-3" / "parcel.json").write_text("{}")
    (tmp_path / ".writing-7-4").mkdir()
    (tmp_path / "7-5").mkdir()
    (tmp_path / "mine.txt").write_text("not a parcel")
    transport = DiskTransport(ALONE, changing(lambda: files(1)), destination(engine), options(), tmp_path)
    opened.append(transport)
    assert names(tmp_path) == ["7-5", "mine.txt"], "what is no parcel is not ours"
    with pytest.raises(ValueError, match="is in use by another process"):
        DiskTransport(ALONE, changing(lambda: files(1)), destination(engine), options(), tmp_path)


def dies_midway(directory: str) -> None:
    """A trainer that is killed while it writes its second file."""
    windows.WINDOW_BYTES = 2048
    transport: Any = DiskTransport(ALONE, changing(lambda: files(1)), destination(None), options(), Path(directory))
    usual = transport._shelf.put

    def put(name: str, file: str, body: bytes) -> None:
        if file != "window-00000.safetensors":
            os.kill(os.getpid(), signal.SIGKILL)
        usual(name, file, body)

    transport._shelf.put = put
    transport.transfer(Version(1, 0))


def test_what_a_killed_trainer_left_is_gone_with_the_next_start(
    opened: list[Any], tmp_path: Path, engine: EngineRanks
) -> None:
    trainer = multiprocessing.get_context("spawn").Process(target=dies_midway, args=(str(tmp_path),))
    trainer.start()
    trainer.join(60)
    assert trainer.exitcode == -signal.SIGKILL
    assert names(tmp_path) == [".writing-1-0"]
    transport = DiskTransport(ALONE, changing(lambda: files(1)), destination(engine), options(), tmp_path)
    opened.append(transport)
    assert names(tmp_path) == []
    transport.transfer(Version(2, 0))
    assert wrong(engine, [files(1)] * 2) == []


def test_a_directory_that_cannot_be_made_is_an_error_before_the_first_step(opened: list[Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot write parcels to .*file/below: Not a directory"):
        DiskTransport(ALONE, changing(lambda: files(1)), destination(None), options(), tmp_path / "file" / "below")
