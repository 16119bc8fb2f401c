"""Rewards that come with Stretto. Their libraries are the extra `rewards`, imported by the factories here."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

_PARSE_SECONDS = 5
_DELIMITERS = ("$", "\\boxed", "\\(", "\\[", "\\begin")


def make_math_verify() -> Callable[..., float]:
    """1.0 when the completion's final expression equals the column `answer` mathematically, else 0.0.

    Raises ValueError when the extra is missing. The library's own limits use SIGALRM: main thread only.
    """
    try:
        from math_verify import parse, verify
        from math_verify.errors import TimeoutException
    except ModuleNotFoundError as error:
        raise _extra_missing("math_verify", error) from error

    @functools.lru_cache(maxsize=4096)
    def parse_gold(answer: str) -> list[Any]:
        # Outside of LaTeX delimiters the library keeps only plain numbers: "2\pi" would read as 2.
        text = answer if any(mark in answer for mark in _DELIMITERS) else f"\\boxed{{{answer}}}"
        gold = parse(text, parsing_timeout=_PARSE_SECONDS, raise_on_error=True)
        if not gold:
            raise ValueError(f"math_verify finds no expression in the expected answer {answer!r}")
        return gold

    def attempt(call: Callable[[], Any], otherwise: Any) -> Any:
        # A response that cannot be parsed or compared is wrong; only running out of time is not an answer.
        try:
            return call()
        except TimeoutException as error:
            raise TimeoutError(f"math_verify took longer than {_PARSE_SECONDS} s") from error
        except Exception:
            return otherwise

    def math_verify(completion: str, answer: Any) -> float:
        gold = parse_gold(str(answer))
        found = attempt(lambda: parse(completion, parsing_timeout=_PARSE_SECONDS, raise_on_error=True), [])

        def equal(expected: Any, given: Any) -> bool:
            return verify(expected, given, timeout_seconds=_PARSE_SECONDS, raise_on_error=True)

        return float(any(attempt(functools.partial(equal, g, f), False) for g in gold for f in found))

    return math_verify


def make_reasoning_gym() -> Callable[..., float]:
    """The score of the dataset that made the row (column `reasoning_gym`: its name, parameters and entry).

    What stands between the last ``<answer>`` tags is scored, the whole completion where there are none. Raises
    ValueError when the extra is missing.
    """
    try:
        from reasoning_gym import create_dataset
        from reasoning_gym.utils import extract_answer
    except ModuleNotFoundError as error:
        raise _extra_missing("reasoning_gym", error) from error

    @functools.lru_cache(maxsize=64)
    def scorer(name: str, args: str) -> Any:
        return create_dataset(name, **json.loads(args))

    def reasoning_gym(completion: str, reasoning_gym: Mapping[str, Any]) -> float:
        dataset = scorer(reasoning_gym["dataset"], json.dumps(reasoning_gym["args"], sort_keys=True))
        tagged = extract_answer(completion)
        return dataset.score_answer(completion.strip() if tagged is None else tagged, reasoning_gym["entry"])

    return reasoning_gym


def _extra_missing(name: str, error: ModuleNotFoundError) -> ValueError:
    return ValueError(
        f"reward {name} needs the package {error.name}, which is not installed: pip install {name.replace('_', '-')}"
    )


BUILTINS: dict[str, Callable[[], Callable[..., Any]]] = {
    "math_verify": make_math_verify,
    "reasoning_gym": make_reasoning_gym,
}
