"""What became of a sample under one reward: a number, None (abstained), or the failure.

Everything a function returns passes through here inside the worker, so only plain numbers cross processes.
"""

from __future__ import annotations

import math
import numbers
import reprlib
import traceback
from collections.abc import Sequence
from typing import Any

from stretto.types import Failure, Score

Outcome = float | None | Failure

_DETAIL_CHARS = 4000
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 200
_short.maxlist = _short.maxtuple = 20


def raised(error: BaseException, reward: str) -> Failure:
    """The failure of a call that ended in an exception, with its traceback (the last 4,000 characters)."""
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    text = "".join(traceback.format_exception(type(error), error, frames))
    return Failure("timeout" if isinstance(error, TimeoutError) else "crash", reward, text[-_DETAIL_CHARS:])


def one_outcome(value: Any, reward: str) -> Outcome:
    """`value` as an outcome: numbers (also bool, NumPy scalars, 0-dim arrays and tensors) become floats, None stays.

    Anything else is a ``wrong_type`` failure, NaN and infinities are ``not_finite``.
    """
    if value is None or isinstance(value, Failure):
        return value
    plain = value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value
    if not isinstance(plain, numbers.Real):
        return Failure("wrong_type", reward, f"expected a number or None, got {_describe(value)}")
    try:
        number = float(plain)
    except OverflowError:
        number = math.inf
    return number if math.isfinite(number) else Failure("not_finite", reward, _describe(value))


def group_outcomes(values: Any, count: int, reward: str) -> list[Outcome]:
    """The outcomes of one call that scores `count` samples; a wrong type or length fails all of them."""
    if getattr(values, "ndim", None) == 1 and hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes, bytearray)):
        failure = Failure("wrong_type", reward, f"expected a list of {count} numbers, got {_describe(values)}")
        return [failure] * count
    if len(values) != count:
        detail = f"{len(values)} values for {count} samples: {_short.repr(values)}"
        return [Failure("wrong_length", reward, detail)] * count
    return [one_outcome(value, reward) for value in values]


def combine(outcomes: Sequence[Outcome], names: Sequence[str], weights: Sequence[float]) -> Score:
    """One sample's score: the weighted sum over the functions that did not abstain.

    The first failure in order fails the sample; so does every function abstaining.
    """
    parts = {name: value for name, value in zip(names, outcomes, strict=True) if isinstance(value, float)}
    for outcome in outcomes:
        if isinstance(outcome, Failure):
            return Score(None, parts, outcome)
    if not parts:
        return Score(None, {}, Failure("abstained", ", ".join(names), "every reward function returned None"))
    total = math.fsum(weight * parts[name] for name, weight in zip(names, weights, strict=True) if name in parts)
    if not math.isfinite(total):
        return Score(None, parts, Failure("not_finite", ", ".join(parts), f"the weighted sum of {parts} is {total}"))
    return Score(total, parts)


def _describe(value: Any) -> str:
    return f"{_short.repr(value)} ({type(value).__name__})"
