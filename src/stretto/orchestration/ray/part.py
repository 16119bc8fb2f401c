"""What every part of a run is besides: a process that can be found and ended."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import NamedTuple


class Whereabouts(NamedTuple):
    """A process of the cluster."""

    pid: int
    node: str


class Part:
    """Base of the actors."""

    def where(self) -> Whereabouts:
        """Where this runs."""
        import ray

        return Whereabouts(os.getpid(), ray.get_runtime_context().get_node_id())


def end_process(pid: int) -> None:
    """SIGKILL, also to one that is stopped: Ray's own kill asks the process, which does not answer then."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
