"""The order of prompts is a function of seed and position alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.data import PromptStream
from stretto.types import Prompt

SEEDS = st.integers(0, 2**31 - 1)


def stream_of(size: int, seed: int, shuffle: bool = True) -> PromptStream:
    return PromptStream([Prompt((1,), str(row), row) for row in range(size)], seed, shuffle)


@given(st.integers(1, 50), SEEDS, st.integers(0, 1000))
def test_an_epoch_holds_every_prompt_once(size: int, seed: int, epoch: int) -> None:
    stream = stream_of(size, seed)
    rows = [stream.at(epoch * size + place).row for place in range(size)]
    assert sorted(rows) == list(range(size))


@given(st.integers(1, 20), SEEDS, st.lists(st.integers(0, 200), min_size=1, max_size=30))
def test_what_is_at_a_position_does_not_depend_on_the_calls_before(size: int, seed: int, positions: list[int]) -> None:
    stream = stream_of(size, seed)
    assert [stream.at(p).row for p in positions] == [stream_of(size, seed).at(p).row for p in positions]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def order(seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(stream_of(20, seed).at(epoch * 20 + place).row for place in range(20))

    assert len({order(seed, epoch) for seed in range(3) for epoch in range(3)}) == 9


def test_the_order_is_the_same_on_every_machine_and_numpy() -> None:
    assert [stream_of(8, 5).at(position).row for position in range(8)] == [2, 4, 3, 1, 5, 0, 6, 7]


def test_without_shuffling_rows_come_in_their_own_order() -> None:
    stream = stream_of(3, 0, shuffle=False)
    assert [stream.at(position).row for position in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_no_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="no prompts to stream"):
        stream_of(0, 0)
