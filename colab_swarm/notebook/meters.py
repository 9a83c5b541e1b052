"""Draw the panels of a grid's experts, and of an elastic member's inconsistency. Pure functions."""

from typing import TYPE_CHECKING

from colab_swarm.markup import count, milliseconds
from colab_swarm.notebook import theme
from colab_swarm.notebook.panel import Views

if TYPE_CHECKING:
    from colab_swarm.elastic.steps import ElasticSnapshot
    from colab_swarm.moe.calls import ExpertStatistics
    from colab_swarm.moe.host import ExpertsSnapshot, LiveExpert

_MAX_NAMED = 5
EXPERTS = ("expert", "state", "host", "step", "of the updates")
SERVED = ("my expert", "step", "waiting", "batch", "calls/s", "samples/s", "latency")
RECENT = 20  # steps in the means of waiting and missing


def draw_experts(snapshot: "ExpertsSnapshot") -> theme.Document:
    """Draw the grid, with a bar for the use of each expert, and this peer's experts."""
    hosts = {expert.host for expert in snapshot.live}
    places = count(snapshot.grid.size, "place")
    state = f"{len(snapshot.live):,} of {places} live on {count(len(hosts), 'host')}"
    if snapshot.left_out:
        state += f", {len(snapshot.left_out):,} left out"
    if snapshot.dead:
        state += f", {len(snapshot.dead):,} dead"
    if snapshot.served:
        samples_per_s = sum(expert.samples_per_s for expert in snapshot.served)
        state += f", {len(snapshot.served):,} here, {samples_per_s:,.0f} samples/s"
    if snapshot.over:
        state += "; left"
    if not snapshot.listed:
        state = "looking up the experts"
    document = theme.Document(str(snapshot.grid), state, label=f"experts of {snapshot.grid}")
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
    rows: list[tuple[theme.Cell, ...]] = []
    for state, uids in (("! left out", snapshot.left_out), ("x dead", snapshot.dead)):
        rows += [(uid, state, "", "", "") for uid in uids]
    most_used_first = sorted(snapshot.live, key=lambda expert: expert.share or 0.0, reverse=True)
    rows += map(_live_cells, most_used_first)
    document.table(EXPERTS, rows, lambda cells: cells, numbers=(3,), what="experts")
    document.table(SERVED, snapshot.served, _served_cells, numbers=range(1, 7), what="experts here")
    return document


def _live_cells(expert: "LiveExpert") -> tuple[theme.Cell, ...]:
    share = "–" if expert.share is None else f"{expert.share:.0%}"
    bar = theme.bar(expert.share or 0.0, f"{share} of the updates")
    host = expert.host
    if expert.mine:
        host += " (me)"
    return expert.uid, "live", host, f"{expert.step:,}", (share, share + bar)


def _served_cells(expert: "ExpertStatistics") -> tuple[str, ...]:
    batch = "–" if expert.batch_size is None else f"{expert.batch_size:,.0f}"
    return (
        expert.uid,
        f"{expert.step:,}",
        f"{expert.queued:,}",
        batch,
        f"{expert.calls_per_s:,.1f}",
        f"{expert.samples_per_s:,.0f}",
        milliseconds(expert.latency_s) or "–",
    )


EXPERTS_VIEWS: "Views[ExpertsSnapshot]" = Views(draw_experts)
HOST_VIEWS: "Views[ExpertsSnapshot]" = Views(draw_experts, who="host", leave=("Stop hosting", "Stopped"))


def draw_elastic(snapshot: "ElasticSnapshot") -> theme.Document:
    """Draw the meter: figures, the measured inconsistency with its bound, and a warning if the bound is passed."""
    label = "inconsistency of this member"
    if not snapshot.steps:
        state = f"no step yet, {snapshot.members} members"
        return theme.Document(snapshot.scheduler, state, label=label)
    last = snapshot.steps[-1]
    recent = snapshot.steps[-RECENT:]
    waited_s = sum(step.waited_s for step in recent)
    missing = sum(step.missing for step in recent)
    figures = {
        "measured": f"{last.inconsistency:.3g}",
        "allowed": "unknown" if last.bound is None else f"{last.bound:.3g}",
        "waited": f"{1000 * waited_s / len(recent):.0f} ms",
        "missing by then": f"{missing / len(recent):.0%}",
    }
    state = f"step {last.step:,}, {snapshot.members} members"
    if last.lost:
        state += f", {len(last.lost)} lost"
    values = [f"{value} {words}" for words, value in figures.items()]
    state += f"; inconsistency {', '.join(values)}"
    if snapshot.over:
        state += "; left"
    document = theme.Document(snapshot.scheduler, state, label=label)
    document.figures(figures)
    measured = [(step.step, step.inconsistency) for step in snapshot.steps]
    bounds = [(step.step, step.bound) for step in snapshot.steps if step.bound is not None]
    bound = "dashed: bound in theory" if bounds else "no bound is known for this codec"
    legend = f"solid: measured, ||x - v|| / learning rate; {bound}"
    document.curve(measured, legend=legend, limit=bounds, label="inconsistency")
    if last.passed:
        far = "The peers are further apart than the bound of this scheduler allows"
        document.warn(f"{far}: increase beta, or use a shorter timeout or less compression.")
    return document


ELASTIC_VIEWS: "Views[ElasticSnapshot]" = Views(draw_elastic, stops=True)
