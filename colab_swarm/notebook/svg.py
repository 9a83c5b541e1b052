"""Curves over steps as inline SVG. Pure functions in the colours of the theme."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
History = Sequence[tuple[float, float]]  # (step, value), oldest first
MAX_POINTS = 400
MAX_VALUE = 1e6  # larger values, and NaN, are not drawn
LEFT, BOTTOM, TOP, RIGHT = 44, 22, 10, 12
LINE = "var(--blue,#2a78d6)"  # the theme's blue; on a page without the theme, a blue for light and dark paper


def curve(
    history: History,
    *,
    spread: Sequence[tuple[float, float, float]] = (),
    limit: History = (),
    label: str = "loss",
    from_zero: bool = False,
    width: int = 550,
    height: int = 170,
) -> str:
    """Draw a curve over the steps; empty for fewer than two points.

    Args:
        history: the curve.
        spread: (step, low, high), drawn as a shade.
        limit: a curve that this one should stay below, drawn dashed.
        label: what the curve shows.
        from_zero: start the axis at 0.
        width, height: pixels.
    """
    points, above = _drawable(history), _drawable(limit)
    if len(points) < 2:
        return ""
    shade = [one for one in thinned(spread) if max(map(abs, one[1:])) < MAX_VALUE]
    values = [value for _, value in (*points, *above)] + [0.0] * from_zero
    first, low = points[0][0], min(values)
    high = max(*values, low + 1e-3 * (1 + abs(low)))
    plot = _Plot(first, max(points[-1][0], first + 1), low, high, width, height)
    edge = [(step, top) for step, _, top in shade] + [(step, bottom) for step, bottom, _ in reversed(shade)]
    area = f'<polygon points="{plot.places(edge)}" style="fill:{LINE};fill-opacity:.2"/>' if edge else ""
    dashed = (
        f'<polyline points="{plot.places(above)}" fill="none" stroke="currentColor" stroke-dasharray="5 4"/>'
        if above
        else ""
    )
    return (
        f'<svg viewBox="0 0 {width} {height}" style="max-width:{width}px;width:100%" role="img" '
        f'aria-label="{label} over steps" fill="currentColor" font-size="11" font-family="sans-serif">'
        f'{plot.axes()}{area}{dashed}<polyline points="{plot.places(points)}" fill="none" style="stroke:{LINE}" '
        f'stroke-width="2" stroke-linejoin="round"><title>{label} {points[-1][1]:.4g} at step '
        f"{points[-1][0]:,.0f}</title></polyline></svg>"
    )


@dataclass(frozen=True)
class _Plot:
    """Where steps and values lie in a picture."""

    first: float
    last: float
    low: float
    high: float
    width: int
    height: int

    def x(self, step: float) -> float:
        return LEFT + (self.width - LEFT - RIGHT) * (step - self.first) / (self.last - self.first)

    def y(self, value: float) -> float:
        inside = min(max(value, self.low), self.high)
        return TOP + (self.height - TOP - BOTTOM) * (self.high - inside) / (self.high - self.low)

    def places(self, points: History) -> str:
        left, y = self.x(0), self.y
        across = self.x(1) - left
        return " ".join([f"{left + across * step:.1f},{y(value):.1f}" for step, value in points])

    def axes(self) -> str:
        grid = (
            f'<path d="M{LEFT} {self.y(value):.1f}H{self.width - RIGHT}" stroke="currentColor" stroke-opacity=".15"/>'
            f'<text x="{LEFT - 6}" y="{self.y(value) + 4:.1f}" text-anchor="end">{value:g}</text>'
            for value in ticks(self.low, self.high, 5)
        )
        steps = (
            f'<text x="{self.x(step):.1f}" y="{self.height - 6}" text-anchor="middle">{step:,.0f}</text>'
            for step in ticks(self.first, self.last, 5)
            if step == int(step)
        )
        return "".join([*grid, *steps])


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return about ``count`` round numbers between two values."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
    return [round(step * i, 10) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _drawable(history: History) -> list[tuple[float, float]]:
    return thinned([(step, value) for step, value in history if abs(value) < MAX_VALUE])


def thinned(points: Sequence[T], limit: int = MAX_POINTS) -> list[T]:
    """Return about ``limit`` of the points, the last one included."""
    return [*points[: -1 : math.ceil(len(points) / limit)], points[-1]] if points else []
