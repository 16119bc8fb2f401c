"""Inline SVG: one line chart and one stacked bar. Colours come from the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from stretto.telemetry.formatting import html_text, number

WIDTH, HEIGHT = 360, 168
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 8, 22
_MAX_POINTS = 150
# Sums and ranges of what lies between these neither overflow nor underflow.
_TINY, _HUGE = 1e-290, 1e290


class Point(NamedTuple):
    """The mean of a metric over steps ``first`` to ``last``, and half the height of its band."""

    first: int
    last: int
    value: float
    spread: float

    @property
    def step(self) -> float:
        return (self.first + self.last) / 2


def points_of(series: dict[int, float], spreads: dict[int, float]) -> list[Point]:
    """At most 150 points, of a long run averages over neighbouring steps. Values that are not finite are left out."""
    finite = [(step, max(-_HUGE, min(value, _HUGE))) for step, value in series.items() if math.isfinite(value)]
    size = max(1, math.ceil(len(finite) / _MAX_POINTS))
    points = []
    for start in range(0, len(finite), size):
        chunk = finite[start : start + size]
        bands = [min(spreads[step], _HUGE) for step, _ in chunk if math.isfinite(spreads.get(step, math.nan))]
        points.append(
            Point(
                first=chunk[0][0],
                last=chunk[-1][0],
                value=sum(value for _, value in chunk) / len(chunk),
                spread=sum(bands) / len(bands) if bands else 0.0,
            )
        )
    return points


def line_chart(points: Sequence[Point], steps: tuple[int, int], label: str) -> str:
    """A chart of ``points`` over the range ``steps``, with a band where they have a spread and a value on hover."""
    ticks = nice_ticks(min(p.value - p.spread for p in points), max(p.value + p.spread for p in points))
    scale = _Scale(steps, (ticks[0], ticks[-1]))
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html_text(label)}">']
    parts += [_grid_line(scale.y(tick), _tick_label(tick, ticks[1] - ticks[0])) for tick in ticks]
    parts += [_step_label(scale, step) for step in sorted({steps[0], sum(steps) // 2, steps[1]})]
    if any(p.spread for p in points):
        edge = [(p.step, p.value + p.spread) for p in points] + [(p.step, p.value - p.spread) for p in reversed(points)]
        parts.append(f'<polygon class="band" points="{scale.path(edge)}"/>')
    parts.append(f'<polyline class="line" points="{scale.path([(p.step, p.value) for p in points])}"/>')
    parts += _hover_targets(points, scale)
    return "".join(parts) + "</svg>"


class _Scale:
    """From steps and values to the coordinates of the plot."""

    def __init__(self, steps: tuple[int, int], values: tuple[float, float]) -> None:
        self._steps, self._values = steps, values

    def x(self, step: float) -> float:
        first, last = self._steps
        share = (step - first) / (last - first) if last > first else 0.5
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self._values
        return _TOP + (high - value) / (high - low) * (HEIGHT - _TOP - _BOTTOM)

    def path(self, pairs: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{self.x(step):.1f},{self.y(value):.1f}" for step, value in pairs)


def nice_ticks(low: float, high: float) -> list[float]:
    """Round values, three to seven of them, that enclose [low, high]; a single value gets an axis from zero."""
    if high - low <= max(_TINY, 1e-9 * max(abs(low), abs(high))):
        low, high = sorted((0.0, 2 * low)) if abs(low) > _TINY else (0.0, 1.0)
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [step * index for index in range(math.floor(low / step), math.ceil(high / step) + 1)]


def _tick_label(tick: float, step: float) -> str:
    """All ticks of an axis with the same decimals."""
    if 0.001 <= step < 1000:
        return f"{tick:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"
    return number(tick) if step >= 1000 else f"{tick:.2g}".replace("e-0", "e-")


def _grid_line(y: float, label: str) -> str:
    return (
        f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{_LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{label}</text>'
    )


def _step_label(scale: _Scale, step: int) -> str:
    x = scale.x(step)
    anchor = "end" if x > WIDTH - _RIGHT - 1 else "start" if x < _LEFT + 1 else "middle"
    return f'<text x="{x:.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{step:,}</text>'


def _hover_targets(points: Sequence[Point], scale: _Scale) -> list[str]:
    """A full-height strip around each point that shows its value; few points are drawn as dots as well."""
    xs = [scale.x(p.step) for p in points]
    edges = [_LEFT, *((a + b) / 2 for a, b in pairwise(xs)), WIDTH - _RIGHT]
    dot = "dot" if len(points) <= 25 else "dot far"
    targets = []
    for p, x, left, right in zip(points, xs, edges[:-1], edges[1:], strict=True):
        steps = f"step {p.first}" if p.first == p.last else f"mean of steps {p.first} to {p.last}"
        spread = f" ± {number(p.spread)}" if p.spread else ""
        targets.append(
            f'<g class="at"><title>{steps}: {number(p.value)}{spread}</title>'
            f'<rect x="{left:.1f}" y="{_TOP}" width="{right - left:.1f}" height="{HEIGHT - _TOP - _BOTTOM}"/>'
            f'<circle class="{dot}" cx="{x:.1f}" cy="{scale.y(p.value):.1f}" r="2.6"/></g>'
        )
    return targets


def stacked_bar(parts: Sequence[tuple[str, float]], colours: Sequence[str]) -> str:
    """One bar of the parts (label, amount) in the style sheet's ``colours``; its total must be above zero."""
    total = sum(amount for _, amount in parts)
    x, pieces = 0.0, []
    for (label, amount), colour in zip(parts, colours, strict=True):
        width = amount / total * 1000
        pieces.append(
            f'<rect class="{colour}" x="{x:.1f}" y="0" width="{max(0.0, width - 2):.1f}" height="26">'
            f"<title>{html_text(label)}: {amount / total:.1%}</title></rect>"
        )
        x += width
    return (
        '<svg class="bar" viewBox="0 0 1000 26" preserveAspectRatio="none" role="img" aria-label="seconds by phase">'
        + "".join(pieces)
        + "</svg>"
    )
