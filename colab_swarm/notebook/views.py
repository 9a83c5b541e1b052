"""A `SwarmSnapshot` as text and as HTML: the first page of a swarm's panel. Pure functions.

What peers tell is escaped and bounded.
"""

from __future__ import annotations

import math

from colab_swarm.markup import count, plain, size, text
from colab_swarm.notebook import svg, swarm_map, theme
from colab_swarm.snapshot import ContributionRow, PeerRow, SessionTime, SwarmSnapshot

MAX_ROWS = 20
MAX_GIVERS = 8
MAX_NAME_CHARS = 40
LOSS_WIDTH = 420
MAX_LINE_CHARS = 200
NUMBERS = (3, 4, 5)
COLUMNS = ("peer", "id", "role", "step", "samples/s", "RTT", "link", "reachable")
SOON_S = 1800.0
"""A session's end is marked from here on."""
PAUSED = (
    "Paused: your work stands still and others go on without you. Resume, or swarm.unpause(), lets it go on."
)


def summary(snapshot: SwarmSnapshot) -> str:
    """The state of the swarm in one line."""
    parts = [_state(snapshot)]
    if snapshot.target_batch_size > 0:
        parts += [f"{_speed(snapshot)}", f"{_collected(snapshot)} samples for the next step"]
        if losses := _finite_losses(snapshot):
            parts.append(f"loss {losses[-1]:.3f} (first {losses[0]:.3f})")
    return ", ".join(parts)


