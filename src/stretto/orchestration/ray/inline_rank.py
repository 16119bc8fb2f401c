"""One process of the inline loop, started by Ray in the place of torchrun."""

from __future__ import annotations

from pathlib import Path

from stretto.config import RunConfig
from stretto.orchestration.ray.meeting import Meeting, Place, take_part
from stretto.orchestration.ray.part import Part
from stretto.orchestration.result import RunResult


class InlineRank(Part):
    """Rank `rank` of `size`; generation and training take turns in it."""

    def __init__(self, config: RunConfig, rank: int, size: int):
        self._config, self._rank, self._size = config, rank, size

    def place(self) -> Place:
        """Where the ranks meet; of the first one."""
        self._meeting = Meeting(self._config.engine.start_timeout_s)
        return self._meeting.place

    def run(self, place: Place, resume: Path | None, replay: Path | None) -> RunResult:
        """The whole run; raises what :func:`stretto.train` raises."""
        from stretto.orchestration.launch import train_inline

        take_part(place, self._rank, self._size)
        return train_inline(self._config, resume, replay)
