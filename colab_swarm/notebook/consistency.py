"""The consistency meter: how far an elastic group's member is off, beside the bound. Pure functions of a snapshot."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from colab_swarm.elastic.settings import ElasticSnapshot
from colab_swarm.notebook import squares, svg, theme
from colab_swarm.notebook.panel import Panel, Views

if TYPE_CHECKING:
    from colab_swarm.elastic.optimizer import ElasticOptimizer

WIDTH = 760
RECENT = 20
"""Steps that the figures of waiting and missing are means of."""


def summary(snapshot: ElasticSnapshot) -> str:
    """In one line."""
    if not snapshot.steps:
        return f"{snapshot.scheduler}: no step yet, {snapshot.members} members"
    last = snapshot.steps[-1]
    lost = f", {len(last.lost)} lost" if last.lost else ""
    return (
        f"{snapshot.scheduler}: step {last.step:,}, {snapshot.members} members{lost}; inconsistency "
        + ", ".join(f"{value} {words}" for words, value in figures(snapshot).items())
        + ("; left" if snapshot.left else "")
    )


def figures(snapshot: ElasticSnapshot) -> dict[str, str]:
    """What is told in numbers, by its name."""
    last, recent = snapshot.steps[-1], snapshot.steps[-RECENT:]
    waited_ms = 1000 * sum(step.waited_s for step in recent) / len(recent)
    missing = sum(step.missing for step in recent) / len(recent)
    return {
        "measured": f"{last.inconsistency:.3g}",
        "allowed": "unknown" if last.bound is None else f"{last.bound:.3g}",
        "waited": f"{waited_ms:.0f} ms",
        "not there by then": f"{missing:.0%}",
    }


def verdict(snapshot: ElasticSnapshot) -> str:
    """What to do, if something is wrong; else empty."""
    if not snapshot.passed:
        return ""
    return (
        "The peers are further apart than the theory of this scheduler allows: a larger beta, a shorter timeout or "
        "less compression brings them together."
    )


def render_text(snapshot: ElasticSnapshot) -> str:
    """As lines."""
    said = verdict(snapshot)
    return summary(snapshot) + (f"\n! {said}" if said else "")


def render_html(snapshot: ElasticSnapshot) -> str:
    """As one ``div``: figures, the measured inconsistency over the steps under its bound, and a warning if due."""
    measured = [(float(step.step), step.inconsistency) for step in snapshot.steps]
    bounds = [(float(step.step), step.bound) for step in snapshot.steps if step.bound is not None]
    chart = svg.curve(measured, limit=bounds, label="inconsistency", from_zero=True, width=WIDTH)
    said = verdict(snapshot)
    warning = f'<p class="warn">⚠ {html.escape(said)}</p>' if said else ""
    name, _, told = summary(snapshot).partition(": ")
    return theme.wrap(
        theme.heading(html.escape(name), html.escape(told.partition("; ")[0]))
        + (theme.cards(figures(snapshot)) if snapshot.steps else "")
        + (f"{chart}{_key(with_bound=bool(bounds))}" if chart else "")
        + warning,
        "how far this member is off its group",
    )


def _key(*, with_bound: bool) -> str:
    measured = squares.path("M0 7h14", f'fill="none" style="stroke:{svg.LINE}" stroke-width="2"')
    bound = squares.path("M0 7h5m4 0h5", 'fill="none" stroke="var(--ink)"')
    lines = {"measured: ||x - v|| / learning rate": measured} | (
        {"what theory allows": bound} if with_bound else {}
    )
    return squares.key(lines, after="" if with_bound else "no bound is known for this codec")


def consistency_panel(elastic: ElasticOptimizer) -> Panel[ElasticSnapshot]:
    """Return a live view of an elastic optimizer's inconsistency and its bound."""
    views: Views[ElasticSnapshot] = Views(
        render_html, render_text, summary, lambda snapshot: snapshot.left, stops=True
    )
    return Panel(elastic.snapshot, elastic.close, views=views)
