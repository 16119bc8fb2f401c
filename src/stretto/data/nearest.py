"""The names a reader may have meant, for error messages."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def listed(name: str, valid: Iterable[str]) -> str:
    """``(did you mean 'a'? valid: a, b, c)`` for a `name` that is not among `valid`; at most 12 names are listed."""
    names = sorted(valid)
    near = get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(repr(n) for n in near)}? " if near else ""
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return f"({hint}valid: {', '.join(names[:12]) or 'none'}{more})"
