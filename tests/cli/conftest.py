from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest


@pytest.fixture
def stretto(tmp_path: Path) -> Callable[..., CompletedProcess[str]]:
    """Run the command in tmp_path as a user would, in a process of its own: `stretto("train", "run.toml")`."""

    def run(*arguments: str, **environment: str) -> CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK")}
        return subprocess.run(
            [sys.executable, "-m", "stretto", *arguments],
            cwd=tmp_path,
            env=kept | {"OMP_NUM_THREADS": "1"} | environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    return run
