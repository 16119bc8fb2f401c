"""The vocabulary of metrics and the helpers that fill it."""

from __future__ import annotations

import time

import pytest

from stretto.telemetry.formatting import clock, number, sparkline
from stretto.telemetry.metrics import METRICS, PhaseTimer, describe, mean_std


def test_mean_and_std_are_those_of_the_population() -> None:
    assert mean_std([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]) == (5.0, 2.0)
    assert mean_std([3.0]) == (3.0, 0.0)


def test_the_mean_of_nothing_is_an_error_and_not_a_value() -> None:
    with pytest.raises(ValueError, match="leave the metric out"):
        mean_std([])


def test_phases_add_up_within_a_step_and_start_anew_after_it() -> None:
    timer = PhaseTimer()
    for _ in range(2):
        with timer("rollout"):
            time.sleep(0.01)
    with timer("train"):
        pass
    first = timer.metrics()
    assert first.keys() == {"time/rollout", "time/train", "time/step"}
    assert first["time/rollout"] >= 0.02
    assert first["time/step"] >= first["time/rollout"] + first["time/train"]
    assert timer.metrics().keys() == {"time/step"}


def test_a_phase_that_raises_is_counted_and_leaves_the_timer_usable() -> None:
    timer = PhaseTimer()
    with pytest.raises(KeyError), timer("train"):
        raise KeyError
    with timer("sync"):
        pass
    assert timer.metrics().keys() == {"time/train", "time/sync", "time/step"}


def test_nested_phases_are_a_bug() -> None:
    timer = PhaseTimer()
    with timer("rollout"), pytest.raises(AssertionError, match="inside rollout"), timer("reward"):
        pass


def test_every_name_has_a_group_a_title_and_a_sentence() -> None:
    for name, metric in METRICS.items():
        assert name.count("/") == 1
        assert metric.title
        assert metric.sentence.endswith(".")
    assert describe("reward/part/exact").title == "Reward part: exact"
    assert describe("my/own").title == "my/own"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (0.5321, "0.532"), (4.9, "4.90"), (123.4, "123"), (1234.4, "1,234"), (56789, "56.8k"), (999_600, "1M"),
     (1.23e-5, "1.2e-05"), (-5e5, "-500k"), (1e20, "1.0e+20"), (float("nan"), "nan"), (float("-inf"), "-inf")],
)  # fmt: skip
def test_numbers_are_short(value: float, shown: str) -> None:
    assert number(value) == shown


@pytest.mark.parametrize(("seconds", "shown"), [(4.2, "4.2 s"), (59.97, "1:00"), (67, "1:07"), (7421, "2:03:41")])
def test_seconds_read_like_a_clock(seconds: float, shown: str) -> None:
    assert clock(seconds) == shown


def test_a_sparkline_spans_low_to_high_and_leaves_gaps() -> None:
    assert sparkline([9.0, 0.0, float("nan"), 1.0], width=3) == "▁ █"
    assert sparkline([2.0, 2.0], width=8) == "▄▄"
