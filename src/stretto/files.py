"""Files that a crash cannot tear: written aside, synced to the disk, then renamed."""

from __future__ import annotations

import os
from pathlib import Path


def write_aside(path: Path, text: str) -> None:
    """Replace a file atomically and durably."""
    aside = path.with_name(f".{path.name}.writing")
    with open(aside, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.rename(aside, path)
    sync_directory(path.parent)


def sync_tree(directory: Path) -> None:
    """fsync every file and directory below (and with) `directory`."""
    for parent, _, files in os.walk(directory):
        for name in files:
            _fsync(Path(parent, name))
        sync_directory(Path(parent))


def sync_directory(directory: Path) -> None:
    """fsync a directory's entries."""
    _fsync(directory)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
