"""The live terminal view: finished steps scroll by as lines, two bars and a reward curve stay below them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.text import Text

from stretto.telemetry.formatting import clock, number, sparkline
from stretto.telemetry.progress import Eta, Progress, summary

_CURVE_WIDTH = 48


class LiveProgress(Progress):
    """The view for a terminal; ``console`` is stdout when left out."""

    def __init__(self, total_steps: int, console: Console | None = None) -> None:
        self._total_steps = total_steps
        self._eta = Eta(total_steps)
        self._rewards: list[float] = []
        self._bars = Bars(
            TextColumn("[bold]{task.description:<10}"),
            BarColumn(bar_width=32, complete_style="cyan", finished_style="green"),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[info]}"),
        )
        self._run = self._bars.add_task("run", total=total_steps, info="")
        self._phase: TaskID | None = None
        self._live = Live(console=console or Console(), refresh_per_second=8, get_renderable=self._render)

    def phase(self, name: str, total: int) -> None:
        self._close_phase()
        self._phase = self._bars.add_task(name, total=total, info="")

    def advance(self, n: int = 1, **info: object) -> None:
        assert self._phase is not None, "advance() comes after phase()"
        text = "  ".join(f"{key} {number(value) if isinstance(value, float) else value}" for key, value in info.items())
        self._bars.update(self._phase, advance=n)
        if text:
            self._bars.update(self._phase, info=text)

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._close_phase()
        if "reward/mean" in metrics:
            self._rewards.append(metrics["reward/mean"])
        left = self._eta.finished(step)
        self._bars.update(self._run, completed=step, info=f"eta {clock(left)}" if step < self._total_steps else "")
        self._live.console.print(self._line(step, metrics), soft_wrap=True)

    def note(self, text: str) -> None:
        self._live.console.print(Text(text), soft_wrap=True)

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._close_phase()
        self._live.stop()

    def _close_phase(self) -> None:
        if self._phase is not None:
            self._bars.remove_task(self._phase)
            self._phase = None

    def _line(self, step: int, metrics: Mapping[str, Any]) -> Text:
        width = len(str(self._total_steps))
        line = Text.assemble(("step ", "dim"), (f"{step:>{width}}", "bold"), (f"/{self._total_steps}", "dim"))
        for label, value in summary(metrics):
            style = {"eval": "bold green", "reward": "cyan", "skipped": "bold red"}.get(label, "")
            line.append("  ").append(f"{label} ", "dim").append(f"{value:<5}", style)
        return line

    def _render(self) -> Group:
        bars = self._bars.make_tasks_table(self._bars.tasks)
        if len(self._rewards) < 2:
            return Group(bars)
        curve = Text.assemble(
            ("reward     ", "bold"),
            (sparkline(self._rewards, _CURVE_WIDTH), "cyan"),
            (f"  {number(self._rewards[0])} → {number(self._rewards[-1])}", "dim"),
        )
        return Group(bars, curve)
