"""Deltas: what is decoded is what was encoded, to the bit, and never longer than the whole."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stretto.sync.parcels.delta import decode, encode

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64, torch.bool]
SHAPES = st.sampled_from([(), (0,), (1,), (7,), (3, 0, 2), (33, 5), (4, 3, 2, 9)])


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(INTEGERS[tensor.element_size()])


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Any bit pattern: every NaN, infinity and -0.0 too."""
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    size = torch.empty((), dtype=dtype).element_size()
    count = torch.empty(shape).numel()
    flat = torch.randint(0, 256, (count * size,), dtype=torch.uint8, generator=generator)
    return flat.view(dtype).view(shape)


@given(
    shape=SHAPES,
    dtype=st.sampled_from(DTYPES),
    rate=st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1)),
    seed=st.integers(0, 2**31),
    transposed=st.booleans(),
)
def test_any_change_of_any_tensor_comes_back(
    shape: tuple[int, ...], dtype: torch.dtype, rate: float, seed: int, transposed: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    old, other = (random_bits(shape, dtype, generator) for _ in range(2))
    new = torch.where(torch.rand(shape, generator=generator) < rate, other, old)
    if transposed and len(shape) > 1:
        old, new = old.transpose(0, -1), new.transpose(0, -1)
    before = bits(old).clone()
    parts = encode(old, new)
    made = decode(old, parts)
    assert made.dtype == new.dtype
    assert made.shape == new.shape
    assert torch.equal(bits(made), bits(new))
    assert torch.equal(bits(old), before), "who decodes keeps the old tensor"
    assert sum(one.nbytes for one in parts.values()) <= new.nbytes
    assert (not parts) == torch.equal(bits(old), bits(new))


@given(
    dtype=st.sampled_from(DTYPES),
    rates=st.lists(st.sampled_from([0.0, 0.01, 0.3, 1.0]), min_size=1, max_size=5),
    seed=st.integers(0, 2**31),
)
def test_one_change_after_another_comes_back_and_changes_nothing_it_was_given(
    dtype: torch.dtype, rates: list[float], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    states = [random_bits((33, 5), dtype, generator)]
    for rate in rates:
        other = random_bits((33, 5), dtype, generator)
        states.append(torch.where(torch.rand(33, 5, generator=generator) < rate, other, states[-1]))
    changes = [encode(old, new) for old, new in pairwise(states)]
    handed = [states[0], *(one["whole"] for one in changes if "whole" in one)]
    before = [bits(one).clone() for one in handed]
    assert torch.equal(bits(decode(states[0], *changes)), bits(states[-1]))
    assert all(map(torch.equal, before, map(bits, handed)))


def test_signs_of_zero_and_nans_are_changes() -> None:
    old = torch.zeros(100)
    new = old.clone()
    new[3], new[4] = -0.0, torch.nan
    new[5:6].view(torch.int32).fill_(0x7FC00001)
    parts = encode(old, new)
    assert parts["places"].tolist() == [3, 4, 5]
    made = decode(old, parts)
    assert torch.equal(made.view(torch.int32), new.view(torch.int32))
    assert encode(new, new.clone()) == {}, "a NaN is equal to itself"


@pytest.mark.parametrize(
    ("changed", "kinds"),
    [(0, set()), (10, {"places", "values"}), (300, {"mask", "values"}), (980, {"whole"}), (1000, {"whole"})],
)
def test_the_shortest_way_to_say_it_is_taken(changed: int, kinds: set[str]) -> None:
    old = torch.zeros(1000, dtype=torch.bfloat16)
    new = old.clone()
    new[:changed] = 1
    assert set(encode(old, new)) == kinds


def test_changes_that_do_not_fit_are_refused() -> None:
    old = torch.zeros(1000)
    new = old.clone()
    new[:20] = 1
    parts = encode(old, new)
    with pytest.raises(ValueError, match="the changes do not fit"):
        decode(old, parts | {"values": parts["values"][1:]})
    with pytest.raises(ValueError, match="the changes do not fit"):
        decode(old, parts | {"places": parts["places"] + 999})