def render_text(snapshot: SwarmSnapshot) -> str:
    """The swarm as aligned lines, for terminals and for outputs without HTML."""
    rows = [COLUMNS, *map(_cells, snapshot.peers[:MAX_ROWS])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = (
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    )
    told = [
        _me(snapshot),
        summary(snapshot),
        f"‖ {PAUSED}" if snapshot.paused else "",
        _session(snapshot.session) if snapshot.session else "",
        f"next step: {_next_step(snapshot)}" if snapshot.target_batch_size > 0 else "",
        "; ".join(" ".join((name, *figure)).rstrip() for name, figure in _figures(snapshot).items()),
        *(line.rstrip() for line in table),
        *_more(snapshot),
        "given so far, as others saw it:" if snapshot.leaderboard else "",
        *(f"  {_given(giver)}" for giver in snapshot.leaderboard[:MAX_GIVERS]),
    ]
    return "\n".join([*filter(None, told), *(f"  {plain(line)}" for line in snapshot.log)])


def render_html(snapshot: SwarmSnapshot) -> str:
    """The swarm as one ``div``: figures, progress to the next step, loss, peers, leaderboard and log."""
    paused = f'<p class="warn">‖ {PAUSED}</p>' if snapshot.paused else ""
    session = _html_session(snapshot.session) if snapshot.session else ""
    figures = {name: theme.figure(*map(text, figure)) for name, figure in _figures(snapshot).items()}
    return theme.wrap(
        theme.heading(text(_state(snapshot)), text(_me(snapshot)))
        + paused
        + session
        + theme.cards(figures)
        + _progress(snapshot)
        + _beside(_loss(snapshot), _leaderboard(snapshot))
        + _peers(snapshot)
        + _log(snapshot),
        f"swarm {plain(snapshot.run)}",
    )


def _name(told: str) -> str:
    return plain(told, MAX_NAME_CHARS)


def _state(snapshot: SwarmSnapshot) -> str:
    state = f"{_name(snapshot.run)}: {_name(snapshot.state)}"
    if snapshot.target_batch_size > 0:
        return f"{state}, step {snapshot.step}"
    return f"{state}, {count(len(snapshot.peers), 'peer')}"


def _me(snapshot: SwarmSnapshot) -> str:
    return f"{_name(snapshot.me)}: {plain(snapshot.reached, 100)}, up {_clock(snapshot.uptime_s)}"


def _speed(snapshot: SwarmSnapshot) -> str:
    trainers = sum(peer.samples_per_s > 0 for peer in snapshot.peers)
    return f"{snapshot.samples_per_s:,.1f} samples/s from {trainers} of {count(len(snapshot.peers), 'peer')}"


def _collected(snapshot: SwarmSnapshot) -> str:
    return f"{snapshot.accumulated:,.0f} of {snapshot.target_batch_size:,.0f}"


def _next_step(snapshot: SwarmSnapshot) -> str:
    if snapshot.eta_s is None or not math.isfinite(snapshot.eta_s):
        return f"{_collected(snapshot)} samples; nobody trains now"
    when = f"in about {_clock(snapshot.eta_s)}" if snapshot.eta_s >= 1 else "any moment"
    return f"{_collected(snapshot)} samples; step {snapshot.step + 1} {when}"


def _figures(snapshot: SwarmSnapshot) -> dict[str, tuple[str, str]]:
    """What both the text and the HTML tell: value and unit by name."""
    figures = {}
    if snapshot.target_batch_size > 0:
        trainers, peers = sum(peer.samples_per_s > 0 for peer in snapshot.peers), len(snapshot.peers)
        figures = {
            "all peers": (
                f"{snapshot.samples_per_s:,.1f}",
                f"samples/s from {trainers} of {count(peers, 'peer')}",
            ),
            "me": (f"{snapshot.own_samples_per_s:,.1f}", "samples/s"),
        }
        if snapshot.last_share is not None:
            figures["my share"] = (f"{snapshot.last_share:.0%}", "of the last step's samples")
    figures["sent"] = (size(snapshot.sent_bytes), f"now {swarm_map.bits_per_s(snapshot.sent_bps)}")
    figures["received"] = (
        size(snapshot.received_bytes),
        f"now {swarm_map.bits_per_s(snapshot.received_bps)}",
    )
    return figures


def _clock(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(max(int(seconds), 0), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def _session(session: SessionTime) -> str:
    told = f"session: {plain(session.platform)}, {_clock(session.elapsed_s)} of {_clock(session.limit_s)}"
    return told if session.leaves_s is None else f"{told}; leaves at {_clock(session.leaves_s)}"


def _html_session(session: SessionTime) -> str:
    ends_s = session.limit_s if session.leaves_s is None else session.leaves_s
    soon = session.elapsed_s > ends_s - SOON_S
    part = session.elapsed_s / session.limit_s if session.limit_s > 0 else 1.0
    told = text(_session(session))
    hue, kind, mark = ("amber", "warn", "⚠ ") if soon else ("soft", "soft", "")
    return f'<p class="{kind}">{mark}{told}</p>{theme.bar(part, told, hue)}'


def _progress(snapshot: SwarmSnapshot) -> str:
    if snapshot.target_batch_size <= 0:
        return ""
    told = _next_step(snapshot)
    return (
        f"<h4>next step</h4>{theme.bar(snapshot.accumulated / snapshot.target_batch_size, told)}<p>{told}</p>"
    )


def _finite_losses(snapshot: SwarmSnapshot) -> list[float]:
    return [loss for _, loss in snapshot.loss_history if math.isfinite(loss)]


def _loss(snapshot: SwarmSnapshot) -> str:
    drawn = svg.curve(snapshot.loss_history, width=LOSS_WIDTH)
    if not drawn:
        return ""
    losses = _finite_losses(snapshot)
    return f"<h4>loss of my batches: {losses[-1]:.3f} (first {losses[0]:.3f})</h4>{drawn}"


def _cells(peer: PeerRow) -> tuple[str, ...]:
    return (
        _name(peer.name) + (" (me)" if peer.me else ""),
        _name(peer.id),
        _name(peer.role),
        str(peer.step),
        f"{peer.samples_per_s:,.1f}",
        swarm_map.milliseconds(peer.rtt_s),
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
    return f"<h4>peers</h4>{theme.table(COLUMNS, rows, numbers=NUMBERS, label='peers')}{more}"


def _given(giver: ContributionRow) -> str:
    me = " (me)" if giver.me else ""
    return f"{_name(giver.name)}{me}: {giver.samples:,.0f} samples, {size(giver.reduced_bytes)} averaged for others"


def _leaderboard(snapshot: SwarmSnapshot) -> str:
    if not snapshot.leaderboard:
        return ""
    rows = [
        (
            text(_name(giver.name)) + (" (me)" if giver.me else ""),
            f"{giver.samples:,.0f}",
            size(giver.reduced_bytes),
        )
        for giver in snapshot.leaderboard[:MAX_GIVERS]
    ]
    columns = ("peer", "samples", "averaged")
    return f"<h4>given so far, as others saw it</h4>{theme.table(columns, rows, numbers=(1, 2), label='leaderboard')}"


def _log(snapshot: SwarmSnapshot) -> str:
    lines = "<br>".join(text(line, MAX_LINE_CHARS) for line in snapshot.log)
    return f'<h4>log</h4><p class="soft">{lines}</p>' if lines else ""


def _beside(left: str, right: str) -> str:
    """Next to each other where there is room."""
    boxes = ((left, LOSS_WIDTH), (right, 260))
    shown = (f'<div style="flex:1 1 {width}px;min-width:0">{box}</div>' for box, width in boxes if box)
    return f'<div class="row" style="gap:0 24px">{"".join(shown)}</div>'
