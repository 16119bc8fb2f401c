"""Every signature people have is called as it expects, in a real worker."""

from collections.abc import Callable

import pytest
from reward_helpers import DEADLINE_S, example, group

from stretto.config.sections import RewardConfig
from stretto.rewards import RewardPool, Sample
from stretto.rewards.adapters import adapt

STYLES = {
    "trl": [1.0, 0.0, 0.0],
    "trl_completions_only": [1.0, 2.0, 1.0],
    "trl_keyword_only": [10.0, 13.0, 11.0],
    "trl_everything_by_keyword": [1.0, 0.0, 0.0],
    "trl_async": [1.0, 0.0, 0.0],
    "trl_that_logs": [1.0, 0.0, 0.0],
    "trl_that_logs_by_keyword": [1.0, 0.0, 0.0],
    "compute_score": [1.0, 0.0, 0.0],
    "verl_async": [0.5, 0.5, 0.5],
    "simple": [1.0, 0.0, 0.0],
    "simple_positional": [10.0, 0.0, 0.0],
    "environment": [1.0, 1.0, 1.0],
    "interrupted": [1.0, 1.0, 1.0],
}


def test_every_signature_scores_the_same_group(open_pool: Callable[..., RewardPool]) -> None:
    samples = group("7", "10", "8", data_source="tests", extra_info={"bonus": 0.5})
    with open_pool(*STYLES) as pool:
        pool.check(columns=samples[0].fields)
        scores = pool.submit(samples).result(DEADLINE_S)
    assert [score.failure for score in scores] == [None] * 3
    assert {name: [score.parts[name] for score in scores] for name in STYLES} == STYLES


def test_chats_reach_a_trl_function_as_messages(open_pool: Callable[..., RewardPool]) -> None:
    chat = [Sample("<q>", text, (1,), {}, ({"role": "user", "content": "q"},)) for text in ("7", "8")]
    scores = open_pool("trl_chat").submit(chat).result(DEADLINE_S)
    assert [score.reward for score in scores] == [1.0, 0.0]


def test_async_functions_of_one_sample_run_concurrently(open_pool: Callable[..., RewardPool]) -> None:
    scores = open_pool("simple_async", timeout_s=20).submit(group("1", "2", "3", "0")).result(DEADLINE_S)
    assert [score.reward for score in scores] == [1.0, 2.0, 3.0, 0.0]


def test_ground_truth_is_the_answer_where_the_data_has_no_such_column() -> None:
    adapter = adapt(
        lambda solution_str, ground_truth, extra_info: extra_info is None and solution_str == ground_truth, "r"
    )
    assert adapter.score(group("7", "8")) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("function", "parameter"),
    [
        (lambda completion, rubric: 1.0, "rubric"),
        (lambda completions, *, levels: [1.0], "levels"),
        (lambda data_source, solution_str, ground_truth: 1.0, "data_source"),
    ],
)
def test_a_parameter_that_nothing_supplies_is_named_with_all_that_there_is(function: Callable, parameter: str) -> None:
    there = {
        "sample": "answer, level, completion, completion_ids, messages, prompt",
        "trl": "answer, level, completion_ids, completions, log_extra, log_metric, prompts",
        "verl": "extra_info, ground_truth, solution_str",
    }
    adapter = adapt(function, "r")
    with pytest.raises(ValueError, match=rf"`{parameter}`, but it can only have {there[adapter.style]}[ ;]"):
        adapter.score(group("7"))


@pytest.mark.parametrize(
    "function", [lambda completions, trainer_state: [1.0], lambda completion, *, trainer_state: 1.0]
)
def test_the_state_of_a_trainer_is_refused_with_the_reason(function: Callable) -> None:
    with pytest.raises(ValueError, match="`trainer_state`, but rewards run in worker processes, which have no trainer"):
        adapt(function, "r").score(group("7"))


def test_the_state_of_a_trainer_with_a_default_is_that_default() -> None:
    assert adapt(lambda completions, trainer_state=None: [float(trainer_state is None)], "r").score(group("7")) == [1.0]


def test_columns_that_do_not_fit_are_found_before_and_at_scoring(open_pool: Callable[..., RewardPool]) -> None:
    pool = open_pool("asks_too_much")
    pool.check()
    with pytest.raises(ValueError, match="`rubric`"):
        pool.check(columns=["answer"])
    with pytest.raises(ValueError, match="`rubric`"):
        pool.submit(group("7")).result(DEADLINE_S)


def test_only_columns_that_all_samples_have_are_passed() -> None:
    def reward(completions: list[str], level: list[int] | None = None) -> list[float]:
        return [float(level is None)] * len(completions)

    mixed = [Sample("q", "1", (1,), {"level": 1}), Sample("q", "2", (1,), {})]
    assert adapt(reward, "r").score(mixed) == [1.0, 1.0]


def test_a_column_that_cannot_be_sent_is_a_value_error() -> None:
    with RewardPool(RewardConfig(functions=[example("simple")])) as pool, pytest.raises(ValueError, match="level: int"):
        pool.submit(group("7", generator=(x for x in ())))
