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

MAX_NAMED = 5
EXPERTS = ("expert", "state", "host", "step", "of the updates")
SERVED = ("my expert", "step", "waiting", "batch", "calls/s", "samples/s", "latency")
RECENT = 20  # steps in the means of waiting and missing


def summarize_experts(snapshot: "ExpertsSnapshot") -> str:
    grid = snapshot.grid
    if not snapshot.listed:
        return f"{grid}: looking up the experts"
    hosts = count(len({expert.host for expert in snapshot.live}), "host")
    parts = [f"{len(snapshot.live):,} of {count(grid.size, 'place')} live on {hosts}"]
    others = {"left out": snapshot.left_out, "dead": snapshot.dead}
    parts += [f"{len(uids):,} {what}" for what, uids in others.items() if uids]
    if snapshot.served:
        samples = sum(expert.samples_per_s for expert in snapshot.served)
        parts.append(f"{len(snapshot.served):,} here, {samples:,.0f} samples/s")
    return f"{grid}: {', '.join(parts)}" + ("; left" if snapshot.over else "")


def draw_experts(snapshot: "ExpertsSnapshot") -> theme.Document:
    """Return the grid with a bar for each use, and this peer's experts."""
    shown = theme.Document(*summarize_experts(snapshot).split(": ", 1), label=f"experts of {snapshot.grid}")
    shown.warn(f"the last lookup failed and is retried: {snapshot.fault}" if snapshot.fault else "")
    if snapshot.listed and not snapshot.live and not snapshot.over:
        shown.warn("no expert lives: host some with swarm.host_experts(…) or check prefix and grid")
    if snapshot.left_out:
        names = ", ".join(snapshot.left_out[:MAX_NAMED]) + " …" * (len(snapshot.left_out) > MAX_NAMED)
        shown.warn(f"not called for a while because they failed this peer: {names}")
    failed = [(uid, "! left out") for uid in snapshot.left_out] + [(uid, "x dead") for uid in snapshot.dead]
    live = sorted(snapshot.live, key=lambda one: one.share or 0.0, reverse=True)
    experts: list[LiveExpert | tuple[str, str]] = [*failed, *live]
    shown.table(EXPERTS, experts, _expert, numbers=(3,), what="experts")
    shown.table(SERVED, snapshot.served, _served, numbers=range(1, 7), what="experts here")
    return shown


def _expert(one: "LiveExpert | tuple[str, str]") -> tuple[theme.Cell, ...]:
    if isinstance(one, tuple):  # without a host
        return (*one, "", "", "")
    share = "–" if one.share is None else f"{one.share:.0%}"
    bar = theme.bar(one.share or 0.0, f"{share} of the updates")
    return one.uid, "live", one.host + " (me)" * one.mine, f"{one.step:,}", (share, share + bar)


def _served(row: "ExpertStatistics") -> tuple[str, ...]:
    latency = milliseconds(row.latency_s) or "–"
    batch = "–" if row.batch_size is None else f"{row.batch_size:,.0f}"
    rates = (f"{row.calls_per_s:,.1f}", f"{row.samples_per_s:,.0f}")
    return (row.uid, f"{row.step:,}", f"{row.queued:,}", batch, *rates, latency)


EXPERTS_VIEWS: "Views[ExpertsSnapshot]" = Views(draw_experts, summarize_experts, lambda one: one.over)


def show_experts(
    read: "Callable[[], ExpertsSnapshot]", stop: Callable[[], None], hosting: bool
) -> "Panel[ExpertsSnapshot]":
    """Return a panel of experts; its button calls ``stop``: stop hosting, or leave the swarm."""
    host_views = replace(EXPERTS_VIEWS, who="host", leave=("Stop hosting", "Stopped"))
    return Panel(read, stop, views=host_views if hosting else EXPERTS_VIEWS)


def summarize_elastic(snapshot: "ElasticSnapshot") -> str:
    if not snapshot.steps:
        return f"{snapshot.scheduler}: no step yet, {snapshot.members} members"
    last = snapshot.steps[-1]
    lost = f", {len(last.lost)} lost" if last.lost else ""
    values = ", ".join(f"{value} {words}" for words, value in _figures(snapshot).items())
    left = "; left" if snapshot.left else ""
    return f"{snapshot.scheduler}: step {last.step:,}, {snapshot.members} members{lost}; inconsistency {values}{left}"


def _figures(snapshot: "ElasticSnapshot") -> dict[str, str]:
    last, recent = snapshot.steps[-1], snapshot.steps[-RECENT:]
    return {
        "measured": f"{last.inconsistency:.3g}",
        "allowed": "unknown" if last.bound is None else f"{last.bound:.3g}",
        "waited": f"{1000 * sum(step.waited_s for step in recent) / len(recent):.0f} ms",
        "missing by then": f"{sum(step.missing for step in recent) / len(recent):.0%}",
    }


def draw_elastic(snapshot: "ElasticSnapshot") -> theme.Document:
    """Return the meter: figures, the measured inconsistency under its bound, a warning."""
    shown = theme.Document(*summarize_elastic(snapshot).split(": ", 1), label="inconsistency of this member")
    shown.figures(_figures(snapshot) if snapshot.steps else {})
    measured = [(step.step, step.inconsistency) for step in snapshot.steps]
    bounds = [(step.step, step.bound) for step in snapshot.steps if step.bound is not None]
    if chart := theme.curve(measured, limit=bounds, label="inconsistency", from_zero=True, width=760):
        shown.draw(chart)
        bound = "dashed: bound in theory" if bounds else "no bound is known for this codec"
        shown.note(f"solid: measured, ||x - v|| / learning rate; {bound}")
    if snapshot.steps and snapshot.steps[-1].passed:
        far = "The peers are further apart than the bound of this scheduler allows"
        shown.warn(f"{far}: increase beta, or use a shorter timeout or less compression.")
    return shown


ELASTIC_VIEWS: "Views[ElasticSnapshot]" = Views(
    draw_elastic, summarize_elastic, lambda snapshot: snapshot.left, stops=True
)
