"""report.html on runs of every shape: valid, self-contained, and safe whatever a model wrote."""

from __future__ import annotations

import math
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.config.sections import TelemetryConfig
from stretto.telemetry.charts import nice_ticks, points_of
from stretto.telemetry.report import write_report
from stretto.telemetry.runlog import METRICS, RunLog

VOID = {"meta", "br"}
SHAPES = {"line", "rect", "circle", "polyline", "polygon"}
HOSTILE = (
    '</pre></div><script src="https://evil.example/x.js">alert(1)</script><img src=x onerror=alert(1)> & "\0\ud800'
)


class Page(HTMLParser):
    """Checks that tags balance and collects what the tests look at."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.style = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in SHAPES
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            self.style += data
        else:
            self.text += data


def page_of(run_dir: Path) -> Page:
    """Write the report, parse it, and hold what every report must hold."""
    page = Page()
    page.feed(write_report(run_dir).read_text(encoding="utf-8"))
    page.close()
    assert page.open == []
    assert not {"script", "link", "img", "iframe", "object", "base"} & set(page.tags)
    assert "url(" not in page.style
    assert "@import" not in page.style
    for name, value in page.attributes:
        assert name not in ("src", "href", "srcset", "xlink:href")
        assert not name.startswith("on")
        assert name == "aria-label" or "//" not in value
    assert all("nan" not in value for name, value in page.attributes if name in ("points", "x", "y", "cx", "cy"))
    assert list(run_dir.glob("*.tmp")) == []
    return page


def evaluate(log: RunLog, step: int, score: float, answers: dict[int, tuple[str, float]]) -> None:
    log.log(step, {"eval/score": score})
    log.samples(
        step,
        [
            {"kind": "eval", "row": row, "prompt": f"prompt {row}", "response": response, "reward": reward}
            for row, (response, reward) in answers.items()
        ],
    )


def test_a_whole_run_shows_before_after_curves_phases_and_tokens(tmp_path: Path) -> None:
    with RunLog(tmp_path, TelemetryConfig()) as log:
        evaluate(log, 0, 0.391, dict.fromkeys(range(20), ("bad", 0.0)))
        for step in range(1, 401):
            log.log(
                step,
                {"reward/mean": step / 400, "reward/std": 0.1, "train/grad_norm": math.nan if step == 7 else 1.0,
                 "reward/part/exact": 0.5, "time/rollout": 2.0, "time/train": 1.0, "time/step": 4.0,
                 "tokens/generated": 10 * step, "tokens/trained": 8 * step, "tokens/dropped": 2 * step,
                 "tokens/in_flight": 0},
            )  # fmt: skip
        evaluate(log, 400, 0.902, {row: ("good", 1.0) if row == 13 else ("bad", 0.0) for row in range(20)})
    (tmp_path / "config.toml").write_text('name = "addition"\n[model]\npath = "smollm2"\n', encoding="utf-8")
    text = page_of(tmp_path).text
    assert "0.391 → 0.902" in text
    assert "model smollm2" in text
    assert "Reward part: exact" in text
    assert "Not finite at 1 of 400 steps." in text
    assert "26:40" in text
    assert "Everything else" in text
    assert "They add up at all 400 steps." in text
    assert "1 got a higher reward, 0 a lower one, 19 the same" in text
    assert text.index("prompt 13") < text.index("prompt 0")
    assert 'path = "smollm2"' in text


def test_tokens_that_do_not_add_up_are_said_so(tmp_path: Path) -> None:
    with RunLog(tmp_path, TelemetryConfig()) as log:
        for step, dropped in ((1, 0), (2, 3)):
            log.log(
                step,
                {"tokens/generated": 10, "tokens/trained": 10, "tokens/dropped": dropped, "tokens/in_flight": 0},
            )
    assert "They do not add up at 1 of 2 steps." in page_of(tmp_path).text


@pytest.mark.parametrize(
    "metrics", [{}, {"eval/score": 0.5}, {"reward/mean": 0.0}, {"train/loss": math.inf}, {"x/y": 1}, {"time/step": 1.0}]
)
def test_one_step_with_hardly_a_metric_is_enough(tmp_path: Path, metrics: dict[str, float]) -> None:
    with RunLog(tmp_path, TelemetryConfig()) as log:
        log.log(1, metrics)
    assert tmp_path.name in page_of(tmp_path).text


def test_a_run_killed_before_its_first_step_has_a_report(tmp_path: Path) -> None:
    RunLog(tmp_path, TelemetryConfig()).close()
    (tmp_path / METRICS).write_bytes(b'{"step": 1, "rew')
    assert "steps" in page_of(tmp_path).text


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    with RunLog(tmp_path, TelemetryConfig()) as log:
        evaluate(log, 0, 0.0, {1: (HOSTILE, 0.0)})
        log.log(1, {f"reward/part/{HOSTILE}": 0.5})
        log.samples(1, [{"kind": "eval", "row": 1, "prompt": HOSTILE, "response": HOSTILE, "reward": 1.0}])
    (tmp_path / "config.toml").write_text("name = '''</title><script>alert(1)</script>'''\n", encoding="utf-8")
    page = page_of(tmp_path)
    assert page.text.count("<script src=") == 4
    assert "</title><script>alert(1)</script>" in page.text


def test_without_evaluation_the_training_samples_of_the_last_step_are_shown(tmp_path: Path) -> None:
    with RunLog(tmp_path, TelemetryConfig()) as log:
        for step in (1, 2):
            log.log(step, {"reward/mean": 0.5})
            record = {"kind": "train", "row": step, "prompt": "p", "response": f"answer of {step}", "reward": 0.5}
            log.samples(step, [record])
    text = page_of(tmp_path).text
    assert "answer of 2" in text
    assert "answer of 1" not in text


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no metrics\.jsonl"):
        write_report(tmp_path)


@given(st.floats(-1e290, 1e290), st.floats(-1e290, 1e290))
def test_ticks_enclose_their_values_and_stay_few(one: float, other: float) -> None:
    low, high = sorted((one, other))
    ticks = nice_ticks(low, high)
    slack = max(1e-290, 1e-6 * max(abs(low), abs(high)))
    assert ticks[0] <= low + slack
    assert ticks[-1] >= high - slack
    assert 2 <= len(ticks) <= 8
    assert all(left < right for left, right in pairwise(ticks))


def test_an_exploding_metric_does_not_stop_the_report(tmp_path: Path) -> None:
    with RunLog(tmp_path, TelemetryConfig()) as log:
        for step, value in enumerate((1.0, -1.7e308, 1.7e308, math.inf, 5e-324), start=1):
            log.log(step, {"reward/mean": value, "reward/std": abs(value)})
    assert "Not finite at 1 of 5 steps." in page_of(tmp_path).text


def test_long_runs_are_averaged_and_lose_no_step() -> None:
    points = points_of(dict.fromkeys(range(1, 1001), 1.0) | {5: math.nan}, {})
    assert len(points) <= 150
    assert (points[0].first, points[-1].last) == (1, 1000)
    assert all(point.value == 1.0 for point in points)
