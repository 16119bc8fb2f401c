"""Every kind of source, written and read for real."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stretto.data import read_rows

ROWS = [{"prompt": "1 + 1 =", "answer": "2"}, {"prompt": "größer\u2028?", "answer": "ja"}]


def read(source: str | Path, split: str = "train") -> list[dict]:
    return read_rows(str(source), split, {}, 0)


@pytest.mark.parametrize("suffix", [".jsonl", ".json-lines", ".json"])
def test_json_lines_with_unescaped_unicode_and_blank_lines(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    path.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\n", encoding="utf-8")
    assert read(path) == ROWS


@pytest.mark.parametrize("broken", ["{'a': 1}", '{"a": ', "\xff"])
def test_a_malformed_line_is_named_by_its_number(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "x"}\n\n' + broken.encode("latin-1") + b"\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 3: not JSON"):
        read(path)


def test_a_line_that_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x"}\n["y"]\n')
    with pytest.raises(ValueError, match=r"line 2: every line must hold one object, not a list"):
        read(tmp_path / "rows.jsonl")


def test_parquet_keeps_nested_columns(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "hi"}], "reward_model": {"ground_truth": "7", "style": "rule"}}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert read(tmp_path / "rows.parquet") == rows


def test_a_file_that_is_not_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_text("not parquet at all, but long enough to look")
    with pytest.raises(ValueError, match=r"rows\.parquet cannot be read as Parquet"):
        read(tmp_path / "rows.parquet")


def test_a_dataset_saved_to_disk(tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    assert read(tmp_path / "saved") == ROWS


def test_the_split_of_a_saved_dataset_is_chosen_and_an_unknown_one_is_answered_with_those_that_exist(
    tmp_path: Path,
) -> None:
    both = {"train": datasets.Dataset.from_list(ROWS[:1]), "test": datasets.Dataset.from_list(ROWS[1:])}
    datasets.DatasetDict(both).save_to_disk(tmp_path / "saved")
    assert read(tmp_path / "saved", "train") == ROWS[:1]
    assert read(tmp_path / "saved", "test") == ROWS[1:]
    with pytest.raises(ValueError, match=r"no split 'tests' \(did you mean 'test'\? valid: test, train\)"):
        read(tmp_path / "saved", "tests")


def test_a_directory_of_data_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "files").mkdir()
    for split, row in zip(("train", "test"), ROWS, strict=True):
        (tmp_path / "files" / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    assert read(tmp_path / "files", "test") == ROWS[1:]


CONFIGS = """---
configs:
- config_name: easy
  data_files: easy.jsonl
- config_name: hard
  data_files: [{split: test, path: hard.jsonl}]
---
"""


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset of two configurations, the second with a test split alone."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    directory = tmp_path / "configured"
    directory.mkdir()
    (directory / "README.md").write_text(CONFIGS)
    for name, row in zip(("easy", "hard"), ROWS, strict=True):
        (directory / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    return directory


def test_the_configuration_of_a_dataset_is_chosen(configured: Path) -> None:
    assert read_rows(str(configured), "train", {}, 0, "easy") == ROWS[:1]
    assert read_rows(str(configured), "test", {}, 0, "hard") == ROWS[1:]


@pytest.mark.parametrize("subset", [None, "hrad"])
def test_a_missing_or_unknown_configuration_is_answered_with_those_that_exist(
    configured: Path, subset: str | None
) -> None:
    with pytest.raises(ValueError, match=r"(?s)easy.*hard.*data\.subset"):
        read_rows(str(configured), "train", {}, 0, subset)


def test_a_saved_dataset_has_no_configurations(tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"no subset 'main'; remove data\.subset"):
        read_rows(str(tmp_path / "saved"), "train", {}, 0, "main")


@pytest.mark.parametrize(("suffix", "package"), [("", "datasets"), (".parquet", "pyarrow")])
def test_a_missing_package_is_named_with_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, package: str
) -> None:
    path = tmp_path / f"source{suffix}"
    path.touch() if suffix else path.mkdir()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=rf"needs {package}, which is not installed: pip install datasets pyarrow$"):
        read(path)


def test_a_directory_without_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`datasets` cannot load it"):
        read(tmp_path)


def test_a_hub_name_that_cannot_be_reached_is_refused_with_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"someone/nothing is no file or directory here.*cannot load it: \w+Error"):
        read("someone/nothing")


@pytest.mark.parametrize("source", ["missing.jsonl", "missing.parquet", "a/b/missing", "./missing"])
def test_a_missing_path_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match="does not exist; a path is relative to"):
        read(source)


def test_a_file_of_another_kind_is_refused_with_the_kinds_that_work(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt,answer\n1,2\n")
    with pytest.raises(ValueError, match=r"cannot read \.csv; use one of \.jsonl, .*\.parquet"):
        read(tmp_path / "rows.csv")


def test_an_empty_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl has no rows"):
        read(tmp_path / "rows.jsonl")
