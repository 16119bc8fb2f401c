"""Weights, parts and abstentions."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reward_helpers import DEADLINE_S, example, group

from stretto.config.sections import RewardConfig
from stretto.rewards import RewardPool
from stretto.rewards.outcomes import combine, group_outcomes, one_outcome
from stretto.rewards.resolve import short_names
from stretto.types import Failure


def test_rewards_add_up_with_their_weights_and_abstaining_leaves_the_others(
    open_pool: Callable[..., RewardPool],
) -> None:
    pool = open_pool("simple", "abstains_on_odd", "other_simple", weights=[2.0, 0.5, 3.0])
    seven, eight = pool.submit(group("7", "8")).result(DEADLINE_S)
    assert (seven.reward, dict(seven.parts)) == (2.0, {"simple": 1.0, "other_simple": 0.0})
    assert (eight.reward, dict(eight.parts)) == (0.5, {"simple": 0.0, "abstains_on_odd": 1.0, "other_simple": 0.0})


def test_a_true_zero_is_kept_and_an_abstention_by_all_is_a_failure(open_pool: Callable[..., RewardPool]) -> None:
    (zero,) = open_pool("other_simple").submit(group("7")).result(DEADLINE_S)
    assert zero.failure is None
    assert zero.reward == 0.0
    (nothing,) = open_pool("abstains_on_odd").submit(group("7")).result(DEADLINE_S)
    assert nothing.reward is None
    assert nothing.failure is not None
    assert nothing.failure.kind == "abstained"


def test_groups_are_scored_in_the_order_they_are_asked_for(open_pool: Callable[..., RewardPool]) -> None:
    pool = open_pool("trl_completions_only", workers=2)
    pending = [pool.submit(group("1" * n, "2")) for n in range(1, 9)]
    assert [scores.result(DEADLINE_S)[0].reward for scores in reversed(pending)] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert pool.submit([]).result(DEADLINE_S) == []


NUMBERS = [
    True,
    3,
    0.5,
    np.float32(0.5),
    np.int64(2),
    np.bool_(True),
    np.array(0.25),
    torch.tensor(0.5),
    torch.tensor(1),
]


@pytest.mark.parametrize("value", NUMBERS, ids=lambda value: type(value).__name__)
def test_everything_that_is_a_number_becomes_a_plain_float(value: object) -> None:
    outcome = one_outcome(value, "r")
    assert type(outcome) is float
    assert outcome == float(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["1.0", b"1", 1j, [1.0], {"score": 1.0}, np.array([1.0]), np.str_("1"), object()])
def test_what_is_not_a_number_is_a_wrong_type(value: object) -> None:
    outcome = one_outcome(value, "r")
    assert isinstance(outcome, Failure)
    assert (outcome.kind, outcome.reward) == ("wrong_type", "r")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan"), torch.tensor(math.inf), 10**400])
def test_what_is_not_finite_is_a_failure(value: object) -> None:
    outcome = one_outcome(value, "r")
    assert isinstance(outcome, Failure)
    assert outcome.kind == "not_finite"


VALUES = st.lists(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3)), max_size=8)


@given(VALUES, st.integers(0, 8), st.sampled_from([list, tuple]))
def test_any_list_gives_one_outcome_per_sample(values: list, count: int, kind: type) -> None:
    outcomes = group_outcomes(kind(values), count, "r")
    assert len(outcomes) == count
    if len(values) != count:
        assert all(isinstance(o, Failure) and o.kind == "wrong_length" for o in outcomes)
        return
    for value, outcome in zip(values, outcomes, strict=True):
        if value is None:
            assert outcome is None
        elif isinstance(value, str):
            assert isinstance(outcome, Failure)
            assert outcome.kind == "wrong_type"
        elif isinstance(value, float) and not math.isfinite(value):
            assert isinstance(outcome, Failure)
            assert outcome.kind == "not_finite"
        else:
            assert outcome == float(value)


@pytest.mark.parametrize("values", [1.0, None, "abc", {"a": 1}, iter([1.0]), torch.zeros(3, 1)])
def test_a_result_that_is_no_list_fails_the_whole_group(values: object) -> None:
    assert [o.kind for o in group_outcomes(values, 3, "r") if isinstance(o, Failure)] == ["wrong_type"] * 3


def test_arrays_and_tensors_are_lists_too() -> None:
    assert group_outcomes(np.array([0.5, 1]), 2, "r") == group_outcomes(torch.tensor([0.5, 1]), 2, "r") == [0.5, 1.0]


def test_a_weighted_sum_that_overflows_is_a_failure() -> None:
    failure = combine([1e308, 1.0], ["a", "b"], [10.0, 1.0]).failure
    assert failure is not None
    assert failure.kind == "not_finite"


def test_one_failure_fails_the_sample_and_keeps_the_other_parts() -> None:
    score = combine([1.0, Failure("crash", "b", "")], ["a", "b"], [1.0, 1.0])
    assert (score.reward, dict(score.parts)) == (None, {"a": 1.0})


def test_names_are_as_short_as_is_unique() -> None:
    assert short_names(["m:f", "n:g", "math_verify"]) == ["f", "g", "math_verify"]
    assert short_names(["p.m:f", "x/n.py:f", "h.py:g"]) == ["m.f", "n.f", "g"]
    assert short_names(["x/n.py:f", "y/n.py:f"]) == ["x.n.py.f", "y.n.py.f"]
    with pytest.raises(ValueError, match="listed twice"):
        short_names(["m:f", "m:f"])


def test_weights_must_be_as_many_as_functions() -> None:
    with pytest.raises(ValueError, match="2 values for 1"):
        RewardPool(RewardConfig(functions=[example("simple")], weights=[1.0, 2.0]))
