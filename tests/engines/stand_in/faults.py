"""What both ends know of the stand-in: its faults, by the prompt's first token, and its tokens."""

from __future__ import annotations

REFUSES, DIES, HANGS, ABORTS, NO_REASON, STOPS_FOR_NOTHING, TOO_SHORT, LOGPROB_MISSING, NOT_FINITE = range(10, 19)


def token(seed: int, position: int) -> int:
    """What is sampled at this position of prompt and response, from 20 on."""
    return 20 + (seed // 2 + position * position) % 50
