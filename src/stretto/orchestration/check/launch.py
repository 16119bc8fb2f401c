"""A check in this process, or in as many as its trainer takes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from stretto.errors import RunError
from stretto.orchestration.check.ladder import LADDER, climb
from stretto.orchestration.check.probe import make_probe
from stretto.orchestration.check.report import Outcome, Report, Rung
from stretto.orchestration.check.settings import CheckSettings
from stretto.orchestration.check.worker import PHASE_S, Job, report_file
from stretto.world import join_world, leave_world

DEADLINE_S = 1800.0
_RANKS = ("-m", "stretto.orchestration.check.ranks", "--standalone", "--nproc-per-node")
_WORKER = ("-m", "stretto.orchestration.check.worker")
_SHOWN = 3000
_SMALLER = "check fewer layers (--layers) or ranks, and whether memory runs out"


def check(settings: CheckSettings, *, worker: Sequence[str] = _WORKER, deadline_s: float = DEADLINE_S) -> Report:
    """Climb the ladder. `worker` is what each of several ranks runs, a job file behind it.

    Raises ValueError for bad input, RunError when the ranks end without a report or not at all.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError("stretto check starts the ranks it needs: start it without torchrun")
    if torch.cuda.is_available() and settings.ranks > torch.cuda.device_count():
        raise ValueError(f"{settings.title()} needs {settings.ranks} GPUs and {torch.cuda.device_count()} are here")
    if settings.map_file is not None and not Path(settings.map_file).is_file():
        raise ValueError(f"--map {settings.map_file} is not a file")
    with tempfile.TemporaryDirectory(prefix="stretto-check-") as scratch:
        work = Path(scratch)
        probe = make_probe(settings.model, work, dtype=settings.dtype, layers=settings.layers, stages=settings.stages)
        if settings.ranks > 1:
            return _spawn(Job(settings, probe, work), worker, deadline_s)
        world = join_world(PHASE_S)
        try:
            return climb(settings, probe, work, world)
        finally:
            leave_world()


def _spawn(job: Job, worker: Sequence[str], deadline_s: float) -> Report:
    """Run the worker on every rank under torchrun, and put together what they report."""
    file, log = job.work / "job.json", job.work / "output.txt"
    job.write(file)
    command = [sys.executable, *_RANKS, str(job.settings.ranks), *worker, str(file)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        try:
            process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise RunError(
                f"the ranks did not end within {deadline_s:.0f} s; {_SMALLER}; the last they said:\n{_tail(log)}"
            ) from None
        finally:
            _end(process)
    return _together(job, log, process.returncode)


def _end(process: subprocess.Popen[bytes]) -> None:
    """torchrun ends its ranks when it is asked to; when it is killed, they die with it."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()


def _together(job: Job, log: Path, code: int) -> Report:
    """The first rank's report, or that of the rank which raised first: others then fail for the want of it.

    Raises RunError when it would have all passed and torchrun's exit `code` says that a rank died.
    """
    files = [file for rank in range(job.settings.ranks) if (file := report_file(job.work, rank)).is_file()]
    reports = [one for file in sorted(files, key=lambda one: one.stat().st_mtime_ns) if (one := _read(file))]
    chosen = next((one for one in reports if not one.passed), reports[0] if reports else None)
    if chosen is None or (chosen.passed and len(chosen.rungs) < len(LADDER)):
        raise RunError(f"the ranks ended without a report; {_SMALLER}; the last they said:\n{_tail(log)}")
    if chosen.passed and code:
        raise RunError(
            f"every rung passed and then a rank failed (exit code {code}); the last they said:\n{_tail(log)}"
        )
    left = LADDER[len(chosen.rungs) :]
    broken = chosen.rungs[-1].name
    return Report(
        chosen.about, [*chosen.rungs, *(Rung(n, Outcome("skipped", f"not reached: {broken} broke")) for n, _ in left)]
    )


def _read(file: Path) -> Report | None:
    try:
        return Report.from_dict(json.loads(file.read_text()))
    except json.JSONDecodeError:  # it died while it wrote
        return None


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-_SHOWN:]
