"""KL estimators against Schulman's formulas, and against the divergence they estimate."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.algorithms.kl import KL_ESTIMATORS, k1, k2, k3

LOGPROB = st.floats(-300, 0)


def by_the_note(name: str, current: float, reference: float) -> float:
    log_r = reference - current
    return {"k1": -log_r, "k2": log_r**2 / 2, "k3": math.expm1(log_r) - log_r}[name]


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
@given(pairs=st.lists(st.tuples(LOGPROB, LOGPROB), max_size=6))
def test_each_estimator_is_schulmans(name, pairs):
    current, reference = torch.tensor(pairs, dtype=torch.float64).reshape(-1, 2).unbind(1)
    expected = [by_the_note(name, c, r) for c, r in pairs]
    assert KL_ESTIMATORS[name](current, reference).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("estimator", [k1, k3])
def test_the_mean_over_the_distribution_is_the_divergence(estimator):
    current = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    reference = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64).log()
    divergence = math.fsum(math.exp(c) * (c - r) for c, r in zip(current.tolist(), reference.tolist(), strict=True))
    assert (current.exp() * estimator(current, reference)).sum().item() == pytest.approx(divergence, rel=1e-12)


def test_the_mean_gradient_of_k2_is_that_of_the_divergence():
    logits = torch.tensor([0.3, -0.2, 1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64).log()
    current = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((current.exp() * (current - reference)).sum(), logits, retain_graph=True)
    (estimated,) = torch.autograd.grad((current.detach().exp() * k2(current, reference)).sum(), logits)
    torch.testing.assert_close(estimated, exact, rtol=1e-12, atol=1e-14)


def test_k3_keeps_its_digits_at_a_small_ratio_in_float32():
    current, reference = torch.tensor([-0.5]), torch.tensor([-0.5 + 2**-12])
    assert k3(current, reference).item() == pytest.approx(by_the_note("k3", -0.5, -0.5 + 2**-12), rel=1e-3)


@pytest.mark.parametrize("name", list(KL_ESTIMATORS))
def test_gradients_are_those_of_finite_differences(name):
    generator = torch.Generator().manual_seed(0)
    current = -torch.rand(6, generator=generator, dtype=torch.float64).requires_grad_()
    reference = -torch.rand(6, generator=generator, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda c: KL_ESTIMATORS[name](c, reference), current)
