"""Advantages against the papers' formulas in plain Python."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.algorithms.advantages import ADVANTAGES, group_advantages, grpo

REWARDS = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=9).filter(lambda r: max(r) - min(r) > 1e-6)


def by_the_paper(name: str, rewards: list[float]) -> list[float]:
    size = len(rewards)
    mean = math.fsum(rewards) / size
    if name == "grpo":
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (size - 1))
        return [(r - mean) / std for r in rewards]
    if name == "grpo_no_std":
        return [r - mean for r in rewards]
    return [r - math.fsum(rewards[:i] + rewards[i + 1 :]) / (size - 1) for i, r in enumerate(rewards)]


@pytest.mark.parametrize("name", ["grpo", "grpo_no_std", "rloo"])
@given(rewards=REWARDS)
def test_each_advantage_is_the_papers(name, rewards):
    actual = ADVANTAGES[name](torch.tensor(rewards, dtype=torch.float64)).tolist()
    scale = max(abs(r) for r in rewards) / ((max(rewards) - min(rewards)) if name == "grpo" else 1)
    assert actual == pytest.approx(by_the_paper(name, rewards), rel=1e-12, abs=1e-14 * scale + 1e-14)


def test_float32_rewards_are_computed_in_float64():
    advantages = grpo(torch.tensor([16777216.0, 16777218.0, 16777216.0]))
    assert advantages.dtype == torch.float64
    assert advantages.tolist() == pytest.approx(by_the_paper("grpo", [0.0, 2.0, 0.0]), rel=1e-8)


@pytest.mark.parametrize("name", list(ADVANTAGES))
@given(reward=st.floats(-1e300, 1e300), size=st.integers(1, 12))
def test_equal_rewards_give_exactly_zero(name, reward, size):
    advantages = ADVANTAGES[name](torch.full((size,), reward, dtype=torch.float64))
    assert advantages.tolist() == [0.0] * size


@pytest.mark.parametrize("name", list(ADVANTAGES))
@pytest.mark.parametrize("rewards", [[0.1 + 0.2] * 3, [0.1 + 0.2, 0.3, 0.3], [0.1] * 7, [1 / 3] * 6, [-0.7] * 3])
def test_rewards_equal_up_to_rounding_give_exactly_zero(name, rewards):
    assert ADVANTAGES[name](torch.tensor(rewards, dtype=torch.float64)).tolist() == [0.0] * len(rewards)


def test_a_small_true_difference_is_no_rounding():
    assert grpo(torch.tensor([1.0, 1.0 + 1e-12], dtype=torch.float64)).tolist() == pytest.approx(
        [-(0.5**0.5), 0.5**0.5]
    )


def test_groups_may_be_interleaved_and_constant_ones_are_counted():
    rewards = [1.0, 5.0, 0.0, 5.0, 0.0, 2.0, 2.5]
    advantages, constant_groups = group_advantages("rloo", rewards, [3, 9, 3, 9, 3, 4, 4])
    assert constant_groups == 1
    assert advantages == pytest.approx([1.0, 0.0, -0.5, 0.0, -0.5, -0.5, 0.5], abs=1e-15)
    assert advantages[1] == advantages[3] == 0.0


def test_no_samples_have_no_advantages():
    assert group_advantages("grpo", [], []) == ([], 0)


def test_a_group_of_one_is_refused_by_its_id():
    with pytest.raises(ValueError, match="group 7 has one sample"):
        group_advantages("grpo", [1.0, 0.0, 1.0], [2, 2, 7])
