"""The directory of a run: made once, held by one process group at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stretto.config import RunConfig, dump_toml
from stretto.orchestration.checkpoint import write_aside
from stretto.world import World

_REPLAY = "replay.txt"


def create(config: RunConfig, world: World, replay: Path | None) -> Path:
    """Make the run's directory with the resolved configuration and the name of the rollouts that it replays, if any.

    Raises ValueError when it holds a run already or cannot be made.
    """
    run_dir = Path(config.directory)
    problem = None
    if world.first:
        if (run_dir / "config.toml").exists():
            problem = (
                f"{run_dir} already holds a run; continue it with `stretto train --resume {run_dir}`, or set another "
                "name or run_dir"
            )
        else:
            try:
                run_dir.mkdir(parents=True, exist_ok=True)
                if replay is not None:
                    write_aside(run_dir / _REPLAY, str(replay.resolve()))
                write_aside(run_dir / "config.toml", dump_toml(config))  # last: it is what makes this a run
            except OSError as error:
                problem = f"cannot make the run directory {run_dir}: {error.strerror}; set run_dir to a writable place"
    problem = world.from_first(problem)
    if problem:
        raise ValueError(problem)
    return run_dir


def replayed(run_dir: Path) -> Path | None:
    """The recorded rollouts that the run replays, or None when it generates its own."""
    marker = run_dir / _REPLAY
    return Path(marker.read_text()) if marker.is_file() else None


@contextmanager
def claim(run_dir: Path, world: World) -> Iterator[None]:
    """Hold the run directory: a second run or resume of it is refused while this one lives."""
    if not world.first:
        yield
        return
    handle = os.open(run_dir / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"{run_dir} is in use by another process; wait for it or stop it") from None
        yield
    finally:
        os.close(handle)
