"""Mismatch weights against their definition."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.algorithms.mismatch import MISMATCH, mismatch_weights

PAIR = st.tuples(st.floats(-2000, 0), st.floats(-2000, 0)) | st.tuples(st.floats(-1, 0), st.floats(-1, 0))


def by_the_definition(mode: str, old: float, behaviour: float, cap: float) -> float:
    ratio = math.exp(old - behaviour) if old - behaviour < 700 else math.inf
    return {"truncate": min(cap, ratio), "mask": ratio if ratio <= cap else 0.0, "off": 1.0}[mode]


@pytest.mark.parametrize("mode", ["truncate", "mask", "off"])
@given(pairs=st.lists(PAIR, max_size=6), cap=st.floats(0.1, 10))
def test_each_weight_is_its_definition(mode, pairs, cap):
    old, behaviour = torch.tensor(pairs, dtype=torch.float64).reshape(-1, 2).unbind(1)
    expected = [by_the_definition(mode, o, b, cap) for o, b in pairs]
    assert mismatch_weights(old, behaviour, mode, cap).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-300)


@pytest.mark.parametrize("mode", list(MISMATCH))
def test_equal_log_probs_weigh_one_without_gradient(mode):
    logprobs = torch.tensor([-0.3, -7.0], requires_grad=True)
    weights = mismatch_weights(logprobs, logprobs.detach(), mode, 2.0)
    assert weights.tolist() == [1.0, 1.0]
    assert not weights.requires_grad
