"""The files that a run writes as it goes: metrics.jsonl, samples.jsonl and ledger.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO

from stretto.telemetry.jsonl import keep_lines, mend_tail, read_jsonl, to_line
from stretto.telemetry.sinks import Sink, TensorBoardSink, WandbSink

if TYPE_CHECKING:
    from stretto.config.sections import TelemetryConfig

__all__ = ["LEDGER", "METRICS", "SAMPLES", "RunLog", "read_jsonl", "rewind"]

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
LEDGER = "ledger.jsonl"


class RunLog:
    """Appends to the files of one run directory, which it creates; every line is flushed as it is written.

    After a resume call :func:`rewind` first. One process of a run has one of these.
    """

    def __init__(self, run_dir: Path, config: TelemetryConfig) -> None:
        """Raises ValueError, naming the extra to install, when TensorBoard or W&B is asked for and missing."""
        run_dir.mkdir(parents=True, exist_ok=True)
        for name in (METRICS, SAMPLES, LEDGER):
            mend_tail(run_dir / name)
        self._sinks: list[Sink] = []
        if config.tensorboard:
            self._sinks.append(TensorBoardSink(run_dir, _last_step(run_dir / METRICS)))
        if config.wandb is not None:
            self._sinks.append(WandbSink(run_dir, config.wandb))
        self._run_dir = run_dir
        self._open()

    def rewind(self, step: int) -> None:
        """Drop every line of a step after ``step``; see :func:`rewind`."""
        self._close()
        rewind(self._run_dir, step)
        self._open()

    def log(self, step: int, metrics: Mapping[str, float | int | list[Any]]) -> None:
        """Write ``{"step": step, **metrics}``; a step may have several lines. Lists go to the file alone."""
        _write(self._metrics, [{"step": step, **metrics}])
        scalars = {name: float(value) for name, value in metrics.items() if not isinstance(value, list)}
        for sink in self._sinks:
            sink.log(step, scalars)

    def samples(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Write samples; the ``kind`` of each is "train" or "eval"."""
        assert all(record["kind"] in ("train", "eval") for record in records), 'kind is "train" or "eval"'
        _write(self._samples, [{"step": step, **record} for record in records])

    def ledger(self, step: int, record: Mapping[str, Any]) -> None:
        """Write what became of the prompts of a step."""
        _write(self._ledger, [{"step": step, **record}])

    def close(self) -> None:
        """Close the files, then TensorBoard and W&B."""
        self._close()
        for sink in self._sinks:
            sink.close()

    def _open(self) -> None:
        self._metrics = _appending(self._run_dir / METRICS)
        self._samples = _appending(self._run_dir / SAMPLES)
        self._ledger = _appending(self._run_dir / LEDGER)

    def _close(self) -> None:
        for file in (self._metrics, self._samples, self._ledger):
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def rewind(run_dir: Path, step: int) -> None:
    """Drop every line of a step after ``step`` from the three files, each atomically, and a torn last line.

    Raises ValueError for a broken line elsewhere or a line without a step.
    """
    for name in (METRICS, SAMPLES, LEDGER):
        path = run_dir / name
        if path.exists():
            _rewind_file(path, step)


def _rewind_file(path: Path, step: int) -> None:
    keep_lines(path, lambda record: _step_of(record, path) <= step)


def _step_of(record: Mapping[str, Any], path: Path) -> int:
    step = record.get("step")
    if not isinstance(step, int):
        raise ValueError(f"{path} has a line without a step; remove that line")
    return step


def _last_step(path: Path) -> int:
    return max((_step_of(record, path) for record in read_jsonl(path)), default=-1) if path.exists() else -1


def _appending(path: Path) -> TextIO:
    return path.open("a", encoding="utf-8", newline="\n")


def _write(file: TextIO, records: Sequence[Mapping[str, Any]]) -> None:
    """Write whole lines and hand them to the system, so that a killed process loses none."""
    file.write("".join(map(to_line, records)))
    file.flush()
