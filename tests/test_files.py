"""What is written aside is on the disk, whole and readable by others, before it gets its name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stretto.files import sync_tree, write_aside
from stretto.models import smollm2


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The inodes that were synced, in order; they still are."""
    inodes: list[int] = []
    fsync = os.fsync

    def record(handle: int) -> None:
        inodes.append(os.fstat(handle).st_ino)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", record)
    return inodes


def test_a_tree_is_synced_to_its_last_file(tmp_path: Path, synced: list[int]) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("top", "a/middle", "a/b/low", "a/b/.hidden"):
        (tmp_path / name).write_text(name)
    sync_tree(tmp_path)
    assert sorted(synced) == sorted(path.stat().st_ino for path in (tmp_path, *tmp_path.rglob("*")))


def test_a_file_is_replaced_by_one_that_is_on_the_disk(tmp_path: Path, synced: list[int]) -> None:
    path = tmp_path / "latest.json"
    for text in ("old", "new"):
        write_aside(path, text)
        assert path.read_text() == text
        assert synced[-2:] == [path.stat().st_ino, tmp_path.stat().st_ino]
    assert list(tmp_path.iterdir()) == [path]


def test_a_converted_model_is_synced_and_readable_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synced: list[int]
) -> None:
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "_gguf_file", lambda: Path("unused"))
    monkeypatch.setattr(smollm2, "_convert", lambda source, target: (target / "model.safetensors").write_text("x"))
    directory = smollm2.smollm2_directory()
    assert directory.stat().st_mode & 0o777 == 0o755
    written = (directory / "model.safetensors", directory, directory.parent)
    assert synced == [path.stat().st_ino for path in written]
    assert list((tmp_path / "cache").iterdir()) == [directory]


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Path, target: Path) -> None:
        (target / "model.safetensors").write_text("half")
        raise OSError("no space left on device")

    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "_gguf_file", lambda: Path("unused"))
    monkeypatch.setattr(smollm2, "_convert", fail)
    with pytest.raises(OSError, match="no space left"):
        smollm2.smollm2_directory()
    assert list((tmp_path / "cache").iterdir()) == []
