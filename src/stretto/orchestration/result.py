"""How a run ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stretto.telemetry.report import write_report


@dataclass(frozen=True)
class RunResult:
    """How a run ended. Scores are None without held-out prompts."""

    run_dir: Path
    steps: int
    heldout_before: float | None
    heldout_after: float | None
    best_step: int | None
    best_score: float | None


def conclude(result: RunResult) -> None:
    """Write the report and say where everything is."""
    report = write_report(result.run_dir)
    if result.heldout_before is not None and result.heldout_after is not None:
        print(f"held-out score {result.heldout_before:.3f} -> {result.heldout_after:.3f} after {result.steps} steps")
    print(f"run directory  {result.run_dir}\nreport         {report}", flush=True)
