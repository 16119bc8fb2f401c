"""Faults in the midst of a publication into a real vLLM server: what the protocol promises happens, nothing is left."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from engine_helpers import DEADLINE_S, Served, nudge, published, reference_logprobs, request, run
from publication_phases import FEW_BYTES, PHASES, at_phase, train_until_killed
from servers import Servers, engine_transport, processes_of, vllm, worker_of
from test_server_process import all_gone

from stretto.engines import EngineError
from stretto.engines.server import ServerEngine
from stretto.models.checkpoint import load_model, load_tokenizer
from stretto.sync.windows import WINDOW_BYTES
from stretto.types import Completion, Version
from vllm_here import vllm_python

ASKED = request(0, range(5, 25), range(2))


@pytest.fixture
def server(vllm_servers: Servers, deep_model: Path) -> ServerEngine:
    """For the faults that a server survives."""
    return vllm_servers.server(deep_model)


@pytest.fixture
def served(server: ServerEngine, deep_model: Path, tmp_path: Path) -> Iterator[Served]:
    """Another engine at that server, with the weights of the reference."""
    engine = vllm().start(deep_model, url=server.base_url, options={}, log=tmp_path / "unused.log")
    made = join(engine, deep_model)
    yield made
    made.publisher.hang_up()
    engine.close()


def join(engine: ServerEngine, directory: Path, **options: Any) -> Served:
    """The engine with a trainer's weights in it, joined by many small buckets."""
    reference: Any = load_model(directory, torch.float32).eval()
    transport = engine_transport(vllm(), directory, engine, reference, **{"extra_bytes": FEW_BYTES, **options})
    return published(engine, reference, load_tokenizer(directory), transport)


def transport_of(served: Served) -> Any:
    return served.publisher._transport


def is_model(reference: Any, completion: Completion) -> bool:
    """Whether the log-probs are those of this model, but for rounding, and not of another or of a mixture."""
    expected = reference_logprobs(reference, ASKED.prompt_ids, completion.response_ids)
    return bool((torch.tensor(completion.logprobs_T) - expected).abs().max() < 3e-5)


def publishes_again(served: Served, number: int) -> None:
    """The next publication goes through, and gives the new model."""
    served.publish(number, lambda: nudge(served.reference, seed=number))
    assert is_model(served.reference, run(served.engine, ASKED)[0, 0])


def segments_of(processes: list[int]) -> set[Path]:
    """Shared memory that they have mapped."""
    lines = [line for one in processes for line in Path(f"/proc/{one}/maps").read_text().splitlines()]
    return {Path(line.split()[5]) for line in lines if "/dev/shm/" in line and "(deleted)" not in line}


def nothing_is_left(url: str, processes: list[int], segments: set[Path]) -> None:
    assert all_gone(processes)
    assert [one for one in segments if one.exists()] == []
    with socket.socket() as port:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind(("127.0.0.1", urlsplit(url).port))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("phase", PHASES)
def test_a_worker_that_is_killed_fails_the_publication_and_nothing_serves_or_is_left(
    phase: str, deep_model: Path, tmp_path: Path
) -> None:
    engine = vllm().start(deep_model, log=tmp_path / "server.log")
    try:
        served = join(engine, deep_model)
        processes = processes_of(engine)
        segments = segments_of(processes)
        worker = worker_of(engine)
        at_phase(transport_of(served), phase, lambda: os.kill(worker, signal.SIGKILL))
        # What arrived whole may be committed before the server itself has noticed.
        fails = suppress(RuntimeError) if phase == "before commit" else pytest.raises(RuntimeError, match="engine")
        with fails:
            served.publish(1, lambda: nudge(served.reference, seed=1))
        with pytest.raises(EngineError, match=r"full publication must commit|vLLM at http|neither committed"):
            list(engine.generate([ASKED], deadline_s=DEADLINE_S))
        served.publisher.hang_up()
    finally:
        engine.close()
    nothing_is_left(engine.base_url, processes, segments)


