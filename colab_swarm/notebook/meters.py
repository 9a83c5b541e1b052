"""Panels of the experts of a grid, and of an elastic member's inconsistency. Pure functions."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from colab_swarm.markup import count, milliseconds
from colab_swarm.notebook import theme
from colab_swarm.notebook.panel import Panel, Views

if TYPE_CHECKING:
    from colab_swarm.elastic.steps import ElasticSnapshot
    from colab_swarm.moe.calls import ExpertStatistics
    from colab_swarm.moe.host import ExpertsSnapshot, LiveExpert

_MAX_NAMED = 5
EXPERTS = ("expert", "state", "host", "step", "of the updates")
SERVED = ("my expert", "step", "waiting", "batch", "calls/s", "samples/s", "latency")
RECENT = 20  # steps in the means of waiting and missing


def summarize_experts(snapshot: "ExpertsSnapshot") -> str:
    grid = snapshot.grid
    if not snapshot.listed:
        return f"{grid}: looking up the experts"
    hosts = {expert.host for expert in snapshot.live}
    places = count(grid.size, "place")
    line = f"{grid}: {len(snapshot.live):,} of {places} live on {count(len(hosts), 'host')}"
    if snapshot.left_out:
        line += f", {len(snapshot.left_out):,} left out"
    if snapshot.dead:
        line += f", {len(snapshot.dead):,} dead"
    if snapshot.served:
        samples_per_s = sum(expert.samples_per_s for expert in snapshot.served)
        line += f", {len(snapshot.served):,} here, {samples_per_s:,.0f} samples/s"
    if snapshot.over:
        line += "; left"
    return line


def draw_experts(snapshot: "ExpertsSnapshot") -> theme.Document:
    """Return the grid with a bar for each use, and this peer's experts."""
    title, state = summarize_experts(snapshot).split(": ", 1)
    document = theme.Document(title, state, label=f"experts of {snapshot.grid}")
    if snapshot.fault:
        document.warn(f"the last lookup failed and is retried: {snapshot.fault}")
    none_lives = snapshot.listed and not snapshot.live
    if none_lives and not snapshot.over:
        document.warn("no expert lives: host some with swarm.experts.host(…) or check prefix and grid")
    if snapshot.left_out:
        names = ", ".join(snapshot.left_out[:_MAX_NAMED])
        if len(snapshot.left_out) > _MAX_NAMED:
            names += " …"
        document.warn(f"not called for a while because they failed this peer: {names}")
    rows = [_failed_cells(uid, "! left out") for uid in snapshot.left_out]
    rows += [_failed_cells(uid, "x dead") for uid in snapshot.dead]
    most_used_first = sorted(snapshot.live, key=lambda expert: expert.share or 0.0, reverse=True)
    rows += map(_live_cells, most_used_first)
    document.table(EXPERTS, rows, lambda cells: cells, numbers=(3,), what="experts")
    document.table(SERVED, snapshot.served, _served_cells, numbers=range(1, 7), what="experts here")
    return document


def _failed_cells(uid: str, state: str) -> tuple[theme.Cell, ...]:
    return uid, state, "", "", ""


def _live_cells(expert: "LiveExpert") -> tuple[theme.Cell, ...]:
    share = "–"
    if expert.share is not None:
        share = f"{expert.share:.0%}"
    bar = theme.bar(expert.share or 0.0, f"{share} of the updates")
    host = expert.host
    if expert.mine:
        host += " (me)"
    return expert.uid, "live", host, f"{expert.step:,}", (share, share + bar)


def _served_cells(expert: "ExpertStatistics") -> tuple[str, ...]:
    batch = "–"
    if expert.batch_size is not None:
        batch = f"{expert.batch_size:,.0f}"
    return (
        expert.uid,
        f"{expert.step:,}",
        f"{expert.queued:,}",
        batch,
        f"{expert.calls_per_s:,.1f}",
        f"{expert.samples_per_s:,.0f}",
        milliseconds(expert.latency_s) or "–",
    )


_EXPERTS_VIEWS: "Views[ExpertsSnapshot]" = Views(
    draw_experts, summarize_experts, lambda snapshot: snapshot.over
)


def show_experts(
    read: "Callable[[], ExpertsSnapshot]", stop: Callable[[], None], hosting: bool
) -> "Panel[ExpertsSnapshot]":
    """Return a panel of experts; its button calls ``stop``: stop hosting, or leave the swarm."""
    views = _EXPERTS_VIEWS
    if hosting:
        views = replace(views, who="host", leave=("Stop hosting", "Stopped"))
    return Panel(read, stop, views=views)


def summarize_elastic(snapshot: "ElasticSnapshot") -> str:
    if not snapshot.steps:
        return f"{snapshot.scheduler}: no step yet, {snapshot.members} members"
    last = snapshot.steps[-1]
    line = f"{snapshot.scheduler}: step {last.step:,}, {snapshot.members} members"
    if last.lost:
        line += f", {len(last.lost)} lost"
    values = [f"{value} {words}" for words, value in _figures(snapshot).items()]
    line += f"; inconsistency {', '.join(values)}"
    if snapshot.left:
        line += "; left"
    return line


def _figures(snapshot: "ElasticSnapshot") -> dict[str, str]:
    last = snapshot.steps[-1]
    recent = snapshot.steps[-RECENT:]
    waited_s = sum(step.waited_s for step in recent)
    missing = sum(step.missing for step in recent)
    return {
        "measured": f"{last.inconsistency:.3g}",
        "allowed": "unknown" if last.bound is None else f"{last.bound:.3g}",
        "waited": f"{1000 * waited_s / len(recent):.0f} ms",
        "missing by then": f"{missing / len(recent):.0%}",
    }


def draw_elastic(snapshot: "ElasticSnapshot") -> theme.Document:
    """Return the meter: figures, the measured inconsistency under its bound, a warning."""
    title, state = summarize_elastic(snapshot).split(": ", 1)
    document = theme.Document(title, state, label="inconsistency of this member")
    if not snapshot.steps:
        return document
    document.figures(_figures(snapshot))
    measured = [(step.step, step.inconsistency) for step in snapshot.steps]
    bounds = [(step.step, step.bound) for step in snapshot.steps if step.bound is not None]
    chart = theme.curve(measured, limit=bounds, label="inconsistency", from_zero=True, width=760)
    if chart:
        document.draw(chart)
        bound = "no bound is known for this codec"
        if bounds:
            bound = "dashed: bound in theory"
        document.note(f"solid: measured, ||x - v|| / learning rate; {bound}")
    if snapshot.steps[-1].passed:
        far = "The peers are further apart than the bound of this scheduler allows"
        document.warn(f"{far}: increase beta, or use a shorter timeout or less compression.")
    return document


ELASTIC_VIEWS: "Views[ElasticSnapshot]" = Views(
    draw_elastic, summarize_elastic, lambda snapshot: snapshot.left, stops=True
)
