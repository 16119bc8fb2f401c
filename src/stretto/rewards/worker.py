"""What runs inside a reward worker process."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Collection, Sequence

from stretto.lifeline import die_with
from stretto.rewards.adapters import Adapter, adapt
from stretto.rewards.outcomes import Outcome
from stretto.rewards.resolve import resolve
from stretto.types import Failure

_loaded: dict[str, Adapter | ValueError] = {}


def prepare(parent: int, rewards: Sequence[tuple[str, str]]) -> None:
    """Tie this process's life to `parent`'s and load the rewards (pairs of spec and short name).

    Loading happens here and not in the first call, whose deadline is meant for scoring. What a reward fails with is
    kept for whoever asks for it.
    """
    die_with(parent)
    _leave_interrupts_to_the_parent()
    os.environ["OMP_NUM_THREADS"] = "1"
    for spec, name in rewards:
        try:
            _loaded[spec] = adapt(resolve(spec), name)
        except ValueError as error:
            _loaded[spec] = error


def inspect_reward(spec: str, columns: Collection[str] | None) -> None:
    """Raise ValueError if the reward could not be loaded or asks for a column that is not among `columns`."""
    adapter = _adapter(spec)
    if columns is not None:
        adapter.check_columns(columns)


def score(spec: str, samples: bytes) -> list[Outcome] | Failure:
    """:meth:`Adapter.score` of the pickled samples."""
    return _adapter(spec).score(pickle.loads(samples))


def _adapter(spec: str) -> Adapter:
    found = _loaded[spec]
    if isinstance(found, ValueError):
        raise ValueError(str(found))
    return found


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The process was started with SIGINT blocked (see processes.py); programs that a reward runs must not inherit it.
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