def killed_trainer(directory: Path, url: str | None, phase: str, log: Path) -> tuple[str, list[int], set[Path]]:
    """The server's address, processes and shared memory, as they were before the trainer was killed."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    trainer = context.Process(target=train_until_killed, args=(directory, url, phase, log, theirs))
    trainer.start()
    theirs.close()
    assert ours.poll(300), "the trainer did not come to its second publication"
    where, processes = ours.recv()
    segments = segments_of(processes)
    trainer.join(DEADLINE_S)
    assert trainer.exitcode == -signal.SIGKILL
    return where, processes, segments


@pytest.mark.timeout(600)
@pytest.mark.parametrize("phase", PHASES)
def test_a_trainer_that_is_killed_leaves_an_adopted_server_with_one_whole_version(
    phase: str, server: ServerEngine, deep_model: Path, tmp_path: Path
) -> None:
    killed_trainer(deep_model, server.base_url, phase, tmp_path / "unused.log")
    old: Any = load_model(deep_model, torch.float32).eval()
    new: Any = load_model(deep_model, torch.float32).eval()
    nudge(new, seed=1)
    engine = vllm().start(deep_model, url=server.base_url, options={}, log=tmp_path / "unused.log")
    try:
        completion = run(engine, ASKED)[0, 0]
        assert is_model(old if phase in ("called in", "buckets travel") else new, completion)
        served = join(engine, deep_model)
        publishes_again(served, 1)
        served.publisher.hang_up()
    finally:
        engine.close()


@pytest.mark.timeout(600)
def test_a_trainer_that_is_killed_takes_its_own_server_along(deep_model: Path, tmp_path: Path) -> None:
    vllm_python()  # skips the test here, which a process of its own could not
    nothing_is_left(*killed_trainer(deep_model, None, "buckets travel", tmp_path / "server.log"))


def corrupt(transport: Any, bucket: int | None) -> Callable[[], int]:
    """Flip a bit of the bucket that is sent after so many others; returns what counts those sent."""
    link = transport._session._link
    usual, sent = link.start, 0

    def start(slot: int, out: Any, into: Any) -> Any:
        nonlocal sent
        if sent == bucket:
            link._slots[slot][3] ^= 1
        sent += 1
        return usual(slot, out, into)

    link.start = start
    return lambda: sent


def test_a_corrupted_bucket_is_named_and_the_old_version_serves_on(served: Served) -> None:
    expected = run(served.engine, ASKED)
    corrupt(transport_of(served), 0)
    with pytest.raises(RuntimeError, match=r"engine rank 0.*changed on the way.*bucket 0 from process 0"):
        served.publish(1, lambda: nudge(served.reference, seed=1))
    assert run(served.engine, ASKED) == expected
    publishes_again(served, 2)


@pytest.mark.timeout(600)
def test_a_load_that_breaks_off_midway_refuses_until_a_whole_publication(heavy_model: Path, tmp_path: Path) -> None:
    """The first of two windows is with vLLM's loader when the second turns out corrupted."""
    size = sum(parameter.nbytes for parameter in load_model(heavy_model, torch.float32).parameters())
    assert WINDOW_BYTES < size < 1.5 * WINDOW_BYTES
    engine = vllm().start(heavy_model, log=tmp_path / "server.log")
    try:
        served = join(engine, heavy_model, extra_bytes=WINDOW_BYTES // 4)
        buckets = corrupt(transport_of(served), None)
        publishes_again(served, 1)
        corrupt(transport_of(served), buckets() - 1)
        with pytest.raises(RuntimeError, match=r"engine rank 0.*changed on the way"):
            served.publish(2, lambda: nudge(served.reference, seed=2))
        with pytest.raises(EngineError, match="full publication must commit"):
            list(engine.generate([ASKED], deadline_s=DEADLINE_S))
        publishes_again(served, 3)
        served.publisher.hang_up()
    finally:
        engine.close()


def test_an_engine_that_stops_answering_is_named_within_the_timeout_and_can_come_back(
    server: ServerEngine, deep_model: Path, tmp_path: Path
) -> None:
    engine = vllm().start(deep_model, url=server.base_url, options={}, log=tmp_path / "unused.log")
    worker = worker_of(server)
    served = join(engine, deep_model, timeout_s=10.0)
    at_phase(transport_of(served), "buckets travel", lambda: os.kill(worker, signal.SIGSTOP))
    try:
        with pytest.raises(RuntimeError, match=r"publication of .* failed.*process 1 was not heard of for 10 s"):
            served.publish(1, lambda: nudge(served.reference, seed=1))
    finally:
        os.kill(worker, signal.SIGCONT)
    publishes_again(served, 2)
    assert served.engine.version == Version(1, 2)
    served.publisher.hang_up()
    engine.close()
