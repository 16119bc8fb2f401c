"""The reward workers, as the controller knows them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stretto.config import RunConfig
from stretto.errors import RunError
from stretto.orchestration.ray.cluster import Cluster, asked
from stretto.types import Prompt, Score

_ATTEMPTS = 3


class RewardWorkers:
    """Shares groups out among the workers; one that is gone is replaced, and its group scored again."""

    def __init__(self, config: RunConfig, cluster: Cluster, note: Callable[[str], None]):
        self._config, self._cluster, self._note = config, cluster, note
        self._workers = [self._start(slot) for slot in range(config.reward.workers)]
        self._turn = 0
        self.replaced = 0
        """Workers that had to be replaced."""

    async def ready(self) -> None:
        """Wait until every function is loaded. Raises ValueError with what is wrong with one."""
        for worker in self._workers:
            await asked(worker.ready.remote(), self._config.engine.start_timeout_s, "a reward worker to start")

    async def score(self, keys: Sequence[str], prompt: Prompt) -> list[Score]:
        """The scores of a prompt's samples. Raises RunError when several workers fail one after the other."""
        said: list[str] = []
        while len(said) < _ATTEMPTS:
            self._turn += 1
            slot = self._turn % len(self._workers)
            worker = self._workers[slot]
            try:
                return await asked(worker.score.remote(keys, prompt), self._config.rollout.timeout_s, "the rewards")
            except ValueError:
                raise
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
                self._replace(slot, worker)
        raise RunError(f"row {prompt.row} could not be scored by {len(said)} workers: {'; '.join(said)}")

    async def close(self) -> None:
        """End them."""
        for worker in self._workers:
            await asked(worker.close.remote(), self._config.sync.timeout_s, "a reward worker to end")

    def _start(self, slot: int) -> Any:
        return self._cluster.start_rewards(slot, self._config, self._cluster.partition)

    def _replace(self, slot: int, worker: Any) -> None:
        if self._workers[slot] is not worker:
            return  # another group has found it gone
        self._cluster.kill(worker)
        self._workers[slot] = self._start(slot)
        self.replaced += 1
        self._note(f"reward worker {slot} is gone and is replaced")
