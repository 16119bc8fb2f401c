"""What a check found, for people and as data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

Status = Literal["pass", "fail", "skipped"]
_STYLE = {"pass": "green", "fail": "bold red", "skipped": "yellow"}


@dataclass(frozen=True)
class Failure:
    """The first wrong parameter (its name in the checkpoint where it has one), the likely kind, and how one sees it."""

    parameter: str | None
    kind: str
    evidence: str


@dataclass(frozen=True)
class Outcome:
    """How a rung ended. `measured` and `bound` are of the same quantity, which `reason` names."""

    status: Status
    reason: str
    measured: float | None = None
    bound: float | None = None
    failure: Failure | None = None


@dataclass(frozen=True)
class Rung:
    """One step of the ladder, climbed."""

    name: str
    outcome: Outcome
    seconds: float = 0.0


@dataclass(frozen=True)
class Report:
    """The whole ladder. `about` says what was checked and on which probe."""

    about: Mapping[str, str]
    rungs: Sequence[Rung] = field(default_factory=list)

    @property
    def failure(self) -> Failure | None:
        """Of the broken rung."""
        return next((rung.outcome.failure for rung in self.rungs if rung.outcome.failure), None)

    @property
    def passed(self) -> bool:
        """Whether no rung broke."""
        return all(rung.outcome.status != "fail" for rung in self.rungs)

    def to_dict(self) -> dict[str, Any]:
        """As data."""
        return {
            "passed": self.passed,
            "about": dict(self.about),
            "rungs": [
                {"name": rung.name, "seconds": round(rung.seconds, 3)}
                | {key: value for key, value in asdict(rung.outcome).items() if key != "failure"}
                for rung in self.rungs
            ],
            "failure": asdict(self.failure) if self.failure else None,
        }

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Report:
        """Inverse of :meth:`to_dict`."""
        failure = Failure(**raw["failure"]) if raw["failure"] else None
        rungs = [
            Rung(
                one["name"],
                Outcome(
                    one["status"],
                    one["reason"],
                    one["measured"],
                    one["bound"],
                    failure if one["status"] == "fail" else None,
                ),
                one["seconds"],
            )
            for one in raw["rungs"]
        ]
        return cls(raw["about"], rungs)

    def to_json(self) -> str:
        """As JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def show(self, console: Console) -> None:
        """Print it for people."""
        for key, value in self.about.items():
            console.print(f"{key:<8} {value}", highlight=False, markup=False)
        table = Table(box=None, pad_edge=False, header_style="dim")
        table.add_column("rung", no_wrap=True)
        table.add_column("", no_wrap=True)
        table.add_column("seconds", justify="right", no_wrap=True)
        table.add_column("why", overflow="fold")
        for rung in self.rungs:
            status = rung.outcome.status
            table.add_row(
                Text(rung.name), Text(status, _STYLE[status]), f"{rung.seconds:.1f}", Text(rung.outcome.reason)
            )
        console.print(table)
        if (failure := self.failure) is not None:
            console.print(Text(f"first wrong parameter: {failure.parameter or 'not known'}", _STYLE["fail"]))
            console.print(Text(f"likely: {failure.kind}"))
            console.print(Text(failure.evidence))
