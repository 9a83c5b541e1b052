"""The experts panel: an `ExpertsSnapshot` as text and as static HTML. Pure functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from colab_swarm.markup import aligned, count, plain, text
from colab_swarm.moe.watch import ExpertsSnapshot, HostOfExperts, ServedExpert
from colab_swarm.notebook import expert_grid, theme
from colab_swarm.notebook.panel import Panel, Views

MAX_ROWS = 20
NAMED = 5
SERVED = ("my expert", "step", "waiting", "batch", "calls/s", "samples/s", "latency, p50 / p99")
HOSTS = ("host", "experts", "of the updates", "round trip")


def summary(snapshot: ExpertsSnapshot) -> str:
    """How the experts are, in one line."""
    listing = snapshot.listing
    grid = listing.grid
    if snapshot.listed_s is None:
        return f"{grid}: asking the swarm for its experts"
    hosts = count(len(listing.hosts), "host")
    parts = [f"{len(listing.live):,} of {count(grid.size, 'place')} live on {hosts}"]
    others = {"left out": listing.left_out, "dead": listing.dead}
    parts += [f"{len(uids):,} {what}" for what, uids in others.items() if uids]
    if snapshot.served:
        samples = sum(expert.samples_per_s for expert in snapshot.served)
        parts.append(f"{len(snapshot.served):,} here, {samples:,.0f} samples/s")
    return f"{grid}: {', '.join(parts)}" + ("; left" if snapshot.over else "")


def notes(snapshot: ExpertsSnapshot) -> list[str]:
    """What the reader had better know; most often nothing."""
    listing, said = snapshot.listing, []
    if snapshot.fault:
        said.append(f"the last look failed and is tried again: {plain(snapshot.fault)}")
    if snapshot.listed_s is not None and not listing.live and not snapshot.over:
        said.append(
            "no expert lives: host some with swarm.host_experts(…), or compare prefix and grid with the hosts'"
        )
    if listing.left_out:
        names = ", ".join(listing.left_out[:NAMED]) + " …" * (len(listing.left_out) > NAMED)
        said.append(f"not called for a while, for they failed this peer: {names}")
    return said


def render_text(snapshot: ExpertsSnapshot) -> str:
    """As lines: the map, hosts, this peer's experts."""
    lines = [summary(snapshot), *(f"  ! {note}" for note in notes(snapshot))]
    lines.append(expert_grid.render_text(snapshot.listing))
    if snapshot.listing.hosts:
        lines += aligned([HOSTS, *map(_host, snapshot.listing.hosts[:MAX_ROWS])])
    if snapshot.served:
        lines += aligned([SERVED, *map(_served, snapshot.served[:MAX_ROWS])])
    return "\n".join([*lines, *(f"  {line}" for line in _more(snapshot))])


def render_html(snapshot: ExpertsSnapshot) -> str:
    """As one ``div``: the map with its key, hosts, this peer's experts."""
    listing = snapshot.listing
    warnings = "".join(f'<p class="warn">{text(note)}</p>' for note in notes(snapshot))
    hosts = theme.table(HOSTS, map(_host, listing.hosts[:MAX_ROWS]), numbers=(1, 2, 3), label="hosts")
    mine = theme.table(
        SERVED, map(_served, snapshot.served[:MAX_ROWS]), numbers=range(1, 7), label="my experts"
    )
    more = "".join(f'<p class="soft">{line}</p>' for line in _more(snapshot))
    name, _, told = summary(snapshot).partition(": ")
    return theme.wrap(
        f"{theme.heading(text(name), text(told))}{warnings}{expert_grid.render_svg(listing)}{expert_grid.key(listing)}"
        + (hosts if listing.hosts else "")
        + (mine if snapshot.served else "")
        + more,
        f"experts of {listing.grid}",
    )


def _host(row: HostOfExperts) -> tuple[str, ...]:
    return (
        f"{row.host} (me)" if row.mine else row.host,
        f"{row.experts:,}",
        "–" if row.share is None else f"{row.share:.0%}",
        "–" if row.rtt_s is None or row.mine else _ms(row.rtt_s),
    )


def _served(row: ServedExpert) -> tuple[str, ...]:
    latency = "–" if row.p50_s is None or row.p99_s is None else f"{_ms(row.p50_s)} / {_ms(row.p99_s)}"
    return (
        row.uid,
        f"{row.step:,}",
        f"{row.queued:,}",
        "–" if row.batch_size is None else f"{row.batch_size:,.0f}",
        f"{row.calls_per_s:,.1f}",
        f"{row.samples_per_s:,.0f}",
        latency,
    )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.1f} ms"


def _more(snapshot: ExpertsSnapshot) -> list[str]:
    hidden = {
        "hosts": len(snapshot.listing.hosts) - MAX_ROWS,
        "experts here": len(snapshot.served) - MAX_ROWS,
    }
    return [f"and {number:,} more {what}" for what, number in hidden.items() if number > 0]


VIEWS: Views[ExpertsSnapshot] = Views(render_html, render_text, summary, lambda snapshot: snapshot.over)
HOST_VIEWS = replace(VIEWS, who="host", leave=("Stop hosting", "Stopped"))


def show_experts(
    read: Callable[[], ExpertsSnapshot], stop: Callable[[], None], hosting: bool
) -> Panel[ExpertsSnapshot]:
    """Return a panel of experts; its button calls ``stop``: stop hosting, or leave the swarm."""
    return Panel(read, stop, views=HOST_VIEWS if hosting else VIEWS)
