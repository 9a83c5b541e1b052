"""Accuracy over the epochs, as inline SVG. A pure function; colours are CSS classes of the page."""

from __future__ import annotations

import math
from collections.abc import Sequence

from colab_swarm.workunits.entries import EpochEnded

WIDTH, HEIGHT = 760, 240
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 12, 36
MAX_POINTS = 400
FEWEST_EPOCHS = 4
"""Room for so many from the beginning, so that the first ones do not look like the end."""
STEPS = (0.01, 0.02, 0.05, 0.1, 0.2)


def accuracy_svg(epochs: Sequence[EpochEnded], target: float | None) -> str:
    """Mean accuracy of each epoch over the band from its lowest to its highest, and the target; empty without any."""
    known = [one for one in epochs if math.isfinite(one.accuracy)]
    if not known:
        return ""
    shown = [*known[:: math.ceil(len(known) / MAX_POINTS)], known[-1]]
    edges = [edge for one in shown for edge in (one.low, one.high)] + ([target] if target is not None else [])
    low, high = max(0.0, min(edges) - 0.02), min(1.0, max(edges) + 0.02)
    last = max(shown[-1].epoch, FEWEST_EPOCHS)

    def x(epoch: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (epoch - 1) / (last - 1)

    def y(accuracy: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - accuracy) / (high - low)

    band = [(one.epoch, one.high) for one in shown] + [(one.epoch, one.low) for one in reversed(shown)]
    line = [(one.epoch, one.accuracy) for one in shown]
    around, along = (" ".join(f"{x(e):.1f},{y(a):.1f}" for e, a in points) for points in (band, line))
    parts = [_level(y(level), f"{level:.0%}") for level in _levels(low, high)]
    parts += [
        f'<text x="{x(epoch):.1f}" y="{HEIGHT - 20}" text-anchor="middle">{epoch}</text>'
        for epoch in range(1, last + 1, max(1, math.ceil(last / 12)))
    ]
    parts.append(f'<text x="{(LEFT + WIDTH) / 2:.0f}" y="{HEIGHT - 3}" text-anchor="middle">epoch</text>')
    if target is not None:
        parts.append(f'<path class="target" d="M{LEFT} {y(target):.1f}H{WIDTH - RIGHT}"/>')
    parts.append(f'<polygon class="band" points="{around}"/><polyline class="mean" points="{along}"/>')
    end = shown[-1]
    parts.append(
        f'<circle class="dot" cx="{x(end.epoch):.1f}" cy="{y(end.accuracy):.1f}" r="4">'
        f"<title>epoch {end.epoch}: {end.accuracy:.1%}, {end.low:.1%} to {end.high:.1%}</title></circle>"
    )
    label = f"Accuracy over epochs, {end.accuracy:.1%} in epoch {end.epoch}"
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="100%" role="img" aria-label="{label}" font-size="12">'
        f"{''.join(parts)}</svg>"
    )


def _levels(low: float, high: float) -> list[float]:
    """About five round ones between two."""
    step = next((step for step in STEPS if (high - low) / step <= 6), STEPS[-1])
    return [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _level(y: float, text: str) -> str:
    return (
        f'<path class="level" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
        f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
    )
