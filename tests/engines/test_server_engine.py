"""The adapter between trainer and server, against a stand-in for SGLang: what a real server hardly ever does."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import DEADLINE_S, request, run
from servers import processes_of
from test_server_process import all_gone

from stretto.engines import EngineError
from stretto.engines.seeds import part_seed
from stretto.engines.sglang import Sglang, SglangEngine
from stretto.models.checkpoint import load_tokenizer
from stretto.types import Completion, FinishReason, Request, Version, VersionSpan

STAND_IN = Path(__file__).parent / "stand_in"
sys.path.append(str(STAND_IN))
import faults  # noqa: E402


@pytest.fixture(scope="module")
def servers(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Makes engines, each with a server of its own unless it is given a url."""
    opened: list[SglangEngine] = []
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(STAND_IN)

    def make(**changes: Any) -> SglangEngine:
        settings: dict[str, Any] = {
            "dtype": torch.float32,
            "eos_ids": (1,),
            "max_length": 256,
            "max_sequences": 4,
            "tp": 2,
            "layout": None,
            "options": {},
            "python": None,
            "url": None,
            "device": torch.device("cpu"),
            "start_timeout_s": 60.0,
            "log": tmp_path_factory.mktemp("log") / "server.log",
            "filters": True,
            **changes,
        }
        opened.append(SglangEngine(tiny_model, load_tokenizer(tiny_model), **settings))
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()
    os.environ.pop("PYTHONPATH")
    if path is not None:
        os.environ["PYTHONPATH"] = path


@pytest.fixture(scope="module")
def engine(servers: Any) -> SglangEngine:
    return servers()


def ids_of(one: Request, index: int = 0) -> tuple[int, ...]:
    """What the stand-in generates without a stop."""
    seed, start = part_seed(one.seeds[index], 0), len(one.prompt_ids)
    return tuple(faults.token(seed, start + at) for at in range(one.sampling.max_new_tokens))


def in_background(engine: SglangEngine, *requests: Request) -> tuple[threading.Thread, list[Any]]:
    """Generate in a thread; returns once something is at the server."""
    found: list[Any] = []

    def work() -> None:
        try:
            found.extend(engine.generate(requests, deadline_s=DEADLINE_S))
        except EngineError as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.1)
    return thread, found


def test_tokens_come_back_with_their_version_and_reason(engine: SglangEngine) -> None:
    one = request(3, (5, 6), (1, 2, 3), max_new_tokens=9)
    for index, completion in run(engine, one).items():
        ids = ids_of(one, index[1])
        assert completion.response_ids == ids
        assert completion.logprobs_T == (-0.5,) * 9
        assert completion.finish_reason is FinishReason.LENGTH
        assert completion.version_spans == (VersionSpan(engine.version, 0, 9),)


def test_a_publication_splits_a_response_and_changes_none_of_its_tokens(servers: Any) -> None:
    engine = servers()
    one = request(0, (5, 6, 7), range(9), max_new_tokens=60)
    thread, found = in_background(engine, one)
    engine.pause()
    engine.prepare(Version(1, 1))
    engine.enter("payload", 30.0)
    engine.commit(Version(1, 1))
    time.sleep(0.05)
    engine.resume()
    thread.join(DEADLINE_S)
    spans = {len(got.version_spans) for got in found}
    assert spans == {1, 2}, "four samples were under way, the others waited"
    for got in found:
        assert isinstance(got, Completion)
        assert got.response_ids == ids_of(one, got.index)
        assert got.version_spans[-1].version == Version(1, 1)
        assert got.version_spans[-1].stop == 60
    engine.close()


def test_a_stop_string_that_two_parts_share_ends_the_response(engine: SglangEngine, tiny_model: Path) -> None:
    from stretto.engines.server.dialect import Answer
    from stretto.engines.server.sample import Sample
    from stretto.engines.stopping import StopRule

    tokenizer = load_tokenizer(tiny_model)
    first, second = (tuple(tokenizer.encode(text)) for text in ("it is 4", "2.\nNext"))
    one = request(0, (5,), max_new_tokens=len(first) + len(second), stop=("42.", "N"))
    sample, rule = Sample(one, 0, (1,)), StopRule(tokenizer, (1,))

    def add(ids: tuple[int, ...], reason: FinishReason, number: int) -> FinishReason:
        answer = Answer(ids, (-1.0,) * len(ids), reason, "test")
        return sample.add(sample.part("x"), answer, Version(0, number), rule)

    assert add(first, FinishReason.ABORT, 0) is FinishReason.ABORT
    assert add(second, FinishReason.LENGTH, 1) is FinishReason.STOP
    got = sample.completion(FinishReason.STOP)
    assert tokenizer.decode(got.response_ids) == "it is 42."
    assert len(got.logprobs_T) == 9
    assert got.version_spans == (VersionSpan(Version(0, 0), 0, 7), VersionSpan(Version(0, 1), 7, 9))


def test_a_stop_id_and_the_end_of_sequence_are_asked_for(engine: SglangEngine) -> None:
    free = ids_of(request(0, (5,), (7,), max_new_tokens=20))
    one = request(0, (5,), (7,), max_new_tokens=20, stop_ids=(free[6],))
    got = run(engine, one)[0, 0]
    assert got.response_ids == free[: free.index(free[6]) + 1]
    assert got.finish_reason is FinishReason.STOP


