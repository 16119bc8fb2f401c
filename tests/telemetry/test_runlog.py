"""metrics.jsonl and its neighbours: what is written comes back, and a killed writer does no harm."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.config.sections import TelemetryConfig
from stretto.telemetry.jsonl import to_line
from stretto.telemetry.runlog import LEDGER, METRICS, SAMPLES, RunLog, read_jsonl, rewind

PLAIN = TelemetryConfig()


def log_steps(run_dir: Path, steps: range) -> None:
    with RunLog(run_dir, PLAIN) as log:
        for step in steps:
            log.log(step, {"reward/mean": step / 10})
            log.samples(step, [{"kind": "train", "response": f"answer {step}"}])
            log.ledger(step, {"rows": [step]})


def steps_in(path: Path) -> list[int]:
    return [record["step"] for record in read_jsonl(path)]


@given(st.dictionaries(st.text(), st.floats() | st.integers() | st.lists(st.floats())))
def test_every_float_survives_strict_json(metrics: dict) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    back = json.loads(to_line(metrics), parse_constant=refuse)
    assert back.keys() == metrics.keys()
    for name, value in metrics.items():
        expected, found = (value, back[name]) if isinstance(value, list) else ([value], [back[name]])
        for left, right in zip(expected, found, strict=True):
            if isinstance(left, float) and not math.isfinite(left):
                assert isinstance(right, str)
                assert repr(float(right)) == repr(left)
            else:
                assert repr(right) == repr(left)


@given(st.text(st.characters(exclude_categories=[])))
def test_any_text_is_one_line_that_reads_back(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.mktemp("text") / "samples.jsonl"
    path.write_text(to_line({"response": text}), encoding="utf-8", newline="\n")
    assert list(read_jsonl(path)) == [{"response": text}]


def test_a_line_is_on_disk_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    log = RunLog(tmp_path, PLAIN)
    log.log(3, {"train/loss": math.nan})
    assert list(read_jsonl(tmp_path / METRICS)) == [{"step": 3, "train/loss": "nan"}]
    log.close()


def test_opening_again_appends(tmp_path: Path) -> None:
    log_steps(tmp_path, range(1, 3))
    log_steps(tmp_path, range(3, 5))
    assert steps_in(tmp_path / METRICS) == [1, 2, 3, 4]


def test_a_tensor_is_refused_rather_than_written_as_text(tmp_path: Path) -> None:
    with RunLog(tmp_path, PLAIN) as log, pytest.raises(TypeError):
        log.log(1, {"train/loss": object()})  # type: ignore[dict-item]
    assert list(read_jsonl(tmp_path / METRICS)) == []


@pytest.mark.parametrize("torn", [b'{"step": 5, "rew', b'{"step": 5, "a": "\xc3', b"\0\0\0", b"{"])
def test_a_torn_last_line_is_not_read_and_does_not_swallow_the_next(tmp_path: Path, torn: bytes) -> None:
    log_steps(tmp_path, range(1, 5))
    with (tmp_path / METRICS).open("ab") as file:
        file.write(torn)
    assert steps_in(tmp_path / METRICS) == [1, 2, 3, 4]
    log_steps(tmp_path, range(5, 6))
    assert steps_in(tmp_path / METRICS) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("line", ['{"step": 2, "rew', "[1]", ""])
def test_a_broken_line_elsewhere_is_an_error_that_names_it(tmp_path: Path, line: str) -> None:
    path = tmp_path / METRICS
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="line 2"):
        list(read_jsonl(path))


def test_rewind_drops_later_steps_and_torn_lines_from_all_three_files(tmp_path: Path) -> None:
    log_steps(tmp_path, range(1, 8))
    kept = {name: (tmp_path / name).read_bytes().splitlines()[:4] for name in (METRICS, SAMPLES, LEDGER)}
    for name in kept:
        with (tmp_path / name).open("ab") as file:
            file.write(b'{"step": 8, "re')
    rewind(tmp_path, 4)
    for name, lines in kept.items():
        assert (tmp_path / name).read_bytes().splitlines() == lines
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def test_a_rewind_that_cannot_read_a_file_leaves_it_alone(tmp_path: Path) -> None:
    path = tmp_path / METRICS
    path.write_text('{"step": 1}\n{"reward/mean": 1}\n', encoding="utf-8")
    before = path.read_bytes()
    with pytest.raises(ValueError, match="without a step"):
        rewind(tmp_path, 1)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_rewinding_a_directory_without_files_does_nothing(tmp_path: Path) -> None:
    rewind(tmp_path, 3)
    assert list(tmp_path.iterdir()) == []
