"""The directory of a run: made once, held by one process group at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stretto.config import RunConfig, dump_toml
from stretto.files import write_aside
from stretto.world import World

_REPLAY = "replay.txt"
_INCARNATION = "incarnation"


def check_new(config: RunConfig, world: World) -> None:
    """Raise ValueError, on every rank, when the run's directory already holds a run."""
    run_dir = Path(config.directory)
    if world.from_first((run_dir / "config.toml").exists()):
        raise ValueError(
            f"{run_dir} already holds a run; continue it with `stretto train --resume {run_dir}`, or set another "
            "name or run_dir"
        )


def create(config: RunConfig, world: World, replay: Path | None) -> Path:
    """Make the run's directory with the resolved configuration and the name of the rollouts that it replays, if any.

    Raises ValueError when it holds a run already or cannot be made.
    """
    check_new(config, world)
    run_dir = Path(config.directory)
    problem = None
    if world.first:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            if replay is not None:
                write_aside(run_dir / _REPLAY, str(replay.resolve()))
            write_aside(run_dir / "config.toml", dump_toml(config))  # last: it is what makes this a run
        except OSError as error:
            problem = f"cannot make the run directory {run_dir}: {error.strerror}; set run_dir to a writable place"
    if problem := world.from_first(problem):
        raise ValueError(problem)
    return run_dir


def replayed(run_dir: Path) -> Path | None:
    """The recorded rollouts that the run replays, or None when it generates its own."""
    marker = run_dir / _REPLAY
    return Path(marker.read_text()) if marker.is_file() else None


@contextmanager
def claim(run_dir: Path, world: World) -> Iterator[None]:
    """Hold the run directory: on every rank, ValueError while another run or resume of it lives."""
    handle = _lock(run_dir) if world.first else None
    if world.from_first(handle is None):
        raise ValueError(f"{run_dir} is in use by another process; wait for it or stop it")
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _lock(run_dir: Path) -> int | None:
    """A handle that holds the lock until it is closed (by whatever end of this process), or None."""
    handle = os.open(run_dir / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def next_incarnation(run_dir: Path, world: World) -> int:
    """The number of this start of the run: 1, 2, ... Durable, so that no two starts share one, checkpoint or none."""
    number = 0
    if world.first:
        path = run_dir / _INCARNATION
        number = 1 + (int(path.read_text()) if path.is_file() else 0)
        write_aside(path, str(number))
    return world.from_first(number)
