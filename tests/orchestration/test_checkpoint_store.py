"""A kill at any moment of a checkpoint write loses no complete checkpoint (DESIGN, rule 8)."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stretto.errors import RunError
from stretto.orchestration.checkpoint import CheckpointStore, write_directory
from stretto.world import World

ALONE = World(0, 1, torch.device("cpu"))


def payload(step: int) -> dict[str, str]:
    return {f"part{number}": f"{step}:{number}" * 50 for number in range(3)}


def save(run_dir: Path, step: int, keep: int = 1) -> None:
    def write(directory: Path) -> None:
        (directory / "hf").mkdir()
        for name, text in payload(step).items():
            (directory / "hf" / name).write_text(text)

    CheckpointStore(run_dir, keep, ALONE).save(step, {"step": step}, write)


def check_whole(run_dir: Path, step: int) -> None:
    store = CheckpointStore(run_dir, 1, ALONE)
    assert store.read(step) == {"step": step}
    for name, text in payload(step).items():
        assert (store.path(step) / "hf" / name).read_text() == text


def killed_at(moment: int, action: Callable[[], None], below: Path) -> bool:
    """Run `action` in a forked process that is killed before its n-th file operation below a directory.

    False when the action ended before that moment came.
    """
    pid = os.fork()
    if pid == 0:
        left = moment

        def count(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal left
            if event.partition(".")[0] in ("open", "os", "shutil") and str(arguments[0]).startswith(str(below)):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status != 0


def test_a_kill_at_any_moment_of_a_save_leaves_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    newest = []
    for moment in range(1, 200):
        run_dir = tmp_path / str(moment)
        save(run_dir, 3)
        if not killed_at(moment, lambda run_dir=run_dir: save(run_dir, 6), run_dir):
            break
        store = CheckpointStore(run_dir, 1, ALONE)
        latest = store.latest()
        assert latest is not None
        newest.append(latest)
        check_whole(run_dir, latest)
        marked = '"step": 6' in (store.directory / "latest.json").read_text()
        assert marked or store.path(3).is_dir(), "the old one went before the new one was marked"
        if latest == 3:
            save(run_dir, 6)
        save(run_dir, 9)
        check_whole(run_dir, 9)
        assert sorted(entry.name for entry in store.directory.iterdir()) == ["latest.json", "step_00000009"]
    else:
        raise AssertionError("the save never came to its end")
    assert newest == sorted(newest)
    assert {3, 6} == set(newest), "kills came before and after the checkpoint was complete"


def test_a_failed_write_says_why_and_leaves_the_others_alone(tmp_path: Path) -> None:
    save(tmp_path, 3)

    def write(directory: Path) -> None:
        (directory / "state").write_text("half")
        raise OSError(28, "No space left on device")

    store = CheckpointStore(tmp_path, 1, ALONE)
    with pytest.raises(RunError, match=r"step 6 .*No space left on device.*earlier ones \(3\) are untouched"):
        store.save(6, {}, write)
    assert sorted(entry.name for entry in store.directory.iterdir()) == ["latest.json", "step_00000003"]
    check_whole(tmp_path, 3)


def test_as_many_checkpoints_are_kept_as_was_asked(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        save(tmp_path, step, keep=2)
    assert CheckpointStore(tmp_path, 2, ALONE).steps() == [3, 10]


def test_a_save_clears_what_killed_ones_left(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 1, ALONE)
    for name in (".writing-step_00000004", ".removing-step_00000002"):
        (store.directory / name / "state").mkdir(parents=True)
    save(tmp_path, 6)
    assert sorted(entry.name for entry in store.directory.iterdir()) == ["latest.json", "step_00000006"]


def fill(text: str) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        (directory / "model").write_text(text)

    return write


def test_a_directory_is_replaced_whole(tmp_path: Path) -> None:
    best = tmp_path / "best"
    write_directory(best, fill("old"), ALONE)
    for moment in range(1, 100):
        killed = killed_at(moment, lambda: write_directory(best, fill("new"), ALONE), tmp_path)
        assert not best.exists() or (best / "model").read_text() in ("old", "new")
        write_directory(best, fill("old"), ALONE)
        assert [entry.name for entry in tmp_path.iterdir()] == ["best"]
        if not killed:
            return
    raise AssertionError("the write never came to its end")


def test_a_directory_that_cannot_be_written_leaves_the_old_one_and_nothing_aside(tmp_path: Path) -> None:
    best = tmp_path / "best"
    write_directory(best, fill("old"), ALONE)

    def fail(directory: Path) -> None:
        (directory / "model").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_directory(best, fail, ALONE)
    assert [entry.name for entry in tmp_path.iterdir()] == ["best"]
    assert (best / "model").read_text() == "old"
