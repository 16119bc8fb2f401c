"""A failure fails the guilty sample, says why, and never the others."""

from collections.abc import Callable

import pytest
from reward_helpers import DEADLINE_S, group

from stretto.rewards import RewardPool
from stretto.types import Failure

GUILTY = [
    ("crash_on_seven", "crash", "KeyError: '7'"),
    ("group_crash_on_seven", "crash", "seven is not allowed"),
    ("exits_on_seven", "crash", "SystemExit"),
    ("dies_on_seven", "crash", "exited with code 1"),
    ("killed_on_seven", "crash", "killed by signal 9"),
    ("segfaults_on_seven", "crash", "killed by signal 11"),
    ("hangs_on_seven", "timeout", "within 0.5 s"),
    ("nan_for_seven", "not_finite", "nan"),
    ("text_for_seven", "wrong_type", "'1.0' (str)"),
]


@pytest.mark.parametrize(("name", "kind", "detail"), GUILTY)
def test_only_the_guilty_sample_fails(open_pool: Callable[..., RewardPool], name: str, kind: str, detail: str) -> None:
    pool = open_pool(name, timeout_s=0.5 if kind == "timeout" else 30.0)
    one, guilty, other = pool.submit(group("1", "7", "2")).result(DEADLINE_S)
    assert guilty.reward is None
    assert guilty.failure is not None
    assert (guilty.failure.kind, guilty.failure.reward) == (kind, name)
    assert detail in guilty.failure.detail
    assert one.failure is None
    assert other.failure is None
    assert one.reward == other.reward
    assert one.reward is not None
    (after,) = pool.submit(group("3")).result(DEADLINE_S)
    assert after.reward == one.reward


@pytest.mark.parametrize(("name", "kind"), [("length_one_group", "wrong_length"), ("not_a_list", "wrong_type")])
def test_a_wrong_result_fails_the_whole_group(open_pool: Callable[..., RewardPool], name: str, kind: str) -> None:
    scores = open_pool(name).submit(group("1", "2", "3")).result(DEADLINE_S)
    assert [score.failure.kind for score in scores if score.failure] == [kind] * 3


def test_an_exception_of_the_function_is_a_failure_whatever_its_type(open_pool: Callable[..., RewardPool]) -> None:
    pool = open_pool("raises_usage_like_error", "raises_timeout")
    (score,) = pool.submit(group("1")).result(DEADLINE_S)
    assert isinstance(score.failure, Failure)
    assert score.failure.kind == "crash"
    assert "bad literal" in score.failure.detail
    assert "example_rewards.py" in score.failure.detail


def test_a_function_that_ran_out_of_its_own_time_is_a_timeout(open_pool: Callable[..., RewardPool]) -> None:
    (score,) = open_pool("raises_timeout").submit(group("1")).result(DEADLINE_S)
    assert score.failure is not None
    assert score.failure.kind == "timeout"
    assert "the judge did not answer" in score.failure.detail


def test_groups_in_flight_survive_a_worker_that_dies(open_pool: Callable[..., RewardPool]) -> None:
    pool = open_pool("dies_on_seven", workers=2)
    pending = [pool.submit(group(str(n))) for n in range(1, 10)]
    scores = [scores.result(DEADLINE_S)[0] for scores in pending]
    assert [score.reward for score in scores] == [0.0] * 6 + [None] + [0.0] * 2
    assert scores[6].failure is not None
    assert scores[6].failure.kind == "crash"


def test_waiting_longer_than_asked_names_the_reward(open_pool: Callable[..., RewardPool]) -> None:
    with pytest.raises(TimeoutError, match=r"reward sleeps has not scored a group of 1 within 0\.2 s"):
        open_pool("sleeps").submit(group("1")).result(0.2)
