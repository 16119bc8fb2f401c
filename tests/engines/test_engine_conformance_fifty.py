"""What fifty publications, one after another, must leave: the new model each time, and nothing else."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

import pytest
from engine_helpers import Factory, Served, nudge, reference_logprobs, request, run

from stretto.engines.embedded import EmbeddedEngine
from stretto.types import Completion, Request

PUBLICATIONS, SETTLED = 50, 10
COPIES = 8  # of the model: what fewer than one copy a publication stays under
Completions = Mapping[tuple[int, int], Completion]


def logprobs_of(completions: Completions) -> list[float]:
    return list(chain.from_iterable(one.logprobs_T for one in completions.values()))


def expected_logprobs(served: Served, requests: list[Request], completions: Completions) -> list[float]:
    """Those of transformers, in the same order: in float64, since an error of its own would be half of the bound."""
    exact = copy.deepcopy(served.reference).double()
    return list(
        chain.from_iterable(
            reference_logprobs(exact, asked.prompt_ids, one.response_ids, asked.sampling.temperature)
            for asked, one in ((requests[place[0]], one) for place, one in completions.items())
        )
    )


def addresses(served: Served) -> dict[str, int]:
    """Of the engine's tensors, where they are in this process: a server's receiver looks by itself."""
    if not isinstance(served.engine, EmbeddedEngine):
        return {}
    return {name: tensor.data_ptr() for name, tensor in served.engine.weights().items()}


@pytest.mark.timeout(900)
def test_after_each_of_fifty_publications_the_engine_is_the_new_model_and_nothing_has_grown_or_moved(
    serve: Factory, deep_model: Path, tmp_path: Path
) -> None:
    served = serve(deep_model)
    requests = [request(i, served.prompt(n), range(2), temperature=0.7) for i, n in enumerate((3, 40))]
    size = sum(parameter.nbytes for parameter in served.reference.parameters())
    fixed, settled = addresses(served), 0
    before: list[float] = []
    compared: dict[Path, Completions] = {}
    for number in range(1, PUBLICATIONS + 1):
        served.publish(number, lambda number=number: nudge(served.reference, seed=number, scale=4e-3))
        completions = run(served.engine, *requests)
        now = logprobs_of(completions)
        served.bound.check(now, expected_logprobs(served, requests, completions))
        assert now != before, "the weights did change"
        before = now
        if number in (1, PUBLICATIONS):
            compared[saved(served, tmp_path / f"publication-{number}")] = completions
        if number == SETTLED:
            settled = served.held_bytes()
    assert served.held_bytes() - settled < COPIES * size
    assert addresses(served) == fixed
    for directory, completions in compared.items():
        is_as_fresh(served, directory, requests, completions)


def saved(served: Served, directory: Path) -> Path:
    served.reference.save_pretrained(directory)
    served.tokenizer.save_pretrained(directory)
    return directory


def is_as_fresh(served: Served, directory: Path, requests: list[Request], completions: Completions) -> None:
    """An engine that has read the weights from files gives the same tokens, with the same log-probs."""
    with served.fresh(directory) as engine:
        again = run(engine, *requests)
    assert {place: one.response_ids for place, one in again.items()} == {
        place: one.response_ids for place, one in completions.items()
    }
    served.bound.check([p for place in completions for p in again[place].logprobs_T], logprobs_of(completions))
