"""The PPO loss against the papers, with ratios far outside the clip range too."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.algorithms.policy import ppo_clip

TOKEN = st.tuples(st.floats(-600, 600) | st.floats(-0.5, 0.5), st.floats(-5, 5) | st.just(0.0))
CLIPS = st.tuples(st.floats(0.01, 1), st.floats(0.01, 3), st.none() | st.floats(1.01, 20))


def objective_by_the_papers(log_ratio: float, advantage: float, low: float, high: float, dual: float | None) -> float:
    ratio = math.exp(log_ratio)
    objective = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    return max(objective, dual * advantage) if dual is not None and advantage < 0 else objective


def run(log_ratios, advantages, low=0.2, high=0.2, dual=None, dtype=torch.float64):
    current = torch.tensor(log_ratios, dtype=dtype, requires_grad=True)
    advantages = torch.tensor(advantages, dtype=dtype)
    zeros = torch.zeros_like(advantages)
    loss, clipped = ppo_clip(current, zeros, advantages, clip_low=low, clip_high=high, dual_clip=dual)
    (gradient,) = torch.autograd.grad(loss.sum(), current)
    return loss.detach(), clipped, gradient


@given(tokens=st.lists(TOKEN, min_size=1, max_size=6), clips=CLIPS)
def test_the_loss_is_the_papers(tokens, clips):
    log_ratios, advantages = (list(column) for column in zip(*tokens, strict=True))
    loss, _, _ = run(log_ratios, advantages, *clips)
    expected = [-objective_by_the_papers(*token, *clips) for token in tokens]
    assert loss.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-300)


@given(tokens=st.lists(TOKEN, min_size=1, max_size=6), clips=CLIPS)
def test_clipped_tokens_are_those_that_lost_their_gradient(tokens, clips):
    log_ratios, advantages = (list(column) for column in zip(*tokens, strict=True))
    _, clipped, gradient = run(log_ratios, advantages, *clips)
    for (log_ratio, advantage), is_clipped, slope in zip(tokens, clipped.tolist(), gradient.tolist(), strict=True):
        unclipped = -advantage * math.exp(log_ratio)
        assert slope == pytest.approx(0.0 if is_clipped else unclipped, rel=1e-12, abs=1e-300)
        assert not (is_clipped and advantage == 0)


def test_each_bound_clips_its_own_side():
    log_ratios = [math.log(r) for r in (0.7, 0.85, 1.25, 1.35, 0.7, 0.85, 1.35, 3.5)]
    _, clipped, _ = run(log_ratios, [1.0] * 4 + [-1.0] * 4, low=0.2, high=0.3, dual=3.0)
    assert clipped.tolist() == [False, False, False, True, True, False, False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_overflowing_ratio_gives_no_nan_where_a_bound_holds(dtype):
    loss, clipped, gradient = run([2000.0] * 3 + [-2000.0] * 3, [1.0, 0.0, -1.0] * 2, dual=4.0, dtype=dtype)
    assert loss.tolist() == pytest.approx([-1.2, 0.0, 4.0, 0.0, 0.0, 0.8], rel=1e-6)
    assert gradient.tolist() == [0.0] * 6
    assert clipped.tolist() == [True, False, True, False, False, True]


def test_the_first_step_has_ratio_one_exactly():
    loss, clipped, gradient = run([0.0, 0.0, 0.0], [0.7, 0.0, -1.3])
    assert loss.tolist() == [-0.7, 0.0, 1.3]
    assert gradient.tolist() == [-0.7, 0.0, 1.3]
    assert not clipped.any()


@pytest.mark.parametrize("dual", [None, 2.0])
def test_gradients_are_those_of_finite_differences(dual):
    old = torch.tensor([-1.0, -2.0, -0.5, -0.1, -3.0, -1.5], dtype=torch.float64)
    shift = torch.tensor([0.05, -0.5, 0.9, 0.1, -0.6, 1.2], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -2.0, -1.5], dtype=torch.float64)

    def loss(current):
        return ppo_clip(current, old, advantages, clip_low=0.2, clip_high=0.28, dual_clip=dual)[0]

    assert torch.autograd.gradcheck(loss, (old + shift).requires_grad_())
