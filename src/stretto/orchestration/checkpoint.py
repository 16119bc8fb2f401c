"""Checkpoints: written aside, synced, renamed, marked, and only then is an old one removed (DESIGN, rule 8)."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stretto.errors import RunError
from stretto.files import sync_directory, sync_tree, write_aside
from stretto.world import World

_NAME = re.compile(r"step_(\d+)$")
_MARK = "latest.json"


class CheckpointStore:
    """`checkpoints/step_N/` of a run, each with `state/` (to resume), `hf/` (a Hugging Face model) and `run.json`.

    All ranks call `save` together; the first one creates, renames, marks and removes directories.
    """

    def __init__(self, run_dir: Path, keep: int, world: World):
        self.directory = run_dir / "checkpoints"
        self._keep, self._world = keep, world

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        found = self.directory.iterdir() if self.directory.is_dir() else ()
        return sorted(int(match[1]) for entry in found if (match := _NAME.match(entry.name)))

    def path(self, step: int) -> Path:
        """Directory of the checkpoint of `step`."""
        return self.directory / f"step_{step:08d}"

    def latest(self) -> int | None:
        """The newest complete checkpoint, or None. The rename makes it complete; the mark tells other programs."""
        return max(self.steps(), default=None)

    def read(self, step: int) -> dict[str, Any]:
        """The run's own state at `step`. Raises ValueError when it cannot be read."""
        try:
            return json.loads((self.path(step) / "run.json").read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise ValueError(
                f"cannot read the checkpoint {self.path(step)}: {error}; "
                "remove that directory to resume from an earlier one"
            ) from error

    def save(self, step: int, state: Mapping[str, Any], write: Callable[[Path], None]) -> None:
        """Save `state` and what `write` puts into a directory. RunError leaves older checkpoints as they are."""
        aside = self.directory / f".writing-step_{step:08d}"
        if self._world.first:
            for leftover in self.directory.glob(".writing-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            aside.mkdir(parents=True)
        self._world.barrier()
        try:
            write(aside)
            if self._world.first:
                (aside / "run.json").write_text(json.dumps(dict(state)))
                sync_tree(aside)
                os.rename(aside, self.path(step))
                sync_directory(self.directory)
                self._mark(step)
        except Exception as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise RunError(
                f"the checkpoint of step {step} could not be written to {self.directory}: "
                f"{type(error).__name__}: {error}; "
                f"earlier ones ({', '.join(map(str, self.steps())) or 'none'}) are untouched: mend that and resume"
            ) from error
        if self._world.first:
            self._remove_old()
        self._world.barrier()

    def _mark(self, step: int) -> None:
        write_aside(self.directory / _MARK, json.dumps({"step": step}))

    def _remove_old(self) -> None:
        for step in self.steps()[: -self._keep]:
            # Renamed first, so that a kill in the middle leaves no half checkpoint under a good name.
            doomed = self.directory / f".removing-step_{step:08d}"
            os.rename(self.path(step), doomed)
        for leftover in self.directory.glob(".removing-*"):
            shutil.rmtree(leftover, ignore_errors=True)


def write_directory(final: Path, fill: Callable[[Path], None], world: World) -> None:
    """Fill a directory aside, sync it and put it in the place of `final`. All ranks call together."""
    aside = final.with_name(f".writing-{final.name}")
    if world.first:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    world.barrier()
    try:
        fill(aside)
    except Exception:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    if world.first:
        sync_tree(aside)
        old = final.with_name(f".removing-{final.name}")
        shutil.rmtree(old, ignore_errors=True)
        if final.exists():
            os.rename(final, old)
        os.rename(aside, final)
        sync_directory(final.parent)
        shutil.rmtree(old, ignore_errors=True)
    world.barrier()
