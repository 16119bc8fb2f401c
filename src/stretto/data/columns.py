"""What the columns of a source mean: one convention each for Stretto's own files and those of TRL, verl and slime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stretto.data.nearest import listed

Messages = tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Convention:
    """Where a format keeps things; the first name that a source has is used. A dot goes into a nested column."""

    prompt: tuple[str, ...]
    answer: tuple[str, ...]
    answer_required: bool
    copy_answer_to: str | None = None
    """A second field that gets the answer, when the format's reward functions know it by another name."""


CONVENTIONS: dict[str, Convention] = {
    "stretto": Convention(("prompt",), ("answer",), answer_required=True),
    "trl": Convention(("prompt",), ("answer", "solution", "ground_truth"), answer_required=False),
    "verl": Convention(("prompt",), ("reward_model.ground_truth",), True, copy_answer_to="ground_truth"),
    "slime": Convention(("input", "prompt"), ("label",), answer_required=True),
}

# `auto` takes the first format all of whose columns exist.
DETECTED: tuple[tuple[frozenset[str], str], ...] = (
    (frozenset({"prompt", "reward_model"}), "verl"),
    (frozenset({"prompt", "answer"}), "stretto"),
    (frozenset({"input", "label"}), "slime"),
    (frozenset({"prompt", "label"}), "slime"),
    (frozenset({"prompt"}), "trl"),
)


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns to read, found in a source's first row. `answer` is None when the source has no expected answer."""

    prompt: str
    answer: str | None
    copy_answer_to: str | None = None


def detect_format(columns: Mapping[str, Any], prompt_key: str | None) -> str:
    """The name of the convention whose columns a row has; `prompt_key` stands for the column ``prompt``.

    Raises ValueError that says which columns it saw.
    """
    present = columns.keys() | ({"prompt"} if prompt_key else set())
    for needed, name in DETECTED:
        if needed <= present:
            return name
    raise ValueError(
        f"cannot tell the format from the columns {', '.join(sorted(columns)) or '(none)'}: stretto has prompt and "
        "answer, trl prompt, verl prompt and reward_model, slime input and label; name yours with data.prompt_key and "
        "data.label_key"
    )


def find_columns(row: Mapping[str, Any], format: str, prompt_key: str | None, label_key: str | None) -> Columns:
    """The columns of a source whose first row is `row`. The keys, when given, win over the format's own names.

    Raises ValueError naming a missing column, the columns that exist and the nearest, and for a label_key beside which
    the source has a column ``answer``: rewards know only one answer.
    """
    if label_key is not None and label_key != "answer" and "answer" in row:
        raise ValueError(
            f"data.label_key = {label_key!r} would hide the column 'answer', since rewards get the expected answer "
            "under that name; remove data.label_key, or rename the column 'answer'"
        )
    name = detect_format(row, prompt_key) if format == "auto" else format
    convention = CONVENTIONS[name]
    prompt = _pick(row, (prompt_key,) if prompt_key else convention.prompt, True, f"data.format = {name}")
    answers = (label_key,) if label_key else convention.answer
    answer = _pick(row, answers, convention.answer_required or label_key is not None, f"data.format = {name}")
    assert prompt is not None
    return Columns(prompt, answer, convention.copy_answer_to)


def read_row(row: Mapping[str, Any], columns: Columns) -> tuple[str | Messages, dict[str, Any]]:
    """The prompt of a row (text, or chat messages) and its fields.

    The fields are all other columns under their own names, and the expected answer, if any, as ``answer``.
    Raises ValueError for a missing column, and for a prompt that is neither text nor a chat.
    """
    prompt = _prompt(_get(row, columns.prompt), columns.prompt)
    fields = {name: value for name, value in row.items() if name != columns.prompt}
    if columns.answer is not None:
        fields["answer"] = _get(row, columns.answer)
        if columns.copy_answer_to is not None:
            fields[columns.copy_answer_to] = fields["answer"]
    return prompt, fields


def _pick(row: Mapping[str, Any], names: tuple[str, ...], required: bool, what: str) -> str | None:
    for name in names:
        if _has(row, name):
            return name
    if not required:
        return None
    raise ValueError(f"no column {' or '.join(repr(n) for n in names)}, which {what} reads {listed(names[0], row)}")


def _has(row: Mapping[str, Any], name: str) -> bool:
    if name in row:
        return True
    head, _, rest = name.partition(".")
    return bool(rest) and isinstance(row.get(head), Mapping) and _has(row[head], rest)


def _get(row: Mapping[str, Any], name: str) -> Any:
    if not _has(row, name):
        raise ValueError(f"no column {name!r} {listed(name, row)}; every row needs the columns of the first")
    if name in row:
        return row[name]
    head, _, rest = name.partition(".")
    return _get(row[head], rest)


def _prompt(value: Any, column: str) -> str | Messages:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError(f"column {column!r} must be text or a list of chat messages, not {value!r:.80}")
    return tuple(_message(item, column) for item in value)


def _message(item: Any, column: str) -> dict[str, Any]:
    if not isinstance(item, Mapping) or not isinstance(item.get("role"), str) or "content" not in item:
        raise ValueError(f"column {column!r}: a chat message needs role and content, not {item!r:.80}")
    # Arrow gives every message every key that any message has; the ones it made up are None.
    return {key: value for key, value in item.items() if value is not None or key == "content"}
