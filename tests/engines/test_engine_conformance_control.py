"""What every rollout engine must do while it generates: abort, pause, resume, and take new weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch
from engine_helpers import (
    DEADLINE_S,
    Factory,
    Served,
    assert_logprobs,
    change_final_norm,
    nudge,
    reference_logprobs,
    request,
    run,
)

from stretto.engines import EngineError
from stretto.engines.inbox import Bounds, Inbox
from stretto.types import Completion, FinishReason, Request, Version, VersionSpan


@pytest.fixture
def served(serve: Factory, tiny_model: Path) -> Served:
    return serve(tiny_model)


def by_place(completions: list[Completion]) -> dict[tuple[int, int], Completion]:
    found = {(one.request_id, one.index): one for one in completions}
    assert len(found) == len(completions)
    return found


def assert_begins_like(served: Served, part: Completion, whole: Completion) -> None:
    """`part` is the beginning of `whole`, with a log-prob and a version for each token."""
    length = len(part.response_ids)
    assert part.response_ids == whole.response_ids[:length]
    if length:
        served.bound.check(part.logprobs_T, whole.logprobs_T[:length])
    assert sum(span.stop - span.start for span in part.version_spans) == length


@contextmanager
def generating(served: Served, requests: list[Request]) -> Iterator[Queue[Completion | Exception]]:
    """Generate in a thread that goes on after its first completion only when the caller is about to act."""
    completions: Queue[Completion | Exception] = Queue()
    acting = threading.Event()

    def work() -> None:
        try:
            for one in served.engine.generate(requests, deadline_s=DEADLINE_S):
                completions.put(one)
                assert acting.wait(DEADLINE_S)
        except Exception as error:
            completions.put(error)

    thread = threading.Thread(target=work)
    thread.start()
    first = completions.get(timeout=DEADLINE_S)
    completions.put(first)
    acting.set()
    try:
        yield completions
    finally:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def drained(completions: Queue[Completion | Exception]) -> dict[tuple[int, int], Completion]:
    found = []
    while not completions.empty():
        one = completions.get()
        if isinstance(one, Exception):
            raise one
        found.append(one)
    return by_place(found)


def test_abort_of_one_request_between_yields_leaves_the_others_alone(serve: Factory, tiny_model: Path) -> None:
    served = serve(tiny_model, max_sequences=4)
    length = 2 * served.long  # a server on a busy machine must not be at the end before the abort is
    short, victim = (
        request(0, served.prompt(9), (1, 2), max_new_tokens=16),
        request(1, served.prompt(12), (3, 4, 5, 6, 7), max_new_tokens=length),
    )
    other = request(2, served.prompt(17), (8, 9), max_new_tokens=12)
    whole = run(served.engine, short, victim, other)

    completions, stream = [], served.engine.generate([short, victim, other], deadline_s=DEADLINE_S)
    completions.append(next(stream))
    served.engine.abort([1])
    completions += stream
    found = by_place(completions)
    assert set(found) == set(whole)
    for place, one in found.items():
        if place[0] == 1:
            assert one.finish_reason is FinishReason.ABORT
            assert len(one.response_ids) < length
            assert_begins_like(served, one, whole[place])
        else:
            assert one.response_ids == whole[place].response_ids
            assert one.finish_reason is FinishReason.LENGTH
    assert any(found[1, index].response_ids for index in range(5)), "some of the group had begun"
    assert found[1, 4].response_ids == found[1, 4].logprobs_T == found[1, 4].version_spans == ()


def test_abort_of_all_yields_every_sample_waiting_ones_too(serve: Factory, tiny_model: Path) -> None:
    served = serve(tiny_model, max_sequences=2)
    requests = [request(i, served.prompt(5 + i), range(4), max_new_tokens=1 if i == 0 else 50) for i in range(6)]
    stream = served.engine.generate(requests, deadline_s=DEADLINE_S)
    completions = [next(stream)]
    served.engine.abort()
    completions += stream
    assert set(by_place(completions)) == {(i, j) for i in range(6) for j in range(4)}
    assert {one.finish_reason for one in completions if one.request_id} == {FinishReason.ABORT}
    assert len(run(served.engine, requests[0])) == 4, "an abort does not outlive the generation it ended"


def test_an_abort_before_the_first_token_is_kept(served: Served) -> None:
    stream = served.engine.generate([request(0, served.prompt(5), range(3))], deadline_s=DEADLINE_S)
    served.engine.abort([0])
    assert [(one.finish_reason, one.response_ids) for one in stream] == [(FinishReason.ABORT, ())] * 3


def test_abort_from_another_thread(served: Served) -> None:
    requests = [request(0, served.prompt(5), (1,), max_new_tokens=1)]
    requests += [request(i, served.prompt(8), (i, i + 1), max_new_tokens=served.long) for i in (1, 2)]
    with generating(served, requests) as completions:
        served.engine.abort([1])
    found = drained(completions)
    assert {place: one.finish_reason for place, one in found.items()} == {
        (0, 0): FinishReason.LENGTH,
        (1, 0): FinishReason.ABORT,
        (1, 1): FinishReason.ABORT,
        (2, 0): FinishReason.LENGTH,
        (2, 1): FinishReason.LENGTH,
    }
    assert all(len(found[2, index].response_ids) == served.long for index in (0, 1))
    assert_logprobs(served, requests[2], found[2, 1])


def test_a_publication_from_another_thread_splits_the_spans_of_what_is_under_way(served: Served) -> None:
    length = 2 * served.long  # the machine may be busy here as well
    requests = [
        request(0, served.prompt(5), (1,), max_new_tokens=8),
        request(1, served.prompt(9), (2, 3), max_new_tokens=length),
    ]
    old = served.engine.version
    before = reference_of(served)
    with generating(served, requests) as completions:
        served.engine.pause()
        new = served.publish(1, lambda: change_final_norm(served.reference))
        served.engine.resume()
    found = drained(completions)
    assert found[0, 0].version_spans == (VersionSpan(old, 0, 8),)
    for index in (0, 1):
        (first, second), one = found[1, index].version_spans, found[1, index]
        assert (first.version, second.version) == (old, new)
        assert (first.start, first.stop, second.stop) == (0, second.start, length)
        for span, logprobs in ((first, before), (second, reference_of(served))):
            expected = logprobs(requests[1].prompt_ids, one.response_ids)[span.start : span.stop]
            served.bound.check(one.logprobs_T[span.start : span.stop], expected)


def reference_of(served: Served) -> Callable[..., torch.Tensor]:
    """Log-probs under the reference as it is now, whatever becomes of it later."""
    import copy

    frozen = copy.deepcopy(served.reference)
    return lambda prompt_ids, response_ids: reference_logprobs(frozen, prompt_ids, response_ids)


def test_every_token_carries_the_version_that_sampled_it_when_rows_are_short(serve: Factory, tiny_model: Path) -> None:
    """Samples that wait for a row start after the publication, from a prompt that was computed before it."""
    served = serve(tiny_model, max_sequences=2)
    one = request(0, served.prompt(9), range(6), max_new_tokens=served.long // 5)
    models = {served.engine.version: reference_of(served)}
    completions, stream = [], served.engine.generate([one], deadline_s=DEADLINE_S)
    completions.append(next(stream))
    new = served.publish(1, lambda: change_final_norm(served.reference))
    models[new] = reference_of(served)
    completions += stream
    assert {span.version for got in completions for span in got.version_spans} == set(models)
    for got in completions:
        assert [span.start for span in got.version_spans[1:]] == [span.stop for span in got.version_spans[:-1]]
        for span in got.version_spans:
            expected = models[span.version](one.prompt_ids, got.response_ids)[span.start : span.stop]
            served.bound.check(got.logprobs_T[span.start : span.stop], expected)


def test_pause_and_resume_change_no_token(served: Served) -> None:
    requests = [
        request(0, served.prompt(5), (1,), max_new_tokens=1),
        request(1, served.prompt(9), (2, 3), max_new_tokens=served.long),
    ]
    expected = run(served.engine, *requests)
    with generating(served, requests) as completions:
        for _ in range(3):
            served.engine.pause()
            served.engine.resume()
    found = drained(completions)
    if served.resumes_exactly:
        assert found == expected
    for one in requests:
        for index in range(len(one.seeds)):
            assert len(found[one.id, index].response_ids) == one.sampling.max_new_tokens
            assert_logprobs(served, one, found[one.id, index])


def test_generating_while_paused_ends_at_the_deadline(served: Served) -> None:
    served.engine.pause()
    with pytest.raises(EngineError, match="paused"):
        list(served.engine.generate([request(0, served.prompt(4))], deadline_s=0.05))
    served.engine.resume()
    assert len(run(served.engine, request(0, served.prompt(4)))) == 1


def test_generating_past_the_deadline_is_an_error(served: Served) -> None:
    with pytest.raises(EngineError, match="deadline"):
        list(served.engine.generate([request(0, served.prompt(4), max_new_tokens=served.long)], deadline_s=-1.0))


def test_what_follows_a_publication_is_the_new_model(served: Served) -> None:
    one = request(0, served.prompt(13), (4, 5))
    first = run(served.engine, one)
    new = served.publish(1, lambda: nudge(served.reference, seed=0))
    assert served.engine.version == new
    second = run(served.engine, one)
    for place, completion in second.items():
        assert_logprobs(served, one, completion)
        assert completion.version_spans == (VersionSpan(new, 0, 8),)
        assert completion.logprobs_T != first[place].logprobs_T


def test_memory_is_given_back_and_taken_again(served: Served) -> None:
    one = request(0, served.prompt(13), (4, 5))
    expected = run(served.engine, one)
    served.engine.pause()
    served.engine.release_memory("kv")
    served.engine.reclaim_memory("kv")
    served.engine.resume()
    assert run(served.engine, one) == expected


def test_a_publication_that_fails_ends_the_generation_that_waits_for_it(served: Served) -> None:
    requests = [
        request(0, served.prompt(5), max_new_tokens=1),
        request(1, served.prompt(5), max_new_tokens=served.long),
    ]
    with generating(served, requests) as completions:
        served.engine.prepare(Version(1, 1))
        served.engine.fail(Version(1, 1))
    with pytest.raises(EngineError, match="full publication must commit"):
        drained(completions)


@contextmanager
def generating_at_a_shut_gate(served: Served, requests: list[Request]) -> Iterator[Queue[Completion]]:
    """Generate in a thread while the engine is paused."""
    completions: Queue[Completion] = Queue()
    served.engine.pause()
    stream = served.engine.generate(requests, deadline_s=DEADLINE_S)
    thread = threading.Thread(target=lambda: [completions.put(one) for one in stream])
    thread.start()
    try:
        yield completions
    finally:
        served.engine.resume()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def test_abort_wakes_a_generation_that_is_paused(served: Served) -> None:
    requests = [request(id, served.prompt(5), (1, 2)) for id in range(9)]
    with generating_at_a_shut_gate(served, requests) as completions:
        for id in range(8):
            served.engine.abort([id])
            ended = [completions.get(timeout=10) for _ in range(2)]
            assert {(one.request_id, one.finish_reason) for one in ended} == {(id, FinishReason.ABORT)}
        assert completions.empty()
    left = by_place([completions.get_nowait() for _ in range(completions.qsize())])
    assert set(left) == {(8, 0), (8, 1)}
    assert {one.finish_reason for one in left.values()} == {FinishReason.LENGTH}


def test_close_wakes_a_generation_that_is_paused_and_begins_no_other(served: Served) -> None:
    requests = [request(id, served.prompt(5), (1, 2)) for id in range(3)]
    with generating_at_a_shut_gate(served, requests) as completions:
        served.engine.abort([0])
        assert [completions.get(timeout=10).request_id for _ in range(2)] == [0, 0]
        served.engine.close()
        ended = [completions.get(timeout=10) for _ in range(4)]
    assert {(one.request_id, one.finish_reason, one.response_ids) for one in ended} == {
        (1, FinishReason.ABORT, ()),
        (2, FinishReason.ABORT, ()),
    }
    with pytest.raises(EngineError, match="closed"):
        served.engine.generate(requests, deadline_s=DEADLINE_S)


@pytest.mark.parametrize("begun", [False, True])
def test_a_second_generation_is_refused_until_the_first_is_over(served: Served, begun: bool) -> None:
    requests = [request(0, served.prompt(5), max_new_tokens=1), request(1, served.prompt(5))]
    stream = served.engine.generate(requests, deadline_s=DEADLINE_S)
    completions = [next(stream)] if begun else []
    with pytest.raises(EngineError, match="unfinished"):
        served.engine.generate([request(1, served.prompt(4))], deadline_s=DEADLINE_S)
    assert set(by_place([*completions, *stream])) == {(0, 0), (1, 0)}
    assert len(run(served.engine, *requests)) == 2


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("way", ["closed", "dropped"])
def test_an_abandoned_generation_makes_room_for_the_next(served: Served, begun: bool, way: str) -> None:
    requests = [request(0, served.prompt(5), max_new_tokens=1), request(1, served.prompt(5))]
    stream: Any = served.engine.generate(requests, deadline_s=DEADLINE_S)
    if begun:
        next(stream)
    if way == "closed":
        stream.close()
    else:
        del stream
    assert len(run(served.engine, *requests)) == 2


def test_close_ends_what_is_under_way(served: Served) -> None:
    stream = served.engine.generate(
        [
            request(0, served.prompt(4), max_new_tokens=1),
            request(1, served.prompt(4), (1, 2), max_new_tokens=served.long),
        ],
        deadline_s=DEADLINE_S,
    )
    next(stream)
    served.engine.close()
    assert [one.finish_reason for one in stream] == [FinishReason.ABORT] * 2


def test_requests_may_come_while_others_are_generated(served: Served) -> None:
    inbox = Inbox()
    stream = served.engine.serve(inbox, Bounds(prompt=16, new=served.long, samples=2))
    first = request(1, served.prompt(5), (1, 2), max_new_tokens=served.long // 4)
    short = [request(number, served.prompt(9, number), (3, 4), max_new_tokens=4) for number in (2, 3)]
    inbox.put(first)
    one = next(stream)
    inbox.put(*short)
    with pytest.raises(ValueError, match="request 4"):
        inbox.put(request(4, (), (7, 8)))
    inbox.close()
    found = by_place([one, *stream])
    assert set(found) == {(number, index) for number in (1, 2, 3) for index in (0, 1)}
    assert all(len(one.response_ids) == 4 for (number, _), one in found.items() if number > 1)
    for asked in (first, *short):
        for index in (0, 1):
            assert_logprobs(served, asked, found[asked.id, index])
    with pytest.raises(RuntimeError, match="closed"):
        inbox.put(request(5, served.prompt(5)))


def test_an_idle_engine_begins_what_comes_at_once_and_ends_when_it_is_closed(served: Served) -> None:
    inbox, found = Inbox(), Queue[Completion]()
    stream = served.engine.serve(inbox, Bounds(prompt=16, new=served.long, samples=1))
    thread = threading.Thread(target=lambda: [found.put(one) for one in stream])
    thread.start()
    time.sleep(0.3)
    inbox.put(request(1, served.prompt(5), max_new_tokens=3))
    assert found.get(timeout=DEADLINE_S).finish_reason is FinishReason.LENGTH
    inbox.put(request(2, served.prompt(5), max_new_tokens=served.long))
    served.engine.abort([2])
    assert found.get(timeout=DEADLINE_S).finish_reason is FinishReason.ABORT
    inbox.put(request(3, served.prompt(5), max_new_tokens=served.long))
    served.engine.close()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert found.get(timeout=1.0).finish_reason is FinishReason.ABORT
