"""A server's process ends with all that it started, whoever dies first."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stretto.engines.server.process import ReservedPort, ServerProcess

# Starts a child in a session of its own, as workers of an engine may be, then says both process ids and waits.
SERVER = """
import os, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(sleep, start_new_session=True)
print("pids", os.getpid(), child.pid, flush=True)
time.sleep(600)
"""

PARENT = """
import sys, time
from pathlib import Path
from stretto.engines.server.process import ServerProcess
process = ServerProcess([sys.executable, "-c", sys.argv[1]], {}, Path(sys.argv[2]), same_python=True)
print(process.id, flush=True)
time.sleep(600)
"""


def started(log: Path) -> list[int]:
    """The process ids that the server and its child wrote."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        lines = log.read_text().splitlines(keepends=True) if log.exists() else []
        lines = [line for line in lines if line.startswith("pids") and line.endswith("\n")]  # not half of it
        if lines:
            return [int(one) for one in lines[0].split()[1:]]
        time.sleep(0.02)
    raise AssertionError("the server did not start")


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def all_gone(processes: list[int]) -> bool:
    end = time.monotonic() + 30
    while any(map(alive, processes)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(alive, processes))


@pytest.fixture
def running(tmp_path: Path) -> ServerProcess:
    return ServerProcess([sys.executable, "-c", SERVER], {}, tmp_path / "log", same_python=True)


def test_stop_ends_the_server_and_what_it_started(running: ServerProcess) -> None:
    processes = [*started(running.log), running.id]
    running.stop()
    assert not any(map(alive, processes))
    running.stop()  # once more does nothing


def test_a_killed_server_takes_what_it_started_along_and_says_so(running: ServerProcess) -> None:
    server, child = started(running.log)
    os.kill(server, signal.SIGKILL)
    assert running.ended(30.0) == 128 + signal.SIGKILL
    assert all_gone([server, child])
    assert "pids" in running.tail()


def test_nothing_outlives_a_killed_trainer(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, SERVER, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        launcher = int(parent.stdout.readline())
        processes = [launcher, *started(tmp_path / "log")]
        assert all(map(alive, processes))
        parent.kill()
    assert all_gone(processes)


def test_a_killed_launcher_takes_the_server_along(running: ServerProcess) -> None:
    server, child = started(running.log)
    os.kill(running.id, signal.SIGKILL)
    assert all_gone([server])
    os.kill(child, signal.SIGKILL)  # an orphan's orphan: engines' workers look after their parent themselves


def test_the_server_finds_this_package_and_takes_itself_for_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    code = (
        "import os, stretto; print(stretto.__file__, os.environ['MINE'], sorted(set(os.environ) & "
        "{'RANK', 'LOCAL_RANK'}), '/nowhere' in os.environ['PYTHONPATH'], os.environ['PYTHONPATH'])"
    )
    process = ServerProcess([sys.executable, "-c", code], {"MINE": "1"}, tmp_path / "log", same_python=False)
    assert process.ended(60.0) == 0
    file, mine, ranks, kept, path = (tmp_path / "log").read_text().split()
    assert file == f"{path}/stretto/__init__.py"
    assert (mine, ranks, kept) == ("1", "[]", "False")
    assert not Path(path).exists(), "the launcher removes it"
    process.stop()


def test_a_reserved_port_is_nobodys_but_the_servers() -> None:
    port = ReservedPort()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port.number))
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port.number))
        server.listen()
        port.release()
        socket.create_connection(("127.0.0.1", port.number), timeout=5).close()


def test_the_error_that_ended_a_server_is_told_though_much_was_written_after_it(tmp_path: Path) -> None:
    program = "print('(Worker) ValueError: too little memory'); [print('at line', n) for n in range(99)]"
    process = ServerProcess([sys.executable, "-c", program], {}, tmp_path / "log", same_python=True)
    assert process.ended(30.0) == 0
    said = process.tail().splitlines()
    assert said[1].strip() == "(Worker) ValueError: too little memory"
    assert said[-1].strip() == "at line 98"
    process.stop()
