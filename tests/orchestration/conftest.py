"""One whole run on the tiny model, which many tests look at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from run_helpers import STARTED, complete, kill, write_run


@pytest.fixture(autouse=True)
def _no_process_stays() -> Iterator[None]:
    yield
    while STARTED:
        process = STARTED.pop()
        if process.poll() is None:
            kill(process, also=lambda below: below)


@pytest.fixture(scope="session")
def whole_run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of 12 steps on one process that nothing disturbed; all its checkpoints are kept."""
    run_file = write_run(tmp_path_factory.mktemp("whole"), tiny_model, checkpoint={"every": 3, "keep": 9})
    complete("train", run_file)
    return run_file.parent / "run"
