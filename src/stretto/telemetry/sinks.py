"""Where metrics go beside metrics.jsonl, when asked."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from stretto.config.sections import TelemetryConfig


class Sink(Protocol):
    """Takes the scalar metrics of a step."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def check_sinks(config: TelemetryConfig) -> None:
    """Raise ValueError when a sink that `config` asks for has no package here."""
    for package, wanted in (("tensorboard", config.tensorboard), ("wandb", config.wandb is not None)):
        if wanted and find_spec(package) is None:
            raise _missing(package)


def _missing(package: str) -> ValueError:
    return ValueError(f"telemetry.{package} needs the package {package}, which is not installed: pip install {package}")


class TensorBoardSink:
    """Event files in ``<run_dir>/tensorboard``. Steps after ``last_step`` that an earlier process wrote are hidden."""

    def __init__(self, run_dir: Path, last_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("tensorboard") from error
        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=last_step + 1)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A Weights & Biases run; a resumed run continues it, and its x axis is our step."""

    def __init__(self, run_dir: Path, project: str) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _missing("wandb") from error
        self._run: Any = wandb.init(
            project=project, name=run_dir.name, dir=str(run_dir), id=_run_id(run_dir), resume="allow"
        )
        # Their own counter cannot go back, ours does after a resume.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log({"step": step, **scalars})

    def close(self) -> None:
        self._run.finish()


def _run_id(run_dir: Path) -> str:
    path = run_dir / "wandb_id"
    if not path.exists():
        path.write_text(uuid.uuid4().hex, encoding="utf-8")
    return path.read_text(encoding="utf-8")
