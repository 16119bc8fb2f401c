"""What a run shows while it runs: a live view in a terminal, plain lines elsewhere, nothing on silent ranks."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import Any, Self

from stretto.telemetry.formatting import clock, number

_SUMMARY = (
    ("reward", ("reward/mean",)),
    ("length", ("rollout/response_length_mean",)),
    ("grad", ("train/grad_norm",)),
    ("tok/s", ("tokens/per_s", "rollout/tokens_per_s")),
)


class Progress:
    """The interface, and the view that shows nothing. A context manager."""

    def phase(self, name: str, total: int) -> None:
        """A phase of the current step begins; ``total`` units of work lie ahead."""

    def advance(self, n: int = 1, **info: object) -> None:
        """``n`` more units of the phase are done; ``info`` is shown beside them, for example ``reward=0.5``."""

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Step ``step`` (the first is 1) is finished; shows one line of its metrics, those that are there."""

    def note(self, text: str) -> None:
        """Something worth a line of its own."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the view; what was printed stays."""


class PlainProgress(Progress):
    """One line a step and one a note, without escape codes: for files, pipes and CI."""

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._eta = Eta(total_steps)

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        left = self._eta.finished(step)
        width = len(str(self._total_steps))
        columns = [f"{label} {value}" for label, value in summary(metrics)]
        if step < self._total_steps:
            columns.insert(0, f"eta {clock(left)}")
        print(f"step {step:>{width}}/{self._total_steps}", *columns, sep="  ", flush=True)

    def note(self, text: str) -> None:
        print(text, flush=True)


class Eta:
    """Predicts the rest of a run from the steps that this process finished (a resumed run starts in the middle)."""

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._started = time.monotonic()
        self._finished = 0

    def finished(self, step: int) -> float:
        """Seconds left, now that ``step`` is finished."""
        self._finished += 1
        return (time.monotonic() - self._started) / self._finished * max(0, self._total_steps - step)


def summary(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The columns of a step's line, as (label, text), for the metrics that are there; the rare ones come last."""
    columns = []
    for label, names in _SUMMARY:
        name = next((name for name in names if name in metrics), None)
        if name is not None:
            columns.append((label, number(metrics[name])))
    if "time/step" in metrics:
        columns.append(("time", clock(metrics["time/step"])))
    if "eval/score" in metrics:
        columns.append(("eval", number(metrics["eval/score"])))
    if metrics.get("train/skipped_steps"):
        columns.append(("skipped", number(metrics["train/skipped_steps"])))
    return columns


def open_progress(total_steps: int, enabled: bool = True) -> Progress:
    """The view that fits: live when stdout is a terminal, plain lines otherwise, nothing when not ``enabled``."""
    if not enabled:
        return Progress()
    if sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        from stretto.telemetry.live import LiveProgress

        return LiveProgress(total_steps)
    return PlainProgress(total_steps)
