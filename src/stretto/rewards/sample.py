"""What a reward sees of one sampled response."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sample:
    """One response to be scored.

    ``prompt`` is the text the model read, ``messages`` the chat it came from (None for a text prompt), ``fields`` the
    other columns of the row.
    """

    prompt: str
    completion: str
    completion_ids: tuple[int, ...]
    fields: Mapping[str, Any]
    messages: tuple[Mapping[str, Any], ...] | None = None
