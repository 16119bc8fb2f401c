"""Starts a server and ends all of it: run as a script, `launcher.py PARENT SCRATCH COMMAND...`.

It stands between the trainer and the server because nobody else can do two things: notice that the trainer is gone
however that died, and find every process that the server started, those with sessions of their own too. Standard
library only. Its exit code is the server's.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_S = 0.1
GRACE_S = 8.0
_LEAVE_S = 2.0  # for those that tidy up once they notice that the server is gone


def main(parent: int, scratch: str, command: list[str]) -> int:
    """Run `command` until it ends, SIGTERM comes or the process `parent` is gone; then end what it left behind."""
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: stopping.append(number))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans of the server become children of this process
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_launcher)
    while server.poll() is None and not stopping and os.getppid() == parent:
        time.sleep(_POLL_S)
    if server.poll() is None:
        server.terminate()
        _wait(server, GRACE_S)
    _end_descendants(server)
    shutil.rmtree(scratch, ignore_errors=True)
    code = server.returncode
    return 128 - code if code is not None and code < 0 else code or 0


def _wait(server: subprocess.Popen[bytes], seconds: float) -> None:
    end = time.monotonic() + seconds
    while server.poll() is None and time.monotonic() < end:
        time.sleep(_POLL_S / 2)


def _end_descendants(server: subprocess.Popen[bytes]) -> None:
    """Wait for every process below this one to end, then SIGKILL them until there is none: they may start others."""
    began = time.monotonic()
    while (past := time.monotonic() - began) < GRACE_S:
        _reap(server)
        found = _descendants(os.getpid())
        if not found:
            return
        for process in found if past > _LEAVE_S else ():
            _signal(process, signal.SIGKILL)
        time.sleep(_POLL_S / 5)


def _reap(server: subprocess.Popen[bytes]) -> None:
    server.poll()  # first: the exit code of the server belongs to `server`
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return
        except ChildProcessError:
            return


def _descendants(root: int) -> list[int]:
    """Process ids below `root`, from /proc (elsewhere than on Linux: the server alone is known)."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        children.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    found, open_ = [], [root]
    while open_:
        below = children.get(open_.pop(), [])
        found += below
        open_ += below
    return found


def _signal(process: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, number)


def _die_with_launcher() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
