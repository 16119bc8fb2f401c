"""What a parcel says of itself: its tensors with their digests, and the parcel that it is a delta to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

MANIFEST = "parcel.json"


class ParcelError(ValueError):
    """A parcel is not what was published; the message says which, and what is wrong."""


@dataclass(frozen=True)
class Label:
    """Names one parcel, and by the digest of its manifest all that is in it."""

    name: str
    digest: str


@dataclass(frozen=True)
class Entry:
    """One tensor: the digest of all its bytes, and in which `file` there are which `parts` of it (see `delta`)."""

    shape: tuple[int, ...]
    dtype: str
    digest: str
    file: str
    parts: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """`base` is the parcel whose tensors the parts change; `copies` are names under which a loader takes one again."""

    base: Label | None
    copies: Mapping[str, str]
    entries: Mapping[str, Entry]

    def pack(self) -> bytes:
        """As it lies in a parcel."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpack(cls, data: bytes, where: str) -> Manifest:
        """What `pack` made. Raises ParcelError naming `where` it comes from."""
        try:
            raw = json.loads(data)
            entries = {
                name: Entry(tuple(one["shape"]), one["dtype"], one["digest"], one["file"], tuple(one["parts"]))
                for name, one in raw["entries"].items()
            }
            return cls(Label(**raw["base"]) if raw["base"] else None, dict(raw["copies"]), entries)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ParcelError(f"{where} is not a parcel's manifest ({type(error).__name__}: {error})") from error


def digest_of(data: bytes | memoryview) -> str:
    """SHA-256, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()
