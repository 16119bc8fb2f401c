"""Scores on their way, and who is to blame when a call fails."""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from stretto.rewards import worker
from stretto.rewards.outcomes import Outcome, combine
from stretto.rewards.processes import Call, CallTimeout, WorkerDied, Workers
from stretto.rewards.sample import Sample
from stretto.types import Failure, Score

# A worker lost at an unlucky moment can take the others with it; calls that were in flight are made anew.
_ATTEMPTS = 3


class Scoring:
    """One function's call for some samples."""

    def __init__(self, workers: Workers, reward: tuple[str, str], samples: Sequence[Sample], timeout_s: float) -> None:
        self._workers = workers
        self._reward = reward
        self._samples = samples
        self._timeout_s = timeout_s
        self._payload = _pickled(samples)
        self._call = self._start()

    @property
    def name(self) -> str:
        """The short name of the reward."""
        return self._reward[1]

    def outcomes(self, deadline: float) -> list[Outcome]:
        """One outcome per sample; a call that failed as a whole is made once more for each sample alone.

        Raises TimeoutError when `deadline` (of time.monotonic()) passes first.
        """
        answer = self._answer(deadline)
        if not isinstance(answer, Failure):
            return answer
        if len(self._samples) == 1:
            return [answer]
        alone = [Scoring(self._workers, self._reward, [sample], self._timeout_s) for sample in self._samples]
        return [scoring.outcomes(deadline)[0] for scoring in alone]

    def _start(self) -> Call:
        return self._workers.call(worker.score, self._reward[0], self._payload, timeout_s=self._timeout_s)

    def _answer(self, deadline: float) -> list[Outcome] | Failure:
        for _ in range(_ATTEMPTS):
            try:
                return self._workers.wait(self._call, deadline)
            except CallTimeout:
                return Failure("timeout", self.name, f"no answer within {self._timeout_s:g} s; the worker was killed")
            except WorkerDied as error:
                return Failure("crash", self.name, str(error))
            except BrokenProcessPool:
                self._call = self._start()
        return Failure("crash", self.name, f"the reward workers were lost {_ATTEMPTS} times during this call")


class PendingScores:
    """What :meth:`RewardPool.submit` returns: the scores of a group, in the order of its samples."""

    def __init__(self, scorings: Sequence[Scoring], count: int, weights: Sequence[float]) -> None:
        self._scorings = scorings
        self._count = count
        self._weights = weights

    def result(self, timeout_s: float) -> list[Score]:
        """Wait for the scores; a sample that could not be scored has a failure in place of a reward.

        Raises TimeoutError naming the reward that is missing, ValueError when a function has a parameter that no
        column supplies, RuntimeError when the pool was closed meanwhile.
        """
        deadline = time.monotonic() + timeout_s
        names = [scoring.name for scoring in self._scorings]
        columns: list[list[Outcome]] = []
        for scoring in self._scorings:
            try:
                columns.append(scoring.outcomes(deadline))
            except TimeoutError:
                raise TimeoutError(
                    f"reward {scoring.name} has not scored a group of {self._count} within {timeout_s:g} s"
                ) from None
        rows = zip(*columns, strict=True)
        return [combine(row, names, self._weights) for row in rows]


def _pickled(samples: Sequence[Sample]) -> bytes:
    try:
        return pickle.dumps(list(samples))
    except Exception as error:
        columns: dict[str, Any] = dict(samples[0].fields)
        kinds = ", ".join(f"{name}: {type(value).__name__}" for name, value in columns.items())
        raise ValueError(
            f"the columns of a row cannot be sent to a reward worker ({error}); they are {kinds}; keep plain values"
        ) from error
