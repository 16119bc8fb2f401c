"""Scores groups of samples in worker processes, with a deadline for every call."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Collection, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING

from stretto.rewards import worker
from stretto.rewards.pending import PendingScores, Scoring
from stretto.rewards.processes import WorkerDied, Workers
from stretto.rewards.resolve import short_names
from stretto.rewards.sample import Sample

if TYPE_CHECKING:  # workers import this package too, and have no use for pydantic
    from stretto.config.sections import RewardConfig

LOAD_TIMEOUT_S = 180.0


class RewardPool:
    """The run's reward functions, loaded in worker processes. Use as a context manager, or call :meth:`close`."""

    def __init__(self, config: RewardConfig) -> None:
        """Start the workers (loading goes on in the background; :meth:`check` waits for it).

        Raises ValueError for names or weights that do not fit, and inside a worker that imports the user's script.
        """
        _refuse_inside_worker()
        weights = config.weights if config.weights is not None else [1.0] * len(config.functions)
        if len(weights) != len(config.functions):
            raise ValueError(f"reward.weights has {len(weights)} values for {len(config.functions)} functions")
        self.names = short_names(config.functions)
        self._rewards = list(zip(config.functions, self.names, strict=True))
        self._weights = weights
        self._timeout_s = config.timeout_s
        self._workers = Workers(config.workers, self._rewards)

    def check(self, columns: Collection[str] | None = None) -> None:
        """Wait until a worker has loaded every function.

        Raises ValueError with what is wrong: a function that cannot be loaded, or one with a parameter that `columns`
        (those of the data, when given) do not supply.
        """
        deadline = time.monotonic() + LOAD_TIMEOUT_S
        named = None if columns is None else tuple(columns)
        specs = ", ".join(spec for spec, _ in self._rewards)
        for call in [self._workers.call(worker.inspect_reward, spec, named) for spec, _ in self._rewards]:
            try:
                self._workers.wait(call, deadline)
            except TimeoutError:
                raise ValueError(
                    f"importing {specs} takes more than {LOAD_TIMEOUT_S:.0f} s; move slow work out of the top level"
                ) from None
            except (BrokenProcessPool, WorkerDied) as error:
                raise ValueError(
                    f"a reward worker died while it was importing {specs} ({error}); what it printed is above. "
                    "A script that starts a run at its top level needs `if __name__ == '__main__':` around that"
                ) from None

    def submit(self, group: Sequence[Sample]) -> PendingScores:
        """Queue one call per function for the samples of a group, without waiting.

        Raises ValueError when a column cannot be sent to another process.
        """
        scorings = [Scoring(self._workers, reward, group, self._timeout_s) for reward in self._rewards] if group else []
        return PendingScores(scorings, len(group), self._weights)

    def close(self) -> None:
        """End the workers; pending scores are given up."""
        self._workers.close()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _refuse_inside_worker() -> None:
    # Workers import the script that started the run; one without a guard gets here again, still starting up.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ValueError(
            "a reward worker imports the script that started the run, and this one starts a run when it is imported; "
            "put that call under `if __name__ == '__main__':`"
        )
