"""A rank of a check, as torchrun starts it, of which the second raises in the middle of the ladder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from stretto.orchestration.check import ladder, worker

if __name__ == "__main__":
    right = ladder.LADDER[3][1]

    def wrong(bench: Any) -> Any:
        if bench.world.rank == 1:
            raise RuntimeError("this rank has had enough")
        return right(bench)

    ladder.LADDER = (*ladder.LADDER[:3], ("round trip", wrong), *ladder.LADDER[4:])
    sys.exit(worker.run(worker.Job.read(Path(sys.argv[1]))))
