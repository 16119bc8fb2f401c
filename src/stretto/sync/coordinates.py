"""The coordinates of a checkpoint, made once a process."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from stretto.models.maps import map_of
from stretto.sync.layout import Atoms


@lru_cache(maxsize=8)
def atoms_of(directory: Path, map_file: str | None = None) -> Atoms:
    """The atoms of the checkpoint in `directory`, by its weight map. Raises ValueError as `map_of` does."""
    return Atoms.of(map_of(directory, map_file))
