"""What the report reads of a run directory."""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from stretto.telemetry.runlog import METRICS, SAMPLES, read_jsonl

Series = dict[int, float]


class Pair(NamedTuple):
    """The same held-out prompt, answered at the first and at the last evaluation."""

    before: Mapping[str, Any]
    after: Mapping[str, Any]

    @property
    def change(self) -> float:
        """Reward after minus reward before."""
        return float(self.after["reward"]) - float(self.before["reward"])


@dataclass(frozen=True)
class RunData:
    """One run: its configuration as text and as tables, its metrics by name and step, its samples in order."""

    name: str
    config_text: str
    config: Mapping[str, Any]
    series: Mapping[str, Series]
    samples: list[dict[str, Any]]

    @property
    def steps(self) -> tuple[int, int]:
        """The first and last step that has a metric; (0, 0) without any."""
        steps = {step for series in self.series.values() for step in series}
        return (min(steps), max(steps)) if steps else (0, 0)

    def total(self, name: str) -> float | None:
        """The sum of a metric over all steps; None when it was never logged."""
        return sum(self.series[name].values()) if name in self.series else None


def load_run(run_dir: Path) -> RunData:
    """Read a run directory. Raises ValueError when it has no metrics or a file is broken in its middle."""
    metrics, samples, config = run_dir / METRICS, run_dir / SAMPLES, run_dir / "config.toml"
    if not metrics.exists():
        raise ValueError(f"{run_dir} has no {METRICS}: give the directory of a run that began")
    config_text = config.read_text(encoding="utf-8") if config.exists() else ""
    tables = tomllib.loads(config_text)
    return RunData(
        name=str(tables.get("name", run_dir.resolve().name)),
        config_text=config_text,
        config=tables,
        series=_series(read_jsonl(metrics)),
        samples=list(read_jsonl(samples)) if samples.exists() else [],
    )


def _series(records: Iterable[Mapping[str, Any]]) -> dict[str, Series]:
    """Scalars by name, then by step in order. The strings nan and inf become floats again."""
    found: dict[str, Series] = defaultdict(dict)
    for record in records:
        for name, value in record.items():
            if name != "step" and not isinstance(value, list):
                found[name][record["step"]] = float(value)
    return {name: dict(sorted(series.items())) for name, series in found.items()}


def eval_samples(run: RunData) -> tuple[list[Pair], list[dict[str, Any]]]:
    """Held-out samples as pairs of first and last evaluation, the most changed first; else those of the only one.

    Samples join on their row; the n-th sample of a row at one step goes with the n-th at the other. A pair of which one
    could not be scored has no change to show and is left out.
    """
    records = [record for record in run.samples if record["kind"] == "eval"]
    steps = [record["step"] for record in records]
    if not records or min(steps) == max(steps):
        return [], records
    before, after = (_by_row(records, step) for step in (min(steps), max(steps)))
    pairs = [Pair(before[key], after[key]) for key in before if key in after]
    pairs = [pair for pair in pairs if pair.before["reward"] is not None and pair.after["reward"] is not None]
    return sorted(pairs, key=_interest, reverse=True), []


def _by_row(records: list[dict[str, Any]], step: int) -> dict[tuple[Any, int], dict[str, Any]]:
    seen: dict[Any, int] = defaultdict(int)
    result = {}
    for record in records:
        if record["step"] == step:
            result[record["row"], seen[record["row"]]] = record
            seen[record["row"]] += 1
    return result


def _interest(pair: Pair) -> tuple[float, bool]:
    return abs(pair.change), pair.before["response"] != pair.after["response"]
