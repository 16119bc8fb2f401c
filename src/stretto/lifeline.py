"""No child outlives its parent, however the parent died (DESIGN, rule 9)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5


def die_with(parent: int) -> None:
    """Tie this process's life to that of its parent, whose process id the caller has read.

    On Linux the kernel kills it, also when it is stuck in C code that holds the interpreter's lock. The signal follows
    the *thread* that started this process, which therefore has to live as long as the parent. Other systems get a
    thread that looks.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    threading.Thread(target=_watch, args=(parent,), name="parent-watcher", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os._exit(1)
