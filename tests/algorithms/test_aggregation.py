"""Token weights against the sums they stand for."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.algorithms.aggregation import AGGREGATIONS, token_weights

SEQUENCES = st.lists(st.lists(st.floats(-10, 10), max_size=6), min_size=1, max_size=8).filter(any)
CONSTANT = 11


def by_the_definition(name: str, losses: list[list[float]]) -> float:
    tokens = [loss for sequence in losses for loss in sequence]
    if name == "token_mean":
        return math.fsum(tokens) / len(tokens)
    if name == "sequence_mean":
        return math.fsum(math.fsum(sequence) / len(sequence) for sequence in losses if sequence) / len(losses)
    return math.fsum(math.fsum(sequence) / CONSTANT for sequence in losses) / len(losses)


def weighted_sum(name: str, part: list[list[float]], whole: list[list[float]]) -> float:
    lengths = [len(sequence) for sequence in part]
    totals = {"total_tokens": sum(map(len, whole)), "total_sequences": len(whole), "constant_length": CONSTANT}
    weights = token_weights(name, lengths, **totals)
    return math.fsum(w * loss for w, sequence in zip(weights, part, strict=True) for loss in sequence)


@pytest.mark.parametrize("name", ["token_mean", "sequence_mean", "constant_length"])
@given(losses=SEQUENCES, cut=st.integers(0, 8))
def test_the_weighted_sum_is_the_definition_however_the_batch_is_cut(name, losses, cut):
    expected = pytest.approx(by_the_definition(name, losses), rel=1e-12, abs=1e-12)
    assert weighted_sum(name, losses, losses) == expected
    assert weighted_sum(name, losses[:cut], losses) + weighted_sum(name, losses[cut:], losses) == expected


@pytest.mark.parametrize("name", list(AGGREGATIONS))
def test_a_sequence_without_loss_tokens_has_weight_zero(name):
    weights = token_weights(name, [0, 2], total_tokens=2, total_sequences=2, constant_length=4)
    assert weights[0] == 0.0 < weights[1]


@pytest.mark.parametrize("name", list(AGGREGATIONS))
def test_a_batch_without_any_loss_token_divides_by_nothing(name):
    assert token_weights(name, [0, 0], total_tokens=0, total_sequences=2, constant_length=4) == [0.0, 0.0]


def test_constant_length_without_its_length_says_what_to_set():
    with pytest.raises(ValueError, match=r"algorithm\.constant_length"):
        token_weights("constant_length", [1], total_tokens=1, total_sequences=1, constant_length=None)
