"""Reads the rows of a source, one small function a kind. A row is a dict of columns; `columns` says what they mean."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stretto.data.nearest import listed
from stretto.data.procedural import is_procedural, read_procedural

Rows = list[dict[str, Any]]


def read_rows(source: str, split: str, args: Mapping[str, Any], seed: int, subset: str | None = None) -> Rows:
    """All rows of `source`, at least one.

    `split` and `subset` (the configuration) are for Hugging Face datasets; `args` and `seed` are for reasoning_gym
    datasets. Raises ValueError that says what to do when the source is missing, empty, malformed, or lacks the split.
    """
    path = Path(source)
    if is_procedural(source):
        rows = read_procedural(source, args, seed)
    elif path.is_dir():
        rows = read_directory(path, split, subset)
    elif path.is_file() or path.suffix in FILES:
        rows = _read_file(path)
    else:
        rows = read_hub(source, split, subset)
    if not rows:
        raise ValueError(f"{source} has no rows; point data.source (or eval.source) at a source that has some")
    return rows


def read_json_lines(path: Path) -> Rows:
    """One JSON object a line; blank lines are skipped. Raises ValueError with the number of a line that is not one."""
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not JSON: {error}; every line must hold one object") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: every line must hold one object, not a {type(row).__name__}")
        rows.append(row)
    return rows


def read_parquet(path: Path) -> Rows:
    """The rows of a Parquet file. Raises ValueError when it is not one, or when pyarrow is not installed."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise _extra_missing(f"{path} needs pyarrow") from error
    try:
        return pq.ParquetFile(path).read().to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as Parquet: {error}") from error


def read_directory(path: Path, split: str, subset: str | None) -> Rows:
    """A dataset that `save_to_disk` wrote, or a directory of data files that `datasets` can load."""
    saved = any((path / name).exists() for name in ("dataset_dict.json", "state.json"))
    if saved and subset is not None:
        raise ValueError(f"{path} was written by save_to_disk and has no subset {subset!r}; remove data.subset")
    return _read_datasets("load_from_disk" if saved else "load_dataset", str(path), split, subset)


def read_hub(name: str, split: str, subset: str | None) -> Rows:
    """A dataset of the Hugging Face hub (or of its cache)."""
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise ValueError(f"{name} does not exist; a path is relative to the directory that the command runs in")
    return _read_datasets("load_dataset", name, split, subset)


FILES: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": read_json_lines,
    ".json-lines": read_json_lines,
    ".json": read_json_lines,
    ".parquet": read_parquet,
}


def _read_file(path: Path) -> Rows:
    if not path.is_file():
        raise ValueError(f"{path} does not exist; a path is relative to the directory that the command runs in")
    if path.suffix not in FILES:
        raise ValueError(f"{path}: cannot read {path.suffix or 'a file without suffix'}; use one of {', '.join(FILES)}")
    return FILES[path.suffix](path)


def _read_datasets(loader: str, source: str, split: str, subset: str | None) -> Rows:
    """Rows of one split through the function `loader` of `datasets`."""
    try:
        import datasets
    except ImportError as error:
        raise _extra_missing(f"{source} needs datasets") from error
    try:
        found = getattr(datasets, loader)(source, *([] if subset is None else [subset]))
    except Exception as error:  # the hub's client, Arrow and every file reader raise errors of their own
        hint = "; data.subset (or eval.subset) names the configuration" if "onfig" in str(error) else ""
        raise ValueError(
            f"{source} is no file or directory here that can be read, and `datasets` cannot load it: "
            f"{type(error).__name__}: {error}{hint}"
        ) from error
    splits = found if isinstance(found, dict) else {str(found.split or "train"): found}
    if split not in splits:
        raise ValueError(f"{source} has no split {split!r} {listed(split, splits)}; set data.split (or eval.split)")
    return splits[split].to_list()


def _extra_missing(what: str) -> ValueError:
    return ValueError(f"{what}, which is not installed: pip install datasets pyarrow")
