"""TensorBoard gets the scalars; a missing package is named with its command."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from stretto.config.sections import TelemetryConfig
from stretto.telemetry.runlog import RunLog, rewind
from stretto.telemetry.sinks import check_sinks


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


@pytest.mark.parametrize(("package", "value"), [("tensorboard", True), ("wandb", "project")])
def test_asking_for_a_sink_without_its_package_names_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: str, value: bool | str
) -> None:
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    config = TelemetryConfig.model_validate({package: value})
    said = rf"telemetry\.{package} needs the package {package}, .*: pip install {package}$"
    with pytest.raises(ValueError, match=said):
        check_sinks(config)
    with pytest.raises(ValueError, match=said):
        RunLog(tmp_path, config)
    check_sinks(TelemetryConfig())


def test_a_sink_whose_package_is_here_is_let_through() -> None:
    pytest.importorskip("tensorboard")
    check_sinks(TelemetryConfig(tensorboard=True))
