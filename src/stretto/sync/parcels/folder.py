"""Where parcels lie: written aside, synced, renamed."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path

from stretto.files import sync_directory, sync_tree
from stretto.sync.parcels.manifest import MANIFEST, Label, Manifest, digest_of

_ASIDE = ".writing-"
_LOCK = ".stretto-lock"
_NAME = re.compile(r"\d+-\d+")
_FILE = re.compile(r"window-\d+\.safetensors")
_ANSWER = re.compile(r"(verify|load)-\d+\.json")


class Folder:
    """A directory that one owner at a time puts parcels into; what a dead one left there is removed.

    Raises ValueError when it is in use, is no directory, or cannot be written.
    """

    def __init__(self, root: Path):
        self.root = root
        try:
            root.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(root / _LOCK, os.O_CREAT | os.O_RDWR, 0o644)
        except OSError as error:
            raise ValueError(f"cannot write parcels to {root}: {error.strerror}; name another directory") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ValueError(f"{root} is in use by another process; wait for it or name another directory") from error
        self.clear()

    def begin(self, name: str) -> None:
        """Start the parcel `name` anew."""
        for old in (self._aside(name), self._final(name)):
            shutil.rmtree(old, ignore_errors=True)
        self._aside(name).mkdir()

    def file(self, name: str, file: str) -> Path:
        """Where a file of a parcel that was begun is to be written. ValueError for a name that no file has."""
        if not _FILE.fullmatch(file):
            raise ValueError(f"{file!r} is not the name of a parcel's file")
        return self._aside(name) / file

    def finish(self, name: str, manifest: bytes) -> None:
        """The parcel is whole with its manifest: it gets its name. ValueError when a file of it is missing."""
        aside = self._aside(name)
        entries = Manifest.unpack(manifest, f"the manifest of {name}").entries.values()
        if missing := sorted({one.file for one in entries if one.parts and not (aside / one.file).is_file()}):
            raise ValueError(f"{aside} lacks {', '.join(missing)}")
        (aside / MANIFEST).write_bytes(manifest)
        sync_tree(aside)
        os.rename(aside, self._final(name))
        sync_directory(self.root)

    def has(self, parcel: Label) -> bool:
        """Whether that very parcel lies here."""
        try:
            return digest_of((self._final(parcel.name) / MANIFEST).read_bytes()) == parcel.digest
        except OSError:
            return False

    def keep(self, names: Collection[str]) -> None:
        """Remove all other parcels."""
        for entry in self.root.iterdir():
            aside = entry.name.startswith(_ASIDE)
            ours = _NAME.fullmatch(entry.name) and (entry / MANIFEST).is_file()
            if aside or (ours and entry.name not in names):
                shutil.rmtree(entry, ignore_errors=True)

    def clear(self) -> None:
        """Remove all parcels."""
        self.keep(())

    def close(self) -> None:
        """Remove all parcels and let another have the directory."""
        self.clear()
        (self.root / _LOCK).unlink(missing_ok=True)
        os.close(self._lock)

    def _aside(self, name: str) -> Path:
        return self.root / f"{_ASIDE}{_checked(name)}"

    def _final(self, name: str) -> Path:
        return self.root / _checked(name)


def answer_in(root: Path, name: str, answer: str) -> str | None:
    """What a rank of an engine left in a parcel; None when it left nothing (yet)."""
    if not _ANSWER.fullmatch(answer):
        raise ValueError(f"{answer!r} is not the name of an answer")
    try:
        return (root / _checked(name) / answer).read_text()
    except FileNotFoundError:
        return None


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a parcel")
    return name
