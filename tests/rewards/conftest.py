"""Pools over the functions of example_rewards.py."""

from collections.abc import Callable, Iterator, Sequence

import pytest
from reward_helpers import example

from stretto.config.sections import RewardConfig
from stretto.rewards import RewardPool


@pytest.fixture
def open_pool() -> Iterator[Callable[..., RewardPool]]:
    pools: list[RewardPool] = []

    def build(
        *names: str, weights: Sequence[float] | None = None, timeout_s: float = 30.0, workers: int = 1
    ) -> RewardPool:
        functions = [example(name) for name in names]
        given = None if weights is None else list(weights)
        pools.append(RewardPool(RewardConfig(functions=functions, weights=given, timeout_s=timeout_s, workers=workers)))
        return pools[-1]

    yield build
    for pool in pools:
        pool.close()
