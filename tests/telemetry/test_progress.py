"""The live view and its plain twin say the same things."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
from rich.console import Console

from stretto.telemetry.live import LiveProgress
from stretto.telemetry.progress import PlainProgress, Progress, open_progress

METRICS = {"reward/mean": 0.5, "train/grad_norm": 0.812, "tokens/per_s": 1204.0, "time/step": 4.2}

LOOP = """
from stretto.telemetry.progress import open_progress
with open_progress(2) as progress:
    progress.note("[bold]a note[/bold]")
    for step in (1, 2):
        progress.phase("rollout", 4)
        progress.advance(2, reward=0.25)
        progress.advance(2)
        progress.phase("train", 1)
        progress.advance()
        progress.step(step, {"reward/mean": step / 4, "time/step": 4.2})
"""


def run_two_steps(progress: Progress) -> None:
    with progress:
        progress.note("[bold]a note[/bold]")
        for step in (1, 2):
            progress.phase("rollout", 4)
            progress.advance(4, reward=0.25)
            progress.step(step, METRICS | ({"eval/score": 0.75} if step == 2 else {}))


def test_plain_lines_are_one_a_step_and_without_escape_codes(capsys: pytest.CaptureFixture[str]) -> None:
    run_two_steps(open_progress(2))
    note, first, last = capsys.readouterr().out.splitlines()
    assert note == "[bold]a note[/bold]"
    assert first.startswith("step 1/2  eta ")
    assert first.endswith("  reward 0.500  grad 0.812  tok/s 1,204  time 4.2 s")
    assert last == "step 2/2  reward 0.500  grad 0.812  tok/s 1,204  time 4.2 s  eval 0.750"


def test_a_step_without_metrics_still_has_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    PlainProgress(1).step(1, {})
    assert capsys.readouterr().out == "step 1/1\n"


def test_skipped_optimizer_steps_and_broken_values_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    PlainProgress(1).step(1, {"train/grad_norm": float("nan"), "train/skipped_steps": 2})
    assert capsys.readouterr().out == "step 1/1  grad nan  skipped 2\n"


def test_a_silent_rank_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    run_two_steps(open_progress(2, enabled=False))
    assert capsys.readouterr().out == ""


def test_the_live_view_keeps_step_lines_and_shows_both_bars() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, color_system=None)
    progress = LiveProgress(2, console)
    with progress:
        progress.phase("rollout", 4)
        progress.advance(3, reward=0.25)
        console.print(progress._render())
        progress.step(1, METRICS)
        progress.step(2, METRICS)
    shown = screen.getvalue()
    assert "3/4" in shown
    assert "reward 0.250" in shown
    assert "step 1/2  reward 0.500" in shown
    assert "step 2/2  reward 0.500" in shown
    assert "0.500 → 0.500" in shown


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_a_terminal_gets_the_live_view() -> None:
    ours, theirs = os.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen([sys.executable, "-c", LOOP], stdout=theirs, env=environment)
    os.close(theirs)
    output = b""
    try:
        while chunk := os.read(ours, 65536):
            output += chunk
    except OSError:
        pass  # Linux reports the end of a pseudo-terminal as an error.
    os.close(ours)
    assert process.wait(timeout=60) == 0
    assert b"\x1b[" in output
    assert b"[bold]a note[/bold]" in output
