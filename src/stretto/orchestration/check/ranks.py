"""`python -m stretto.orchestration.check.ranks`: torchrun, whose life hangs on that of the process that started it."""

from __future__ import annotations

import os

from stretto.lifeline import die_with

if __name__ == "__main__":
    die_with(os.getppid())
    from torch.distributed.run import main

    main()
