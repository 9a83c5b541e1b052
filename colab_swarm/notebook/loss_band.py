"""The run's loss beside that of a published run, so that nobody takes warm-up for a fault, or a fault for warm-up.

Pure functions of histories, ``(step, loss)`` with the oldest first. The pictures take the colours of the theme.
"""

from __future__ import annotations

import html
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TypeVar

T = TypeVar("T")
History = Sequence[tuple[float, float]]
STEP_SLACK, LOSS_SLACK = 1.25, 0.07
"""The band is the published loss at steps a quarter earlier to a quarter later, 7 % to either side."""
WARM_UP_STEPS = 500
SMOOTHED = 5
"""Points of a run whose mean is compared: one batch says little."""
MAX_POINTS = 400
MAX_LOSS = 1e6
"""What is beyond, or no number, is drawn nowhere."""
LEFT, BOTTOM, TOP, RIGHT = 44, 22, 10, 12
LINE, BAND = "var(--blue,#2a78d6)", "var(--soft,#8a8a8a)"
"""As the theme has them; on a page without it, tones that both light and dark bear."""


@dataclass(frozen=True)
class Reference:
    """A published run.

    Attributes:
        name: of the run.
        history: its loss.
    """

    name: str
    history: tuple[tuple[int, float], ...]

    @property
    def last_step(self) -> int:
        """Where its history ends."""
        return self.history[-1][0]

    def loss(self, step: float) -> float:
        """Its loss at a step; between two that were published on the straight line, outside that of the nearest."""
        at = bisect_left(self.history, (step, -math.inf))
        if at == 0 or at == len(self.history):
            return self.history[min(at, len(self.history) - 1)][1]
        (before, high), (after, low) = self.history[at - 1], self.history[at]
        return high + (low - high) * (step - before) / (after - before)

    def band(self, step: float) -> tuple[float, float] | None:
        """The least and the highest loss expected at a step; None after its last one."""
        if step > self.last_step:
            return None
        early, late = step / STEP_SLACK, step * STEP_SLACK
        nearby = [loss for one, loss in self.history if early < one < late]
        nearby += [self.loss(early), self.loss(late)]
        return min(nearby) * (1 - LOSS_SLACK), max(nearby) * (1 + LOSS_SLACK)


@dataclass(frozen=True)
class Verdict:
    """What the comparison says, in a sentence, and whether it is a ``warning``."""

    text: str
    warning: bool = False


@cache
def sahajbert() -> Reference:
    """sahajBERT, trained by 40 volunteers in May 2021 (DeDLOC, section 4.3)."""
    lines = (
        files("colab_swarm.notebook").joinpath("sahajbert_loss.csv").read_text(encoding="utf-8").split("\n")
    )
    pairs = (line.split(",") for line in lines if line and not line.startswith("#"))
    return Reference("sahajBERT", tuple((int(step), float(loss)) for step, loss in pairs))


def reference_for(history: History) -> Reference | None:
    """The published run to compare with, if this one began like it; None for a run of another kind."""
    points = _finite(history)
    band = sahajbert().band(points[0][0]) if points else None
    return sahajbert() if band is not None and band[0] <= points[0][1] <= band[1] else None


def judge(history: History, reference: Reference) -> Verdict:
    """Whether the loss is where it should be by now."""
    points = _finite(history)
    if not points:
        lost = "the loss is not finite: lower the learning rate, or go back to a checkpoint"
        return Verdict(lost, True) if history else Verdict("no trainer has told a loss yet")
    step = points[-1][0]
    recent = [loss for _, loss in points[-SMOOTHED:]]
    loss, band, name = sum(recent) / len(recent), reference.band(step), reference.name
    if band is None:
        return Verdict(
            f"loss {loss:.2f}; the published history of {name} ends at step {reference.last_step:,}"
        )
    expected = f"{name} had {band[0]:.2f} to {band[1]:.2f} at step {step:,.0f}"
    if loss > band[1]:
        return Verdict(
            f"loss {loss:.2f} is higher than expected: {expected}; check learning rate, warm-up and target batch "
            "size, and that all peers train on the same kind of text",
            True,
        )
    if loss < band[0]:
        return Verdict(
            f"loss {loss:.2f} is lower than expected: {expected}; easier text, or a faster schedule"
        )
    if step <= WARM_UP_STEPS:
        return Verdict(f"loss {loss:.2f}: flat until about step {WARM_UP_STEPS} is normal during warm-up")
    return Verdict(f"loss {loss:.2f} is as expected: {expected}")


def render_text(history: History) -> str:
    """One line about the loss; empty for a run of another kind."""
    reference = reference_for(history)
    return "" if reference is None else judge(history, reference).text


def render_html(history: History, width: int = 550) -> str:
    """The curve over the published band, ``width`` pixels, and what to think of it; empty for a run of another kind."""
    reference = reference_for(history)
    if reference is None:
        return ""
    verdict = judge(history, reference)
    kind, mark = ("warn", "⚠ ") if verdict.warning else ("soft", "")
    return f'{render_svg(history, reference, width=width)}<p class="{kind}">{mark}{html.escape(verdict.text)}</p>'


