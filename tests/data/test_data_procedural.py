"""reasoning_gym datasets as sources."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import reasoning_gym
from transformers import PreTrainedTokenizerFast

from stretto.config import RunConfig
from stretto.data import load_prompts, read_rows
from stretto.data.procedural import UNSCORABLE


def read(name: str, seed: int = 0, **args: Any) -> list[dict[str, Any]]:
    return read_rows(f"reasoning_gym:{name}", "train", args, seed)


@pytest.mark.parametrize("name", ["chain_sum", "countdown", "word_sorting", "simple_equations"])
def test_rows_survive_pickling_with_all_that_scoring_needs(name: str) -> None:
    for row in pickle.loads(pickle.dumps(read(name, size=4))):
        scoring = row["reasoning_gym"]
        scorer = reasoning_gym.create_dataset(scoring["dataset"], **scoring["args"])
        assert row["prompt"] == scoring["entry"]["question"]
        assert scorer.score_answer(row["answer"], scoring["entry"]) == 1.0
        assert scorer.score_answer("no such answer", scoring["entry"]) < 1.0


def test_the_size_is_500_and_the_seed_the_runs_unless_given() -> None:
    assert len(read("chain_sum")) == 500
    assert read("chain_sum", seed=3, size=5) == read("chain_sum", seed=3, size=5)
    assert read("chain_sum", seed=3, size=5) != read("chain_sum", seed=4, size=5)


def test_a_seed_in_the_arguments_wins_over_the_runs() -> None:
    first, second = (read_rows("reasoning_gym:chain_sum", "train", {"size": 5, "seed": 3}, seed) for seed in (7, 8))
    assert first == second == read("chain_sum", seed=3, size=5)


def test_an_unknown_dataset_is_answered_with_the_nearest_names() -> None:
    with pytest.raises(ValueError, match=r"no dataset 'chain_sun' \(did you mean 'chain_sum'"):
        read("chain_sun")


def test_an_unknown_argument_is_answered_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match=r"no argument 'min_term' in data\.args .did you mean 'min_terms'"):
        read("chain_sum", min_term=2)


def test_arguments_that_the_dataset_refuses_are_named() -> None:
    with pytest.raises(ValueError, match=r"refuses data\.args = \{'min_terms': 20\}: max_terms must be >= min_terms"):
        read("chain_sum", min_terms=20)


@pytest.mark.parametrize("name", sorted(UNSCORABLE))
def test_datasets_whose_scorer_cannot_be_checked_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} cannot be trained on"):
        read(name)


def test_composite_needs_its_parts_and_scores_what_they_make() -> None:
    with pytest.raises(ValueError, match=r"composite needs to be told.*data\.args\.datasets = "):
        read("composite")
    with pytest.raises(ValueError, match="rush_hour cannot be trained on"):
        read("composite", datasets=[{"name": "rush_hour", "weight": 1.0, "config": {}}])
    row = read("composite", size=1, datasets=[{"name": "chain_sum", "weight": 1.0, "config": {"max_terms": 3}}])[0]
    scoring = pickle.loads(pickle.dumps(row["reasoning_gym"]))
    scorer = reasoning_gym.create_dataset(scoring["dataset"], **scoring["args"])
    assert scorer.score_answer(row["answer"], scoring["entry"]) == 1.0


def test_prompts_carry_answer_and_entry_and_evaluation_gets_items_of_its_own(
    tokenizer: PreTrainedTokenizerFast, make_config: Callable[..., RunConfig]
) -> None:
    source = "reasoning_gym:chain_sum"
    config = make_config(source, args={"size": 20, "min_digits": 4, "max_digits": 4}, eval={"source": source})
    found = load_prompts(config, tokenizer)
    assert len(found.train) == len(found.heldout) == 20
    assert not {p.text for p in found.train} & {p.text for p in found.heldout}
    assert found.train[0].fields.keys() == {"answer", "reasoning_gym"}
    assert found.train[0].fields["reasoning_gym"]["entry"]["question"] == found.train[0].text