def test_a_stop_id_on_the_last_allowed_token_is_a_stop_whatever_the_server_says(engine: SglangEngine) -> None:
    free = ids_of(request(0, (5,), (7,), max_new_tokens=1))
    got = run(engine, request(0, (5,), (7,), max_new_tokens=1, stop_ids=free))[0, 0]
    assert (got.response_ids, got.finish_reason) == (free, FinishReason.STOP)


WRONG = {
    faults.REFUSES: "answered 503: .*not today",
    faults.ABORTS: "aborted request 0, which nobody asked for",
    faults.NO_REASON: "does not say why the response ended",
    faults.STOPS_FOR_NOTHING: "ended without an end-of-sequence id, a stop id or a stop string",
    faults.TOO_SHORT: "ended at 7 tokens, where 8 were asked for",
    faults.LOGPROB_MISSING: "log-probs are of the tokens",
    faults.NOT_FINITE: "not finite",
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_answer_is_an_error_and_never_a_sample(engine: SglangEngine, fault: int) -> None:
    with pytest.raises(EngineError, match=WRONG[fault]):
        list(engine.generate([request(0, (fault,)), request(1, (5,))], deadline_s=DEADLINE_S))
    assert len(run(engine, request(1, (5,)))) == 1


def test_a_server_that_does_not_answer_ends_at_the_deadline(servers: Any) -> None:
    engine = servers()
    with pytest.raises(EngineError, match="1 samples were unfinished at the deadline"):
        list(engine.generate([request(0, (faults.HANGS,)), request(1, (5,), max_new_tokens=1)], deadline_s=0.5))
    with pytest.raises(EngineError, match=r"pause: what the server was generating did not end within 0\.2 s"):
        engine.pause(0.2)
    engine.close()


def test_a_server_that_dies_in_a_generation_is_named_with_its_log(servers: Any) -> None:
    engine = servers()
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"(?s)SGLang at http.*exit code 137; the end of its log .*server\.log"):
        list(engine.generate([request(0, (faults.DIES,))], deadline_s=DEADLINE_S))
    assert time.monotonic() - began < 30
    with pytest.raises(EngineError, match="is not to be reached"):
        engine.pause()
    engine.close()


def test_a_server_that_is_killed_while_paused_is_found_out_at_the_next_switch(servers: Any) -> None:
    engine = servers()
    engine.prepare(Version(1, 1))
    assert engine.process is not None
    server = processes_of(engine)[1:]
    os.kill(engine.process.id, signal.SIGKILL)
    assert all_gone(server), "it dies with its launcher"
    with pytest.raises(EngineError, match="is not to be reached"):
        engine.commit(Version(1, 1))
    engine.close()


def test_enter_says_what_the_server_said(engine: SglangEngine) -> None:
    engine.enter("payload of a publication, ä", 10.0)
    with pytest.raises(EngineError, match=r"answered 400: .*entered with fail"):
        engine.enter("fail", 10.0)


def test_a_server_that_does_not_start_is_named_with_its_log(servers: Any) -> None:
    with pytest.raises(EngineError, match=r"(?s)SGLang ended with exit code 1 before it served; .*it crashes: badly"):
        servers(options={"crash": "badly"})


@pytest.mark.parametrize(("name", "said"), [("tpsize", "nearest are tp_size"), ("tp_size", "set by the engine's")])
def test_options_are_checked_before_the_server_starts(servers: Any, name: str, said: str) -> None:
    with pytest.raises(ValueError, match=rf"engine\.sglang\.{name} is .*{said}"):
        servers(options={name: 4})


def test_an_adopted_server_outlives_its_adopter(engine: SglangEngine, servers: Any) -> None:
    adopter = servers(url=engine.base_url)
    assert adopter.process is None
    assert len(run(adopter, request(0, (5,), (1, 2)))) == 2
    adopter.pause()
    adopter.close()
    assert len(run(engine, request(0, (5,), (1, 2)))) == 2
    with pytest.raises(ValueError, match=r"engine\.sglang has options, but the server at .* already runs"):
        servers(url=engine.base_url, options={"dtype": "x"})


def test_memory_that_cannot_be_given_back_is_said_so(engine: SglangEngine) -> None:
    with pytest.raises(EngineError, match=r"set memory\.release, .* start it with --enable-memory-saver"):
        engine.release_memory("kv")


def test_stop_strings_need_the_servers_tokenizer(servers: Any) -> None:
    engine = servers(options={"skip_tokenizer_init": True})
    with pytest.raises(ValueError, match=r"leave out engine\.sglang\.skip_tokenizer_init"):
        engine.generate([request(0, (5,), stop=("x",))], deadline_s=1.0)
    assert len(run(engine, request(0, (5,)))) == 1
    engine.close()


def test_min_p_is_refused_in_the_deterministic_mode_whose_scheduler_it_would_end() -> None:
    sampling = request(0, (5,), min_p=0.1).sampling
    said = Sglang(tp=1, options={"enable_deterministic_inference": True}).wrong_sampling(sampling)
    assert said is not None
    assert "leave out engine.sglang.enable_deterministic_inference" in said
    assert Sglang(tp=1, options={}).wrong_sampling(sampling) is None


def test_a_seed_and_a_position_say_everything_of_a_parts_seed() -> None:
    seeds = {part_seed(seed, position) for seed in (0, 1, 2**63 + 7, 2**64 - 1) for position in range(50)}
    assert len(seeds) == 200
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert part_seed(5, 3) == part_seed(5, 3)
