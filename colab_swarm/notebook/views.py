"""A `SwarmSnapshot` as text and as HTML: the first page of a swarm's panel. Pure functions.

Everything from peers is escaped and bounded.
"""

from __future__ import annotations

import math

from colab_swarm.markup import aligned, count, milliseconds, plain, size, text
from colab_swarm.notebook import svg, theme
from colab_swarm.snapshot import ContributionRow, PeerRow, SessionTime, SwarmSnapshot

MAX_ROWS = 20
MAX_CONTRIBUTIONS = 8
MAX_NAME_CHARS = 40
LOSS_WIDTH = 420
COLUMNS = ("peer", "id", "role", "step", "samples/s", "RTT", "link", "reachable")
SOON_S = 1800.0  # the view warns this long before a session's end
PAUSED = "Paused: your work has stopped and the others continue. Press Resume, or call swarm.unpause()."
CONTRIBUTIONS = "contributions, as seen by the other peers"


def summary(snapshot: SwarmSnapshot) -> str:
    """Return the state of the swarm in one line."""
    parts = [_state(snapshot)]
    if snapshot.target_batch_size > 0:
        parts += [_speed(snapshot), f"{_collected(snapshot)} samples for the next step"]
        if losses := _finite_losses(snapshot):
            parts.append(f"loss {losses[-1]:.3f} (first {losses[0]:.3f})")
    return ", ".join(parts)


def render_text(snapshot: SwarmSnapshot) -> str:
    """Draw the swarm as aligned lines, for terminals and for outputs without HTML."""
    lines = [
        _me(snapshot),
        summary(snapshot),
        f"‖ {PAUSED}" if snapshot.paused else "",
        _session(snapshot.session) if snapshot.session else "",
        f"next step: {_next_step(snapshot)}" if snapshot.target_batch_size > 0 else "",
        "; ".join(" ".join((name, *figure)).rstrip() for name, figure in _figures(snapshot).items()),
        *aligned([COLUMNS, *map(_cells, snapshot.peers[:MAX_ROWS])]),
        *_more(snapshot),
        f"{CONTRIBUTIONS}:" if snapshot.leaderboard else "",
        *(f"  {_contribution(row)}" for row in snapshot.leaderboard[:MAX_CONTRIBUTIONS]),
    ]
    return "\n".join([*filter(None, lines), *(f"  {plain(line)}" for line in snapshot.log)])


def render_html(snapshot: SwarmSnapshot) -> str:
    """Draw the swarm as one ``div``: figures, progress to the next step, loss, peers, contributions and log."""
    paused = f'<p class="warn">‖ {PAUSED}</p>' if snapshot.paused else ""
    figures = {name: theme.figure(*map(text, figure)) for name, figure in _figures(snapshot).items()}
    lines = "<br>".join(map(text, snapshot.log))
    boxes = ((_loss(snapshot), LOSS_WIDTH), (_contributions(snapshot), 260))
    beside = "".join(
        f'<div style="flex:1 1 {width}px;min-width:0">{box}</div>' for box, width in boxes if box
    )
    return theme.wrap(
        theme.heading(text(_state(snapshot)), text(_me(snapshot)))
        + paused
        + (_html_session(snapshot.session) if snapshot.session else "")
        + theme.cards(figures)
        + _progress(snapshot)
        + f'<div class="row" style="gap:0 24px">{beside}</div>'
        + _peers(snapshot)
        + (f'<h4>log</h4><p class="soft">{lines}</p>' if lines else ""),
        f"swarm {plain(snapshot.run)}",
    )


def _name(name: str) -> str:
    return plain(name, MAX_NAME_CHARS)


def _state(snapshot: SwarmSnapshot) -> str:
    state = f"{_name(snapshot.run)}: {_name(snapshot.state)}"
    if snapshot.target_batch_size > 0:
        return f"{state}, step {snapshot.step}"
    return f"{state}, {count(len(snapshot.peers), 'peer')}"


def _me(snapshot: SwarmSnapshot) -> str:
    return f"{_name(snapshot.me)}: {plain(snapshot.reached, 100)}, connected for {_clock(snapshot.uptime_s)}"


def _speed(snapshot: SwarmSnapshot) -> str:
    trainers = sum(peer.samples_per_s > 0 for peer in snapshot.peers)
    return f"{snapshot.samples_per_s:,.1f} samples/s from {trainers} of {count(len(snapshot.peers), 'peer')}"


def _collected(snapshot: SwarmSnapshot) -> str:
    return f"{snapshot.accumulated:,.0f} of {snapshot.target_batch_size:,.0f}"


