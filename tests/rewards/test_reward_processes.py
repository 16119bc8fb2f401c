"""Workers are light, end with their parent however it ends, and never hang a close."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from reward_helpers import DEADLINE_S, FILE, group

from stretto.config.sections import RewardConfig
from stretto.rewards import RewardPool

PARENT = """
import sys, threading, time
from stretto.config.sections import RewardConfig
from stretto.rewards import RewardPool, Sample

if __name__ == "__main__":
    pools = []
    def start():
        pools.append(RewardPool(RewardConfig(functions=[sys.argv[1]], workers=2, timeout_s=600)))
        pools[0].check()
    # A pool made by a thread that has ended must go on.
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    pending = [pools[0].submit([Sample("q", "1", (1,), {})]) for _ in range(2)]
    time.sleep(1)
    try:
        print("ready", flush=True)
        time.sleep(600)
    except KeyboardInterrupt:
        pools[0].close()
        print("closed", flush=True)
"""


def start_parent(tmp_path: Path, reward: str) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A process that has a pool of two busy workers, and all its descendants."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen(
        [sys.executable, str(script), f"{FILE}:{reward}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    children = psutil.Process(parent.pid).children(recursive=True)
    assert len([child for child in children if "spawn_main" in " ".join(child.cmdline())]) == 2
    return parent, children


def wait_gone(processes: list[psutil.Process]) -> list[psutil.Process]:
    deadline = time.monotonic() + 20
    alive = processes
    while alive and time.monotonic() < deadline:
        alive = [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
        time.sleep(0.05)
    for process in alive:
        process.kill()
    return alive


@pytest.mark.parametrize("reward", ["sleeps", "holds_the_gil"])
def test_no_worker_outlives_a_parent_that_was_killed(tmp_path: Path, reward: str) -> None:
    parent, children = start_parent(tmp_path, reward)
    parent.kill()
    parent.wait(DEADLINE_S)
    assert wait_gone(children) == []
    parent.communicate()


def test_ctrl_c_ends_the_parent_without_tracebacks_of_workers(tmp_path: Path) -> None:
    parent, children = start_parent(tmp_path, "other_simple")
    os.killpg(parent.pid, signal.SIGINT)
    out, err = parent.communicate(timeout=DEADLINE_S)
    assert (out, err, parent.returncode) == ("closed\n", "", 0)
    assert wait_gone(children) == []


def test_closing_gives_up_what_is_pending_and_refuses_more(open_pool: Callable[..., RewardPool]) -> None:
    pool = open_pool("sleeps")
    pending = [pool.submit(group("1")) for _ in range(3)]
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pending[2].result(DEADLINE_S)
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(group("1"))


def test_a_worker_killed_while_idle_is_replaced(open_pool: Callable[..., RewardPool]) -> None:
    pool = open_pool("simple", workers=2)
    pool.check()
    workers = [c for c in psutil.Process().children() if "spawn_main" in " ".join(c.cmdline())]
    for process in workers:
        process.kill()
    assert wait_gone(workers) == []
    assert [score.reward for score in pool.submit(group("7", "8")).result(DEADLINE_S)] == [1.0, 0.0]


def test_importing_the_package_is_light() -> None:
    code = "import sys, stretto.rewards; sys.exit(len({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_script_without_a_main_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(
        "from stretto.config.sections import RewardConfig\nfrom stretto.rewards import RewardPool\n"
        f"with RewardPool(RewardConfig(functions=['{FILE}:simple'])) as pool:\n    pool.check()\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 1
    assert "put that call under `if __name__ == '__main__':`" in done.stderr
    assert "needs `if __name__ == '__main__':`" in done.stderr


def test_a_pool_can_be_opened_twice_in_one_process() -> None:
    config = RewardConfig(functions=[f"{FILE}:simple"])
    with RewardPool(config) as first, RewardPool(config) as second:
        assert first.submit(group("7")).result(DEADLINE_S)[0].reward == 1.0
        assert second.submit(group("7")).result(DEADLINE_S)[0].reward == 1.0
