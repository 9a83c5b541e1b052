"""The experts panel: an `ExpertsSnapshot` as text and as static HTML. Pure functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from colab_swarm.markup import aligned, count, plain, text
from colab_swarm.moe.watch import ExpertsListing, ExpertsSnapshot, HostOfExperts, LiveExpert, ServedExpert
from colab_swarm.notebook import theme
from colab_swarm.notebook.panel import Panel, Views

MAX_ROWS = 20
MAX_NAMED = 5
EXPERTS = ("expert", "state", "host", "step", "of the updates")
HOSTS = ("host", "experts", "of the updates", "round trip")
SERVED = ("my expert", "step", "waiting", "batch", "calls/s", "samples/s", "latency, p50 / p99")


def summary(snapshot: ExpertsSnapshot) -> str:
    """Return the state of the grid in one line."""
    listing, grid = snapshot.listing, snapshot.listing.grid
    if snapshot.listed_s is None:
        return f"{grid}: looking up the experts"
    hosts = count(len(listing.hosts), "host")
    parts = [f"{len(listing.live):,} of {count(grid.size, 'place')} live on {hosts}"]
    others = {"left out": listing.left_out, "dead": listing.dead}
    parts += [f"{len(uids):,} {what}" for what, uids in others.items() if uids]
    if snapshot.served:
        samples = sum(expert.samples_per_s for expert in snapshot.served)
        parts.append(f"{len(snapshot.served):,} here, {samples:,.0f} samples/s")
    return f"{grid}: {', '.join(parts)}" + ("; left" if snapshot.over else "")


def _warnings(snapshot: ExpertsSnapshot) -> list[str]:
    listing, found = snapshot.listing, []
    if snapshot.fault:
        found.append(f"the last lookup failed and is retried: {plain(snapshot.fault)}")
    if snapshot.listed_s is not None and not listing.live and not snapshot.over:
        found.append(
            "no expert is alive: host some with swarm.host_experts(…), or compare prefix and grid with the hosts'"
        )
    if listing.left_out:
        names = ", ".join(listing.left_out[:MAX_NAMED]) + " …" * (len(listing.left_out) > MAX_NAMED)
        found.append(f"not called for a while because they failed this peer: {names}")
    return found


def render_text(snapshot: ExpertsSnapshot) -> str:
    """Draw the experts as lines: the grid, its hosts, this peer's experts."""
    listing = snapshot.listing
    tables = (
        (EXPERTS, _experts(listing)),
        (HOSTS, list(map(_host, listing.hosts[:MAX_ROWS]))),
        (SERVED, list(map(_served, snapshot.served[:MAX_ROWS]))),
    )
    lines = [summary(snapshot), *(f"  ! {warning}" for warning in _warnings(snapshot))]
    for columns, rows in tables:
        lines += aligned([columns, *rows]) if rows else []
    return "\n".join([*lines, *(f"  {line}" for line in _hidden(snapshot))])


def render_html(snapshot: ExpertsSnapshot) -> str:
    """Draw the experts as one ``div``: the grid with a bar for each use, its hosts, this peer's experts."""
    listing = snapshot.listing
    name, _, state = summary(snapshot).partition(": ")
    warnings = "".join(f'<p class="warn">{text(warning)}</p>' for warning in _warnings(snapshot))
    shares = {expert.uid: expert.share for expert in listing.live}
    experts = []
    for uid, state_of, host, step, share in _experts(listing):
        bar = theme.bar(shares.get(uid) or 0.0, f"{share} of the updates")
        experts.append((text(uid), state_of, host, step, share + bar if share else ""))
    tables = [theme.table(EXPERTS, experts, numbers=(3,), label="experts")] if experts else []
    if listing.hosts:
        rows = map(_host, listing.hosts[:MAX_ROWS])
        tables.append(theme.table(HOSTS, rows, numbers=(1, 2, 3), label="hosts"))
    if snapshot.served:
        served = map(_served, snapshot.served[:MAX_ROWS])
        tables.append(theme.table(SERVED, served, numbers=range(1, 7), label="my experts"))
    more = "".join(f'<p class="soft">{line}</p>' for line in _hidden(snapshot))
    head = theme.heading(text(name), text(state))
    return theme.wrap(f"{head}{warnings}{''.join(tables)}{more}", f"experts of {listing.grid}")


def _experts(listing: ExpertsListing) -> list[tuple[str, ...]]:
    """Return the rows of the grid: experts that failed first, then the most used ones."""
    failed: list[tuple[str, ...]] = [(uid, "! left out", "", "", "") for uid in listing.left_out]
    failed += [(uid, "x dead", "", "", "") for uid in listing.dead]
    used = sorted(listing.live, key=_use, reverse=True)
    live = [
        (expert.uid, "live", _me(expert.host, expert.mine), f"{expert.step:,}", _percent(expert.share))
        for expert in used[:MAX_ROWS]
    ]
    return [*failed, *live][:MAX_ROWS]


def _use(expert: LiveExpert) -> float:
    return expert.share or 0.0


def _host(row: HostOfExperts) -> tuple[str, ...]:
    rtt = "–" if row.rtt_s is None or row.mine else _ms(row.rtt_s)
    return _me(row.host, row.mine), f"{row.experts:,}", _percent(row.share), rtt


def _served(row: ServedExpert) -> tuple[str, ...]:
    latency = "–" if row.p50_s is None or row.p99_s is None else f"{_ms(row.p50_s)} / {_ms(row.p99_s)}"
    batch = "–" if row.batch_size is None else f"{row.batch_size:,.0f}"
    rates = (f"{row.calls_per_s:,.1f}", f"{row.samples_per_s:,.0f}")
    return (row.uid, f"{row.step:,}", f"{row.queued:,}", batch, *rates, latency)


def _me(host: str, mine: bool) -> str:
    return f"{host} (me)" if mine else host


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.1f} ms"


def _hidden(snapshot: ExpertsSnapshot) -> list[str]:
    listing = snapshot.listing
    rows = {
        "experts": len(listing.live) + len(listing.left_out) + len(listing.dead),
        "hosts": len(listing.hosts),
        "experts here": len(snapshot.served),
    }
    return [f"and {number - MAX_ROWS:,} more {what}" for what, number in rows.items() if number > MAX_ROWS]


VIEWS: Views[ExpertsSnapshot] = Views(render_html, render_text, summary, lambda snapshot: snapshot.over)
HOST_VIEWS = replace(VIEWS, who="host", leave=("Stop hosting", "Stopped"))


def show_experts(
    read: Callable[[], ExpertsSnapshot], stop: Callable[[], None], hosting: bool
) -> Panel[ExpertsSnapshot]:
    """Return a panel of experts; its button calls ``stop``: stop hosting, or leave the swarm."""
    return Panel(read, stop, views=HOST_VIEWS if hosting else VIEWS)
