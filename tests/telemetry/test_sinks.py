"""TensorBoard gets the scalars; a missing package names its extra."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from stretto.config.sections import TelemetryConfig
from stretto.telemetry.runlog import RunLog, rewind


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = TelemetryConfig(tensorboard=True)
    with RunLog(tmp_path, config) as log:
        for step in range(1, 6):
            log.log(step, {"reward/mean": float(step), "histogram": [1, 2]})
    rewind(tmp_path, 3)
    with RunLog(tmp_path, config) as log:
        log.log(4, {"reward/mean": 40.0})
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["reward/mean"]
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 1), (2, 2), (3, 3), (4, 40)]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_asking_for_wandb_without_it_names_the_extra(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"stretto\[wandb\]"):
        RunLog(tmp_path, TelemetryConfig(wandb="project"))
