"""Reading a parcel where the engine is: each tensor whole, made from the parcel and those that it is a delta to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stretto.sync import windows
from stretto.sync.parcels.delta import decode
from stretto.sync.parcels.digests import digests
from stretto.sync.parcels.manifest import MANIFEST, Label, Manifest, ParcelError, digest_of


class Parcel:
    """The parcel in `directory` whose manifest has this digest; the parcels before it lie beside it.

    Raises ParcelError when one of them is missing, cannot be read, or is another.
    """

    def __init__(self, directory: Path, digest: str):
        self._stack = ExitStack()
        self._opened: dict[Path, Any] = {}
        self._links = _chain(directory, digest)
        self._entries = self._links[0][1].entries

    def __enter__(self) -> Parcel:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def verify(self) -> None:
        """Raise ParcelError naming the tensors whose bytes are not those that were published."""
        wrong: list[str] = []
        for window in self._windows():
            found = digests(window)
            wrong += [name for name in window if found[name] != self._entries[name].digest]
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise ParcelError(f"{self._links[0][0]}: wrong digest of {', '.join(wrong[:3])}{more}")

    def tensors(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, in memory of its own: a loader may keep some until their module is whole."""
        copies = self._links[0][1].copies
        for name in self._entries:
            tensor = self._read(name).to(device, copy=True)
            yield name, tensor
            if name in copies:
                yield copies[name], tensor

    def _windows(self) -> Iterator[Mapping[str, Tensor]]:
        window: dict[str, Tensor] = {}
        for name in self._entries:
            window[name] = self._read(name)
            if sum(one.nbytes for one in window.values()) > windows.WINDOW_BYTES:
                yield window
                window = {}
        yield window

    def _read(self, name: str) -> Tensor:
        """The tensor: what the newest parcel that has it whole says, with the changes that came after."""
        changes: list[Mapping[str, Tensor]] = []
        for directory, manifest in self._links:
            entry = manifest.entries[name]
            changes.append({part: self._part(directory / entry.file, part_name(name, part)) for part in entry.parts})
            if "whole" in entry.parts:
                break
        whole = changes.pop()["whole"]
        try:
            return decode(whole, *reversed(changes))
        except ValueError as error:
            raise ParcelError(f"{self._links[0][0]}: wrong bytes of {name}: {error}") from error

    def _part(self, file: Path, name: str) -> Tensor:
        from safetensors import SafetensorError, safe_open

        try:
            if file not in self._opened:
                self._opened[file] = self._stack.enter_context(safe_open(file, framework="pt"))
            return self._opened[file].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ParcelError(f"cannot read {name} in {file}: {type(error).__name__}: {error}") from error


def part_name(name: str, part: str) -> str:
    """What a part of a tensor is called in its file; whole ones have their own name, as in any checkpoint."""
    return name if part == "whole" else f"{part}:{name}"


def _chain(directory: Path, digest: str) -> list[tuple[Path, Manifest]]:
    """The parcel with its manifest, and behind it those that it is based on, the last of which is whole."""
    links: list[tuple[Path, Manifest]] = []
    label: Label | None = Label(directory.name, digest)
    while label is not None:
        place = directory.parent / label.name
        try:
            data = (place / MANIFEST).read_bytes()
        except OSError as error:
            raise ParcelError(f"cannot read the parcel {place}: {error.strerror}") from error
        if digest_of(data) != label.digest:
            raise ParcelError(f"{place} is not the parcel that was published: its manifest has another digest")
        manifest = Manifest.unpack(data, str(place / MANIFEST))
        links.append((place, manifest))
        label = manifest.base
    return links
