"""Having the ranks of an engine read a parcel, and hearing from them how that went."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from stretto.sync.parcels.folder import answer_in
from stretto.sync.parcels.manifest import Label
from stretto.sync.receivers import Enterable

Step = Literal["verify", "load"]

_POLL_S = 0.05
_SEEN_S = 65.0
"""Seconds that a file of another host may stay unseen: what NFS keeps of a directory by default, and a margin."""


class Place(Protocol):
    """Where one engine finds parcels. Goes to other ranks."""

    @property
    def directory(self) -> str:
        """As it is called on the engine's host."""
        ...

    def answer(self, name: str, answer: str) -> str | None:
        """What a rank of the engine left in a parcel, None when nothing. Raises RuntimeError when that is unknown."""
        ...


@dataclass(frozen=True)
class LocalPlace:
    """A directory that is seen from here."""

    directory: str

    def answer(self, name: str, answer: str) -> str | None:
        """See :class:`Place`."""
        return answer_in(Path(self.directory), name, answer)


class Reader:
    """An engine that is led from here; its ranks are numbered from `first` on."""

    def __init__(self, engine: Enterable, first: int, count: int, timeout_s: float):
        self._engine, self._timeout_s = engine, timeout_s
        self._ranks = range(first, first + count)

    def read(self, step: Step, place: Place, parcel: Label) -> None:
        """Have every rank verify the parcel, or load it. Raises RuntimeError with what went wrong at which rank."""
        payload = {
            "parcel": str(Path(place.directory) / parcel.name),
            "digest": parcel.digest,
            "step": step,
            "first_rank": self._ranks.start,
        }
        self._engine.enter(json.dumps(payload), self._timeout_s)
        deadline = time.monotonic() + min(_SEEN_S, self._timeout_s)
        wrong = [line for rank in self._ranks if (line := self._error(rank, step, place, parcel, deadline))]
        if wrong:
            raise RuntimeError("; ".join(wrong))

    def _error(self, rank: int, step: Step, place: Place, parcel: Label, deadline: float) -> str | None:
        """What a rank says that went wrong."""
        while (said := place.answer(parcel.name, answer_name(step, rank))) is None:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"engine rank {rank} left no answer in {place.directory}/{parcel.name}; its log says why "
                    "(does it see that directory, and may it write there?)"
                )
            time.sleep(_POLL_S)
        error = json.loads(said)["error"]
        return f"engine rank {rank}, {step}: {error}" if error else None


def answer_name(step: str, rank: int) -> str:
    """The file in a parcel in which a rank says how a step went."""
    return f"{step}-{rank}.json"
