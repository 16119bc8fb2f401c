"""The curves of learning runs, and whether two of them differ by more than a seed does."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LAST = 20
WINDOW = 10
CURVES = {
    "reward": "reward/mean",
    "mismatch_kl": "mismatch/kl",
    "sync_bytes": "sync/bytes",
    "sync_seconds": "sync/seconds",
    "step_seconds": "time/step",
}
FULL = "sync/full_bytes"
"""What a publication that may send less would have sent."""


def read_curves(metrics: Path) -> dict[str, Any]:
    """One value a step of each of CURVES, four digits of each, and the held-out scores before and after."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [line for line in lines if line["step"] > 0]
    scores = [line["eval/score"] for line in lines if "eval/score" in line]
    curves: dict[str, Any] = {name: [_rounded(step[key]) for step in steps] for name, key in CURVES.items()}
    full = [_rounded(step[FULL]) for step in steps if FULL in step]
    return {"held_out": [_rounded(scores[0]), _rounded(scores[-1])], **curves, **({"full_bytes": full} if full else {})}


def compare(runs: Mapping[str, Mapping[str, Any]], reference: str, other_seed: str) -> dict[str, Any]:
    """What the runs so far say. A run's level is its mean reward over the last 20 steps.

    Seed noise is the larger of two: how far the level moves when only the seed changes, and twice the standard error
    of the difference of two levels, from the scatter of their steps. A run is within it when its level is no further
    than that from the reference's. `curve_distance` is the mean |difference| of the rewards averaged over 10 steps.
    """
    levels = {name: statistics.fmean(run["reward"][-LAST:]) for name, run in runs.items()}
    found: dict[str, Any] = {
        "level": levels,
        "mismatch_kl_mean": {name: statistics.fmean(run["mismatch_kl"]) for name, run in runs.items()},
        "mismatch_kl_max": {name: max(run["mismatch_kl"]) for name, run in runs.items()},
        "sent_share": {
            name: sum(run["sync_bytes"]) / sum(run["full_bytes"]) for name, run in runs.items() if "full_bytes" in run
        },
    }
    if {reference, other_seed} <= runs.keys():
        rewards = {name: run["reward"] for name, run in runs.items()}
        noise = max(
            abs(levels[reference] - levels[other_seed]),
            2 * math.hypot(_error(rewards[reference]), _error(rewards[other_seed])),
        )
        others = [name for name in runs if name not in (reference, other_seed)]
        difference = {name: levels[name] - levels[reference] for name in others}
        found |= {
            "seed_noise": noise,
            "difference": difference,
            "within_seed_noise": {name: abs(value) <= noise for name, value in difference.items()},
            "curve_distance": {
                name: _distance(rewards[name], rewards[reference]) for name in runs if name != reference
            },
        }
    return {name: _all_rounded(value) for name, value in found.items()}


def _error(rewards: Sequence[float]) -> float:
    """Standard error of a level."""
    last = rewards[-LAST:]
    return statistics.stdev(last) / math.sqrt(len(last)) if len(last) > 1 else 0.0


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    pairs = zip(_smooth(one), _smooth(other), strict=True)
    return statistics.fmean(abs(a - b) for a, b in pairs)


def _smooth(values: Sequence[float]) -> list[float]:
    window = min(WINDOW, len(values))
    return [statistics.fmean(values[at : at + window]) for at in range(len(values) - window + 1)]


def _all_rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _all_rounded(one) for name, one in value.items()}
    return value if isinstance(value, bool) else _rounded(value)


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.4g}")
