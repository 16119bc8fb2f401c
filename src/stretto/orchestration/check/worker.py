"""One rank of a check: `python -m stretto.orchestration.check.worker JOB.json` under torchrun."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

from stretto.orchestration.check.ladder import LADDER, broke, climb
from stretto.orchestration.check.probe import Probe
from stretto.orchestration.check.report import Report, Rung
from stretto.orchestration.check.settings import CheckSettings
from stretto.world import World, join_world, leave_world

PHASE_S = 300.0


class Job(NamedTuple):
    """What a rank is told."""

    settings: CheckSettings
    probe: Probe
    work: Path

    def write(self, file: Path) -> None:
        """For the ranks."""
        probe = {**vars(self.probe), "directory": str(self.probe.directory)}
        file.write_text(json.dumps({"settings": self.settings.to_json(), "probe": probe, "work": str(self.work)}))

    @classmethod
    def read(cls, file: Path) -> Job:
        """Inverse of :meth:`write`."""
        raw = json.loads(file.read_text())
        probe = Probe(Path(raw["probe"]["directory"]), raw["probe"]["says"], raw["probe"]["parameters"])
        return cls(CheckSettings.from_json(raw["settings"]), probe, Path(raw["work"]))


def report_file(work: Path, rank: int) -> Path:
    """Where a rank puts its report."""
    return work / f"rank{rank}.json"


def run(job: Job) -> int:
    """Climb as one rank of torchrun's group. The report so far is always on disk, also when this rank raises."""
    world = join_world(PHASE_S)
    try:
        return _climb(job, world)
    finally:
        leave_world()


def _climb(job: Job, world: World) -> int:
    file = report_file(job.work, world.rank)
    last = Report({}, [])

    def told(report: Report) -> None:
        nonlocal last
        last = report
        file.write_text(report.to_json())

    try:
        return 0 if climb(job.settings, job.probe, job.work, world, told).passed else 1
    except Exception as error:
        # The others may wait in a collective for this rank: torchrun ends them, and the parent reads this. What goes
        # wrong behind the last rung has no rung to be told of: there the exit code says it.
        if len(last.rungs) < len(LADDER):
            file.write_text(Report(last.about, [*last.rungs, Rung(LADDER[len(last.rungs)][0], broke(error))]).to_json())
        raise


if __name__ == "__main__":
    sys.exit(run(Job.read(Path(sys.argv[1]))))
