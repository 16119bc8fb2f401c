"""One whole run on the tiny model, which many tests look at."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_helpers import complete, write_run


@pytest.fixture(scope="session")
def whole_run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of 12 steps on one process that nothing disturbed; all its checkpoints are kept."""
    run_file = write_run(tmp_path_factory.mktemp("whole"), tiny_model, checkpoint={"every": 3, "keep": 9})
    complete("train", run_file)
    return run_file.parent / "run"
