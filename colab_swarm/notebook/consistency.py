"""The consistency meter: how far an elastic member's parameters are from the group's, beside the bound."""

from __future__ import annotations

from typing import TYPE_CHECKING

from colab_swarm.elastic.steps import ElasticSnapshot
from colab_swarm.notebook import theme
from colab_swarm.notebook.panel import Panel, Views
from colab_swarm.notebook.theme import Document

if TYPE_CHECKING:
    from colab_swarm.elastic.optimizer import ElasticOptimizer

WIDTH = 760
RECENT = 20  # steps in the means of waiting and missing
TOO_FAR = (
    "The peers are further apart than the bound of this scheduler allows: increase beta, or use a shorter timeout or "
    "less compression."
)


def summary(snapshot: ElasticSnapshot) -> str:
    """Return the meter in one line."""
    if not snapshot.steps:
        return f"{snapshot.scheduler}: no step yet, {snapshot.members} members"
    last = snapshot.steps[-1]
    lost = f", {len(last.lost)} lost" if last.lost else ""
    values = ", ".join(f"{value} {words}" for words, value in _figures(snapshot).items())
    left = "; left" if snapshot.left else ""
    return f"{snapshot.scheduler}: step {last.step:,}, {snapshot.members} members{lost}; inconsistency {values}{left}"


def _figures(snapshot: ElasticSnapshot) -> dict[str, str]:
    last, recent = snapshot.steps[-1], snapshot.steps[-RECENT:]
    waited_ms = 1000 * sum(step.waited_s for step in recent) / len(recent)
    missing = sum(step.missing for step in recent) / len(recent)
    return {
        "measured": f"{last.inconsistency:.3g}",
        "allowed": "unknown" if last.bound is None else f"{last.bound:.3g}",
        "waited": f"{waited_ms:.0f} ms",
        "missing by then": f"{missing:.0%}",
    }


def draw(snapshot: ElasticSnapshot) -> Document:
    """Return the meter: figures, the measured inconsistency under its bound, a warning."""
    shown = Document(*summary(snapshot).split(": ", 1), label="inconsistency of this member")
    shown.figures(_figures(snapshot) if snapshot.steps else {})
    measured = [(step.step, step.inconsistency) for step in snapshot.steps]
    bounds = [(step.step, step.bound) for step in snapshot.steps if step.bound is not None]
    if chart := theme.curve(measured, limit=bounds, label="inconsistency", from_zero=True, width=WIDTH):
        shown.draw(chart)
        bound = "dashed: bound in theory" if bounds else "no bound is known for this codec"
        shown.note(f"solid: measured, ||x - v|| / learning rate; {bound}")
    shown.warn(TOO_FAR if snapshot.passed else "")
    return shown


def consistency_panel(elastic: ElasticOptimizer) -> Panel[ElasticSnapshot]:
    """Return a live view of an elastic optimizer's inconsistency and its bound."""
    views: Views[ElasticSnapshot] = Views(draw, summary, lambda snapshot: snapshot.left, stops=True)
    return Panel(elastic.snapshot, elastic.close, views=views)
