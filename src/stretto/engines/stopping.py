"""When a response ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stretto.types import FinishReason, Sampling


class StopRule:
    """Ends a response at an end-of-sequence id, a stop id, a stop string or its length, in this order."""

    def __init__(self, tokenizer: Any, eos_ids: Sequence[int]):
        self._tokenizer = tokenizer
        self._eos_ids = frozenset(eos_ids)

    def reason(self, ids: Sequence[int], sampling: Sampling) -> FinishReason | None:
        """Why the response `ids` ends with its last token, or None when it goes on."""
        if ids[-1] in self._eos_ids or ids[-1] in sampling.stop_ids or self._ends_with_string(ids, sampling.stop):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(ids) >= sampling.max_new_tokens else None

    def _ends_with_string(self, ids: Sequence[int], strings: Sequence[str]) -> bool:
        if not strings:
            return False
        # A token spans at least one byte and a character at most four, so this tail covers the longest string.
        tail = list(ids[-(4 * max(map(len, strings)) + 4) :])
        text = self._tokenizer.decode(tail, skip_special_tokens=False)
        earlier = self._tokenizer.decode(tail[:-1], skip_special_tokens=False)
        return any(string in text and string not in earlier for string in strings)
