"""Packing parcels at the trainer's first rank, which remembers the last one when the next may be a delta to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from stretto.sync.binding import dtype_name
from stretto.sync.gathering import Window
from stretto.sync.parcels.delta import encode
from stretto.sync.parcels.digests import digests
from stretto.sync.parcels.manifest import Entry, Label, Manifest, digest_of
from stretto.sync.parcels.reading import part_name
from stretto.types import Version


class Shelf(Protocol):
    """Takes parcels to where engines read them, which are `count` places. Raises RuntimeError that names the place."""

    count: int

    def begin(self, name: str, bases: Sequence[Label]) -> bool:
        """Start a parcel; False, and nothing is begun, where one of those that it will be based on is not there."""
        ...

    def put(self, name: str, file: str, body: bytes) -> None:
        """Bring one file of it."""
        ...

    def finish(self, name: str, manifest: bytes) -> None:
        """The parcel is whole."""
        ...

    def keep(self, names: Sequence[str]) -> None:
        """Remove all other parcels."""
        ...

    def close(self) -> None:
        """Remove all parcels and let go."""
        ...


@dataclass(frozen=True)
class Packed:
    """A parcel that lies on the shelf: the bytes that it took there, and those of the tensors in it."""

    label: Label
    bytes: int
    full_bytes: int


class Packer:
    """With `delta`, a parcel is a delta to the one before it, until the deltas together are as long as a whole one.

    So an engine never reads more than three times the weights, and one that was started anew can read every parcel. It
    takes memory for a second copy of the weights, on CPU. `copies` is as in a manifest.
    """

    def __init__(self, shelf: Shelf, copies: Mapping[str, str], *, delta: bool):
        self._shelf, self._copies, self._delta = shelf, copies, delta
        self._chain: list[Packed] = []
        self._last: Window = {}

    def pack(self, version: Version, windows: Iterable[Window]) -> Packed:
        """Put all tensors on the shelf. Raises RuntimeError; the next parcel is whole then."""
        name = f"{version.incarnation}-{version.number}"
        chain, last = self._begin(name)
        entries: dict[str, Entry] = {}
        now: Window = {}
        sent = full = 0
        for number, window in enumerate(windows):
            file = f"window-{number:05}.safetensors"
            parts = {key: encode(last[key], one) if last else {"whole": one} for key, one in window.items()}
            if body := _body(parts):
                self._shelf.put(name, file, body)
            entries |= _entries(window, parts, file)
            sent, full = sent + len(body), full + sum(one.nbytes for one in window.values())
            if self._delta:
                now |= window
        if all("whole" in one.parts for one in entries.values()):
            chain = []
        manifest = Manifest(chain[-1].label if chain else None, self._copies, entries).pack()
        self._shelf.finish(name, manifest)
        count = self._shelf.count
        packed = Packed(Label(name, digest_of(manifest)), (sent + len(manifest)) * count, full * count)
        self._chain, self._last = [*chain, packed], now
        return packed

    def keep(self) -> None:
        """The last parcel was read: remove those that no other needs any more."""
        self._shelf.keep([one.label.name for one in self._chain])

    def forget(self) -> None:
        """The next parcel is whole."""
        self._chain, self._last = [], {}

    def _begin(self, name: str) -> tuple[list[Packed], Window]:
        """Start a parcel; returns the parcels and the weights that it is a delta to, none when it is whole."""
        pays = self._delta and sum(one.bytes for one in self._chain[1:]) < sum(one.bytes for one in self._chain[:1])
        chain, last = (self._chain, self._last) if pays else ([], {})
        self.forget()
        if not self._shelf.begin(name, [one.label for one in chain]):
            chain, last = [], {}
            self._shelf.begin(name, [])
        return chain, last


def _body(parts: Mapping[str, Mapping[str, Tensor]]) -> bytes:
    """A safetensors file of the parts; nothing when there are none."""
    from safetensors.torch import save

    named = {part_name(key, part): one for key, made in parts.items() for part, one in made.items()}
    return save(named, {"format": "pt"}) if named else b""


def _entries(window: Window, parts: Mapping[str, Mapping[str, Tensor]], file: str) -> dict[str, Entry]:
    made = digests(window)
    return {
        name: Entry(tuple(one.shape), dtype_name(one.dtype), made[name], file, tuple(parts[name]))
        for name, one in window.items()
    }