def _next_step(snapshot: SwarmSnapshot) -> str:
    if snapshot.eta_s is None or not math.isfinite(snapshot.eta_s):
        return f"{_collected(snapshot)} samples; no peer is training"
    when = f"in about {_clock(snapshot.eta_s)}" if snapshot.eta_s >= 1 else "any moment"
    return f"{_collected(snapshot)} samples; step {snapshot.step + 1} {when}"


def _figures(snapshot: SwarmSnapshot) -> dict[str, tuple[str, str]]:
    """Return value and unit by name."""
    figures = {}
    if snapshot.target_batch_size > 0:
        value, _, unit = _speed(snapshot).partition(" ")
        figures = {"all peers": (value, unit), "me": (f"{snapshot.own_samples_per_s:,.1f}", "samples/s")}
        if snapshot.last_share is not None:
            figures["my share"] = (f"{snapshot.last_share:.0%}", "of the last step's samples")
    figures["sent"] = (size(snapshot.sent_bytes), f"now {size(snapshot.sent_bps / 8)}/s")
    figures["received"] = (size(snapshot.received_bytes), f"now {size(snapshot.received_bps / 8)}/s")
    return figures


def _clock(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(max(int(seconds), 0), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def _session(session: SessionTime) -> str:
    words = f"session: {plain(session.platform)}, {_clock(session.elapsed_s)} of {_clock(session.limit_s)}"
    return words if session.leaves_s is None else f"{words}; leaves at {_clock(session.leaves_s)}"


def _html_session(session: SessionTime) -> str:
    ends_s = session.limit_s if session.leaves_s is None else session.leaves_s
    soon = session.elapsed_s > ends_s - SOON_S
    part = session.elapsed_s / session.limit_s if session.limit_s > 0 else 1.0
    words = text(_session(session))
    hue, kind, mark = ("amber", "warn", "⚠ ") if soon else ("soft", "soft", "")
    return f'<p class="{kind}">{mark}{words}</p>{theme.bar(part, words, hue)}'


def _progress(snapshot: SwarmSnapshot) -> str:
    if snapshot.target_batch_size <= 0:
        return ""
    words = _next_step(snapshot)
    bar = theme.bar(snapshot.accumulated / snapshot.target_batch_size, words)
    return f"<h4>next step</h4>{bar}<p>{words}</p>"


def _finite_losses(snapshot: SwarmSnapshot) -> list[float]:
    return [loss for _, loss in snapshot.loss_history if math.isfinite(loss)]


def _loss(snapshot: SwarmSnapshot) -> str:
    drawn, losses = svg.curve(snapshot.loss_history, width=LOSS_WIDTH), _finite_losses(snapshot)
    return f"<h4>loss of my batches: {losses[-1]:.3f} (first {losses[0]:.3f})</h4>{drawn}" if drawn else ""


def _cells(peer: PeerRow) -> tuple[str, ...]:
    return (
        _name(peer.name) + (" (me)" if peer.me else ""),
        _name(peer.id),
        _name(peer.role),
        str(peer.step),
        f"{peer.samples_per_s:,.1f}",
        milliseconds(peer.rtt_s),
        _name(peer.connected),
        {True: "yes", False: "outgoing only", None: ""}[peer.reachable],
    )


def _more(snapshot: SwarmSnapshot) -> list[str]:
    hidden = len(snapshot.peers) - MAX_ROWS
    return [f"  … and {hidden} more peers"] if hidden > 0 else []


def _peers(snapshot: SwarmSnapshot) -> str:
    rows = []
    for peer in snapshot.peers[:MAX_ROWS]:
        first, *rest = map(text, _cells(peer))
        rows.append((f"<b>{first}</b>" if peer.me else first, *rest))
    more = "".join(f'<p class="soft">{line}</p>' for line in _more(snapshot))
    return f"<h4>peers</h4>{theme.table(COLUMNS, rows, numbers=(3, 4, 5), label='peers')}{more}"


def _contribution(row: ContributionRow) -> str:
    me = " (me)" if row.me else ""
    return f"{_name(row.name)}{me}: {row.samples:,.0f} samples, {size(row.reduced_bytes)} averaged for others"


def _contributions(snapshot: SwarmSnapshot) -> str:
    if not snapshot.leaderboard:
        return ""
    rows = [
        (
            text(_name(row.name)) + (" (me)" if row.me else ""),
            f"{row.samples:,.0f}",
            size(row.reduced_bytes),
        )
        for row in snapshot.leaderboard[:MAX_CONTRIBUTIONS]
    ]
    table = theme.table(("peer", "samples", "averaged"), rows, numbers=(1, 2), label="leaderboard")
    return f"<h4>{CONTRIBUTIONS}</h4>{table}"