def render_svg(
    history: History,
    reference: Reference | None = None,
    *,
    spread: Sequence[tuple[float, float, float]] = (),
    limit: History = (),
    label: str = "loss",
    from_zero: bool = False,
    width: int = 550,
    height: int = 170,
) -> str:
    """A curve over the steps as inline SVG; empty while there are less than two points.

    Args:
        history: the curve.
        reference: a published run whose band lies under it.
        spread: step, low and high of the middle half of the peers, drawn as a shade.
        limit: a curve that this one should stay below, dashed.
        label: what the curve shows.
        from_zero: let the axis begin at 0.
        width, height: pixels.
    """
    points = _finite(history)
    if len(points) < 2:
        return ""
    points = _thinned(points)
    first, last = points[0][0], max(points[-1][0], points[0][0] + 1)
    band = _band(reference, first, last)
    shade = [one for one in _thinned(spread) if max(map(abs, one[1:])) < MAX_LOSS]
    above = _thinned(_finite(limit))
    losses = [loss for _, loss in (*points, *above)] + [edge for _, *edges in band for edge in edges]
    low, high = min([*losses, 0.0] if from_zero else losses), max(losses)
    plot = _Plot(first, last, low, max(high, low + 1e-3 * (1 + abs(low))), width, height)
    under = _area(plot, band, BAND, 0.22, reference.name if reference else "") + _area(plot, shade, LINE, 0.2)
    line = " ".join(plot.place(step, loss) for step, loss in points)
    edge = " ".join(plot.place(step, loss) for step, loss in above)
    dashed = (
        f'<polyline points="{edge}" fill="none" stroke="currentColor" stroke-dasharray="5 4"/>'
        if edge
        else ""
    )
    return (
        f'<svg viewBox="0 0 {width} {height}" style="max-width:{width}px;width:100%" role="img" '
        f'aria-label="{label} over steps" fill="currentColor" font-size="11" font-family="sans-serif">'
        f"{plot.axes()}{under}{dashed}"
        f'<polyline points="{line}" fill="none" style="stroke:{LINE}" stroke-width="2" stroke-linejoin="round">'
        f"<title>{label} {points[-1][1]:.4g} at step {points[-1][0]:,.0f}</title></polyline></svg>"
    )


@dataclass(frozen=True)
class _Plot:
    """Where steps and losses lie in a picture."""

    first: float
    last: float
    low: float
    high: float
    width: int
    height: int

    def x(self, step: float) -> float:
        return LEFT + (self.width - LEFT - RIGHT) * (step - self.first) / (self.last - self.first)

    def y(self, loss: float) -> float:
        inside = min(max(loss, self.low), self.high)
        return TOP + (self.height - TOP - BOTTOM) * (self.high - inside) / (self.high - self.low)

    def place(self, step: float, loss: float) -> str:
        return f"{self.x(step):.1f},{self.y(loss):.1f}"

    def axes(self) -> str:
        lines = []
        for loss in ticks(self.low, self.high, 5):
            y = self.y(loss)
            lines.append(
                f'<path d="M{LEFT} {y:.1f}H{self.width - RIGHT}" stroke="currentColor" stroke-opacity=".15"/>'
                f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{loss:g}</text>'
            )
        for step in ticks(self.first, self.last, 5):
            if step == int(step):
                lines.append(
                    f'<text x="{self.x(step):.1f}" y="{self.height - 6}" text-anchor="middle">{step:,.0f}</text>'
                )
        return "".join(lines)


def ticks(low: float, high: float, count: int) -> list[float]:
    """About ``count`` round numbers between two."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
    return [round(step * i, 10) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _band(reference: Reference | None, first: float, last: float) -> list[tuple[float, float, float]]:
    if reference is None:
        return []
    steps = [first + (last - first) * i / 60 for i in range(61)]
    found = [(step, reference.band(step)) for step in steps]
    return [(step, *band) for step, band in found if band is not None]


def _area(
    plot: _Plot, edges: Sequence[tuple[float, float, float]], colour: str, opacity: float, label: str = ""
) -> str:
    if len(edges) < 2:
        return ""
    around = [plot.place(step, high) for step, _, high in edges]
    around += [plot.place(step, low) for step, low, _ in reversed(edges)]
    title = f"<title>{html.escape(label)}, published</title>" if label else ""
    return (
        f'<polygon points="{" ".join(around)}" style="fill:{colour};fill-opacity:{opacity}">{title}</polygon>'
    )


def _thinned(points: Sequence[T]) -> list[T]:
    return [*points[:: math.ceil(len(points) / MAX_POINTS)], points[-1]] if points else []


def _finite(history: History) -> list[tuple[float, float]]:
    return [(step, loss) for step, loss in history if abs(loss) < MAX_LOSS]
