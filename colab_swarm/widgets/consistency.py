"""The consistency meter: how far an elastic group's member is off, beside the bound. Pure functions of a snapshot."""

from __future__ import annotations

import html

from colab_swarm.elastic.snapshot import ElasticSnapshot
from colab_swarm.widgets.loss_band import render_svg

RECENT = 20
"""Steps that the figures of waiting and missing are means of."""


def summary(snapshot: ElasticSnapshot) -> str:
    """In one line."""
    if not snapshot.steps:
        return f"{snapshot.scheduler}: no step yet, {snapshot.members} members"
    last, recent = snapshot.steps[-1], snapshot.steps[-RECENT:]
    waited_ms = 1000 * sum(step.waited_s for step in recent) / len(recent)
    missing = sum(step.missing for step in recent) / len(recent)
    lost = f", {len(last.lost)} lost" if last.lost else ""
    return (
        f"{snapshot.scheduler}: step {last.step:,}, {snapshot.members} members{lost}; inconsistency "
        f"{last.inconsistency:.3g}{_bound(last.bound)}; waits {waited_ms:.0f} ms, {missing:.0%} not there by then"
        + ("; left" if snapshot.left else "")
    )


def _bound(bound: float | None) -> str:
    return " (no bound known)" if bound is None else f" of {bound:.3g} allowed"


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
    """As one ``div``: the line, the measured inconsistency over the steps under its bound, and a warning if due."""
    measured = [(float(step.step), step.inconsistency) for step in snapshot.steps]
    bounds = [(float(step.step), step.bound) for step in snapshot.steps if step.bound is not None]
    said = verdict(snapshot)
    warning = f"<p>⚠ {html.escape(said)}</p>" if said else ""
    return (
        '<div style="font-family:sans-serif;font-size:13px;line-height:1.5">'
        f"<p><b>{html.escape(summary(snapshot))}</b></p>"
        f"{render_svg(measured, limit=bounds, label='inconsistency', from_zero=True)}"
        f'<p style="opacity:.7">line: measured ||x - v|| / learning rate; dashed: its bound</p>{warning}</div>'
    )
