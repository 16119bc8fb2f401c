"""The learning rate at every optimizer step."""

import math

import pytest

from stretto.config.sections import TrainerConfig
from stretto.trainers.schedule import learning_rate


def rates(total: int, **settings) -> list[float]:
    config = TrainerConfig(lr=2.0, **settings)
    return [learning_rate(config, update, total) for update in range(total)]


def test_constant_stays_at_the_peak() -> None:
    assert rates(4) == [2.0] * 4


def test_warm_up_rises_in_equal_parts_and_reaches_the_peak() -> None:
    assert rates(6, warmup_steps=4) == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0, 2.0])


def test_linear_falls_to_its_floor_after_the_last_step() -> None:
    assert rates(5, schedule="linear") == pytest.approx([2.0, 1.6, 1.2, 0.8, 0.4])
    assert rates(5, schedule="linear", min_lr_ratio=0.5) == pytest.approx([2.0, 1.8, 1.6, 1.4, 1.2])


def test_cosine_with_warm_up_and_floor() -> None:
    found = rates(7, schedule="cosine", warmup_steps=2, min_lr_ratio=0.1)
    decay = [2.0 * (0.1 + 0.9 * (1 + math.cos(math.pi * k / 5)) / 2) for k in range(5)]
    assert found == pytest.approx([1.0, 2.0, *decay])


def test_steps_beyond_the_last_keep_the_floor() -> None:
    config = TrainerConfig(lr=2.0, schedule="cosine", min_lr_ratio=0.1)
    assert learning_rate(config, 50, 10) == pytest.approx(0.2)


def test_a_warm_up_as_long_as_the_run_is_all_warm_up() -> None:
    assert rates(3, schedule="linear", warmup_steps=3) == pytest.approx([2 / 3, 4 / 3, 2.0])
