"""The server's process: its port, its environment, its log, and its end."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from stretto.engines.server import launcher

_PACKAGE = Path(__file__).parents[2]
_TAIL_LINES, _ERRORS = 25, 5
_ERROR = re.compile(r"\b[A-Z]\w*(Error|Exception): ")
# What torchrun says to its ranks; the server would take itself for one of them.
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_RANK_PREFIXES = ("LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")


class ReservedPort:
    """A free port of this host, bound but not listened on, so that nobody else is given it before the server takes it.

    The server may bind it all the same: on Linux, SO_REUSEADDR on both sides allows that while neither listens.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.number: int = self._socket.getsockname()[1]

    def release(self) -> None:
        """The server listens on it, or never will."""
        self._socket.close()


class ServerProcess:
    """A running server in a session of its own. Ends with this process, however that dies."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, *, same_python: bool):
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._scratch = scratch = tempfile.mkdtemp(prefix="stretto-server-")  # removed by the launcher
        (Path(scratch) / "stretto").symlink_to(_PACKAGE)
        launch = [sys.executable, "-I", "-S", launcher.__file__, str(os.getpid()), scratch]
        with log.open("ab") as output:
            self._start = output.tell()
            self._launcher = subprocess.Popen(
                [*launch, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(environment, scratch, same_python),
                start_new_session=True,
            )
        atexit.register(self.stop)

    @property
    def id(self) -> int:
        """Process id of the launcher, which is the id of its session."""
        return self._launcher.pid

    def ended(self, wait_s: float = 0.0) -> int | None:
        """Its exit code (128 + the signal that killed it); None while it runs after `wait_s`."""
        with suppress(subprocess.TimeoutExpired):
            return self._launcher.wait(wait_s)
        return None

    def tail(self) -> str:
        """The end of what it wrote, after the last errors before that: an engine's own come long before its end."""
        with self.log.open("rb") as file:
            file.seek(max(self._start, os.fstat(file.fileno()).st_size - 2**20))
            lines = file.read().decode(errors="replace").splitlines()
        errors = [line for line in lines[:-_TAIL_LINES] if _ERROR.search(line)][-_ERRORS:]
        shown = [*errors, *(["..."] if errors else []), *lines[-_TAIL_LINES:]]
        return f"the end of its log ({self.log}):\n  " + "\n  ".join(shown or ["(nothing)"])

    def stop(self) -> None:
        """End it and all that it started: SIGTERM, then SIGKILL."""
        atexit.unregister(self.stop)
        self._launcher.terminate()
        if self.ended(2 * launcher.GRACE_S + 2.0) is None:
            with suppress(ProcessLookupError):
                os.killpg(self._launcher.pid, signal.SIGKILL)
            self._launcher.wait()
        shutil.rmtree(self._scratch, ignore_errors=True)  # if the launcher could not


def _environment(own: Mapping[str, str], scratch: str, same_python: bool) -> dict[str, str]:
    """This process's environment without its rank and, for another interpreter, without its Python."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _RANK_VARIABLES and not name.startswith(_RANK_PREFIXES)
    }
    paths = [scratch, kept.get("PYTHONPATH", "")] if same_python else [scratch]
    if not same_python:
        kept.pop("PYTHONHOME", None)
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **own}
