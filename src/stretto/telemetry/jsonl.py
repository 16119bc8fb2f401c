"""JSON lines that survive a killed writer, and floats that JSON has no number for."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from stretto.files import sync_directory


def to_line(record: Mapping[str, Any]) -> str:
    """One line of strict JSON. Finite floats keep every bit; nan, inf and -inf become those strings.

    ``float("nan")`` and ``float("inf")`` read the strings back, where null would lose which of them it was.
    Raises TypeError for values that JSON cannot hold (tensors, arrays).
    """
    return json.dumps(_strict(record), allow_nan=False) + "\n"


def _strict(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return value


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file, without a last line that its writer did not finish.

    Raises ValueError, naming the line, for a broken line anywhere else.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line.decode("utf-8"))
            except ValueError as error:
                if not line.endswith(b"\n"):
                    return
                raise ValueError(f"{path}, line {number} is not JSON ({error}); mend or remove that line") from error
            if not isinstance(record, dict):
                raise ValueError(f"{path}, line {number} is not a JSON object; mend or remove that line")
            yield record


def keep_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Atomically reduce a file to the records that ``keep`` accepts; a torn last line goes too."""
    lines = [to_line(record) for record in read_jsonl(path) if keep(record)]
    aside = path.with_name(path.name + ".tmp")
    with aside.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync_directory(path.parent)


def mend_tail(path: Path) -> None:
    """Drop a torn last line, so that the next line written does not continue it."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        finished = file.read(1) == b"\n"
    if not finished:
        keep_lines(path, lambda record: True)
