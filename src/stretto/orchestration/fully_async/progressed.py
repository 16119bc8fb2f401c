"""What a fully asynchronous run has come to."""

from __future__ import annotations

from dataclasses import dataclass, field

from stretto.orchestration.checkpoint import CheckpointStore
from stretto.orchestration.queue import TokenCounts


@dataclass
class Progressed:
    """What a run has come to: saved in every checkpoint, beside the trainer's state."""

    step: int = 0
    incarnation: int = 0
    tokens: TokenCounts = field(default_factory=TokenCounts)
    next: int = 0
    """Position of the first prompt that was never begun."""
    again: list[int] = field(default_factory=list)
    """Positions before it that were begun and neither trained on nor dropped."""
    trained: int = 0
    """Response tokens that were trained on."""
    restarts: int = 0
    """Times that the trainer began anew."""
    eval_first: float | None = None
    eval_last: float | None = None
    best_step: int | None = None
    best_score: float | None = None


def progressed_at(store: CheckpointStore, step: int | None) -> Progressed:
    """The state of the checkpoint of `step`; the beginning when that is None.

    What was in flight then is generated again. Raises ValueError when it cannot be read.
    """
    if step is None:
        return Progressed()
    saved = store.read(step)
    try:
        tokens = TokenCounts(**saved.pop("tokens"))
        tokens.dropped += tokens.in_flight
        return Progressed(tokens=tokens, **saved)
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"cannot read the checkpoint {store.path(step)}: its run.json is not one of a fully asynchronous run of "
            f"this version of stretto ({type(error).__name__}: {error})"
        ) from error
