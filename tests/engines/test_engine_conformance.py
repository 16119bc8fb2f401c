"""What every rollout engine must do with tokens: their log-probs, filters, seeds, ends, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_helpers import (
    DEADLINE_S,
    Factory,
    Served,
    assert_logprobs,
    filtered_by_transformers,
    reference_logits,
    reference_logprobs,
    request,
    run,
)

from stretto.types import Completion, FinishReason, Request


@pytest.fixture
def served(serve: Factory, tiny_model: Path) -> Served:
    return serve(tiny_model)


def mixture(served: Served, **sampling: object) -> list[Request]:
    """Groups of several sizes with prompts of 1 to 120 tokens."""
    shapes = [(1, 3), (120, 2), (7, 5), (33, 1), (8, 4)]
    return [
        request(i, served.prompt(n, start=i), range(10 * i, 10 * i + s), **sampling) for i, (n, s) in enumerate(shapes)
    ]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_transformers_for_any_mixture_of_prompts(served: Served, temperature: float) -> None:
    requests = mixture(served, temperature=temperature)
    completions = run(served.engine, *requests)
    for one in requests:
        for index in range(len(one.seeds)):
            assert_logprobs(served, one, completions[one.id, index])
            assert len(completions[one.id, index].response_ids) == 8


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_of_a_real_model_are_as_exact_as_those_of_transformers(
    serve: Factory, smollm2_cut: Path, temperature: float
) -> None:
    """Four layers of a real model give logits near 70, where 1e-5 is one bit: float64 says how exact each side is."""
    served = serve(smollm2_cut)
    requests = [request(i, served.prompt(n), range(2), temperature=temperature) for i, n in enumerate((3, 21))]
    completions = run(served.engine, *requests)
    theirs = {place: logprobs_of(served, requests, one) for place, one in completions.items()}
    served.reference.double()
    truth = {place: logprobs_of(served, requests, one) for place, one in completions.items()}
    our_error = max((torch.tensor(one.logprobs_T) - truth[place]).abs().max() for place, one in completions.items())
    their_error = max((theirs[place] - truth[place]).abs().max() for place in completions)
    assert our_error < max(served.real_tolerance, 2 * their_error)
    assert their_error < served.exactness


def logprobs_of(served: Served, requests: list[Request], one: Completion) -> torch.Tensor:
    asked = requests[one.request_id]
    return reference_logprobs(served.reference, asked.prompt_ids, one.response_ids, asked.sampling.temperature)


def test_few_rows_change_nothing_but_the_order(serve: Factory, tiny_model: Path) -> None:
    alone, narrow = serve(tiny_model, max_sequences=1), serve(tiny_model, max_sequences=3)
    requests = mixture(alone)
    completions = run(narrow.engine, *requests)
    for one in requests:
        for index, seed in enumerate(one.seeds):
            expected = run(alone.engine, request(0, one.prompt_ids, [seed]))[0, 0]
            got = completions[one.id, index]
            assert got.response_ids == expected.response_ids
            alone.bound.check(got.logprobs_T, expected.logprobs_T)


def test_a_group_wider_than_the_rows_is_completed_when_all_rows_end_together(serve: Factory, tiny_model: Path) -> None:
    served = serve(tiny_model, max_sequences=3)
    assert len(run(served.engine, request(0, served.prompt(5), range(8), max_new_tokens=1))) == 8
    assert len(run(served.engine, request(0, served.prompt(5), range(8), max_new_tokens=4))) == 8


def test_a_hundred_requests_at_once(serve: Factory, tiny_model: Path) -> None:
    served = serve(tiny_model, max_sequences=32)
    requests = [
        request(i, served.prompt(1 + i % 23, start=i), (i, i + 1), max_new_tokens=1 + i % 7) for i in range(100)
    ]
    completions = run(served.engine, *requests)
    assert all(len(one.response_ids) == 1 + one.request_id % 7 for one in completions.values())
    for id in (0, 47, 99):
        assert_logprobs(served, requests[id], completions[id, 1])


@pytest.mark.parametrize(
    "filters", [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 12, "top_p": 0.8, "min_p": 0.05}], ids=str
)
def test_filters_choose_tokens_but_logprobs_are_of_the_whole_distribution(served: Served, filters: dict) -> None:
    if not served.filters >= filters.keys():
        pytest.skip("this engine does not serve these filters at any temperature")
    one = request(0, served.prompt(9), range(16), temperature=0.8, max_new_tokens=12, **filters)
    outside = outside_unfiltered = 0
    for completion in run(served.engine, one).values():
        assert_logprobs(served, one, completion)
        allowed = allowed_tokens(served, one, completion.response_ids, filters)
        outside += sum(not allowed[t, token] for t, token in enumerate(completion.response_ids))
    assert served.bound.allows(outside, 16 * 12)
    free = request(0, one.prompt_ids, one.seeds, temperature=0.8, max_new_tokens=12)
    for completion in run(served.engine, free).values():
        allowed = allowed_tokens(served, free, completion.response_ids, filters)
        outside_unfiltered += sum(not allowed[t, token] for t, token in enumerate(completion.response_ids))
    assert not served.bound.allows(outside_unfiltered, 16 * 12), (
        "without the filter some token lies outside its set, or this test shows nothing"
    )


def allowed_tokens(served: Served, one: Request, response_ids: tuple[int, ...], filters: dict) -> torch.Tensor:
    """[T, V]: whether transformers would let the token through."""
    logits_TV = reference_logits(served.reference, one.prompt_ids, response_ids) / one.sampling.temperature
    return filtered_by_transformers(logits_TV, filters).isfinite()


def test_greedy_is_transformers_greedy_and_reports_temperature_one(served: Served) -> None:
    requests = [request(i, served.prompt(n), (0, 1), temperature=0.0, max_new_tokens=20) for i, n in enumerate((2, 40))]
    completions = run(served.engine, *requests)
    for one in requests:
        first, second = completions[one.id, 0], completions[one.id, 1]
        assert first.response_ids == second.response_ids
        best = reference_logits(served.reference, one.prompt_ids, first.response_ids).argmax(-1).tolist()
        others = sum(got != token for got, token in zip(first.response_ids, best, strict=True))
        assert served.bound.allows(others, 20)
        assert_logprobs(served, one, first)


def test_a_seed_says_everything_and_neighbours_nothing(served: Served) -> None:
    one = request(5, served.prompt(11), (123, 2**63 + 7, 123))
    first, again = run(served.engine, one), run(served.engine, one)
    cut = {"top_k": 2} if "top_k" in served.filters and served.mixes_filters else {}
    crowd = [request(i, served.prompt(20 + i), range(2), temperature=0.3, **cut) for i in range(3)]
    crowded = run(served.engine, *crowd, one)
    assert first[5, 0].response_ids == first[5, 2].response_ids != first[5, 1].response_ids
    for index in range(3):
        assert first[5, index] == again[5, index]
        assert first[5, index].response_ids == crowded[5, index].response_ids


def test_a_stop_id_ends_the_response_and_is_kept(served: Served) -> None:
    free = run(served.engine, request(0, served.prompt(6), max_new_tokens=12))[0, 0]
    stop_id = free.response_ids[4]
    stopped = run(served.engine, request(0, served.prompt(6), max_new_tokens=12, stop_ids=(stop_id,)))[0, 0]
    assert stopped.response_ids == free.response_ids[: free.response_ids.index(stop_id) + 1]
    assert stopped.finish_reason is FinishReason.STOP
    assert free.finish_reason is FinishReason.LENGTH
    assert len(free.response_ids) == 12


def test_an_end_of_sequence_id_ends_the_response(serve: Factory, tiny_model: Path) -> None:
    free = serve(tiny_model)
    one = request(0, free.prompt(6), max_new_tokens=12)
    ids = run(free.engine, one)[0, 0].response_ids
    stopped = run(serve(tiny_model, eos_ids=(ids[3],)).engine, one)[0, 0]
    assert stopped.response_ids == ids[: ids.index(ids[3]) + 1]
    assert stopped.finish_reason is FinishReason.STOP


def test_a_stop_on_the_last_allowed_token_is_a_stop(served: Served) -> None:
    ids = run(served.engine, request(0, served.prompt(6), max_new_tokens=1))[0, 0].response_ids
    stopped = run(served.engine, request(0, served.prompt(6), max_new_tokens=1, stop_ids=ids))[0, 0]
    assert stopped.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("model", ["tiny_model", "smollm2_cut"])
def test_a_stop_string_that_spans_tokens_ends_the_response(
    serve: Factory, model: str, request: pytest.FixtureRequest
) -> None:
    from engine_helpers import request as make

    served = serve(request.getfixturevalue(model))
    free = run(served.engine, make(0, served.prompt(6), max_new_tokens=16))[0, 0].response_ids
    text = served.tokenizer.decode(free)
    stop = text[len(served.tokenizer.decode(free[:6])) - 1 :][:4]
    lengths = [n for n in range(1, 17) if stop in served.tokenizer.decode(free[:n])]
    stopped = run(served.engine, make(0, served.prompt(6), max_new_tokens=16, stop=("never", stop)))[0, 0]
    assert stopped.response_ids == free[: lengths[0]]
    assert stopped.finish_reason is FinishReason.STOP


BAD = {
    "no prompt": {"prompt_ids": ()},
    "no seed": {"seeds": ()},
    "a negative seed": {"seeds": (-1,)},
    "a seed past 64 bits": {"seeds": (2**64,)},
    "no new tokens": {"max_new_tokens": 0},
    "too long": {"max_new_tokens": 10_000},
    "an id past the vocabulary": {"prompt_ids": (3, 10**6)},
    "a negative id": {"prompt_ids": (3, -1)},
    "a negative temperature": {"temperature": -1.0},
    "temperature nan": {"temperature": float("nan")},
    "top_p of nothing": {"top_p": 0.0},
    "top_p above all": {"top_p": 1.5},
    "a negative top_k": {"top_k": -1},
    "min_p above the likeliest": {"min_p": 1.5},
    "an empty stop string": {"stop": ("",)},
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_malformed_request_is_refused_before_anything_is_generated(served: Served, bad: dict) -> None:
    good = request(1, served.prompt(4))
    with pytest.raises(ValueError, match="request 7"):
        served.engine.generate([good, request(7, **{"prompt_ids": served.prompt(4), **bad})], deadline_s=DEADLINE_S)
    assert len(run(served.engine, good)) == 1


def test_duplicate_request_ids_are_refused(served: Served) -> None:
    with pytest.raises(ValueError, match="same id"):
        served.engine.generate([request(1, served.prompt(4))] * 2, deadline_s=DEADLINE_S)


def test_no_request_yields_nothing(served: Served) -> None:
    assert run(served.engine) == {}
