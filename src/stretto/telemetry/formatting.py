"""Numbers as people read them, the same in the terminal and in the report; and text that is safe in a page."""

from __future__ import annotations

import math
from html import escape


def number(value: float) -> str:
    """About three significant digits, short: 0.532, 12.3, 1,234, 56.7k, 1.2e-05, nan."""
    if not math.isfinite(value):
        return str(float(value))
    size = abs(value)
    if size == 0 or (size < 10_000 and float(value).is_integer()):
        return f"{value:,.0f}"
    if 0.001 <= size < 1:
        return f"{value:.3f}"
    if 1 <= size < 999.5:
        return f"{value:#.3g}".rstrip(".")
    if 999.5 <= size < 10_000:
        return f"{value:,.0f}"
    for power, suffix in enumerate("kMGT", start=1):
        if size >= 10_000 and size / 1000**power < 999.5:
            return f"{value / 1000**power:.3g}{suffix}"
    return f"{value:.1e}"


def clock(seconds: float) -> str:
    """Seconds as 4.2 s, 1:07 or 2:03:41."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def sparkline(values: list[float], width: int) -> str:
    """The last ``width`` values as block characters from their least to their greatest; a gap where not finite."""
    recent = values[-width:]
    finite = [value for value in recent if math.isfinite(value)]
    if not finite:
        return " " * len(recent)
    low, span = min(finite), max(finite) - min(finite)
    blocks = "▁▂▃▄▅▆▇█"
    return "".join(
        " " if not math.isfinite(value) else blocks[round((value - low) / span * 7)] if span else blocks[3]
        for value in recent
    )


def html_text(value: object) -> str:
    """Any value as HTML, in text and in attributes; characters that cannot stand in a page are replaced."""
    return escape(str(value).encode("utf-8", "replace").decode("utf-8").replace("\0", "�"))
