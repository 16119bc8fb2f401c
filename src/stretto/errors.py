"""The error of a run that had already started. What a user can get wrong before that is a ValueError."""

from __future__ import annotations


class RunError(RuntimeError):
    """A started run had to stop. The message says why and what to do; `stretto` exits with 1 and no traceback."""
