"""Reward functions in a process of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stretto.config import RunConfig
from stretto.models.checkpoint import load_tokenizer, resolve
from stretto.orchestration.ray.bus import SampleBus
from stretto.orchestration.ray.part import Part
from stretto.orchestration.rollouts import reward_samples
from stretto.rewards import RewardPool
from stretto.types import Prompt, Score


class RewardWorker(Part):
    """Scores what is on the bus. The functions run in a child that is killed when a call takes too long."""

    def __init__(self, config: RunConfig, partition: str):
        self._bus = SampleBus(partition)
        self._timeout_s = config.rollout.timeout_s
        self._tokenizer: Any = load_tokenizer(resolve(config.model.path))
        self._pool = RewardPool(config.reward.model_copy(update={"workers": 1}))

    def ready(self) -> bool:
        """Whether every function is loaded. Raises ValueError with what is wrong with one."""
        self._pool.check()
        return True

    def score(self, keys: Sequence[str], prompt: Prompt) -> list[Score]:
        """The scores of a prompt's samples; those that did not fail are on the bus as well."""
        responses = [rollout.response_ids for rollout in self._bus.get(keys, scored=False)]
        samples = reward_samples(prompt, responses, self._tokenizer)
        scores = self._pool.submit(samples).result(self._timeout_s)
        good = [(key, score) for key, score in zip(keys, scores, strict=True) if score.failure is None]
        if good:
            self._bus.put_scores([key for key, _ in good], [score for _, score in good])
        return scores

    def close(self) -> None:
        """End the child."""
        self._pool.close()
