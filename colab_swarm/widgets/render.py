"""A `SwarmSnapshot` as text and as static HTML. Pure functions; every text from a peer is escaped.

The HTML needs no script, style sheet or font, and takes its colours from the page, light or dark.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from colab_swarm.snapshot import PeerRow, SwarmSnapshot
from colab_swarm.widgets import loss_band

MAX_ROWS = 20
MAX_NAME_CHARS = 40
MAX_POINTS = 200
WIDTH, HEIGHT = 480, 120
CELL = 'style="padding:2px 10px;text-align:left"'
COLUMNS = ("peer", "id", "role", "step", "samples/s", "samples", "reachable")


def summary(snapshot: SwarmSnapshot) -> str:
    """The state of the swarm in one line."""
    trainers = sum(peer.samples_per_s > 0 for peer in snapshot.peers)
    state, count = f"{_plain(snapshot.run)}: {_plain(snapshot.state)}", len(snapshot.peers)
    peers = "1 peer" if count == 1 else f"{count} peers"
    if snapshot.target_batch_size <= 0:
        return f"{state}, {peers}"
    parts = [
        f"{state}, step {snapshot.step}",
        f"{snapshot.samples_per_s:,.1f} samples/s from {trainers} of {peers}",
        f"{snapshot.accumulated:,.0f} of {snapshot.target_batch_size:,.0f} samples for the next step",
    ]
    if losses := _finite(snapshot.loss_history):
        parts.append(f"loss {losses[-1][1]:.3f} (first {losses[0][1]:.3f})")
    return ", ".join(parts)


def render_text(snapshot: SwarmSnapshot) -> str:
    """The swarm as aligned lines, for terminals and for outputs without HTML."""
    rows = [COLUMNS, *map(_cells, snapshot.peers[:MAX_ROWS])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    table = [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    ]
    band = loss_band.render_text(snapshot.loss_history)
    lines = [
        _me(snapshot),
        summary(snapshot),
        *([band] if band else []),
        *(line.rstrip() for line in table),
        *_more(snapshot),
    ]
    return "\n".join(lines + [f"  {_plain(line, 200)}" for line in snapshot.log])


def render_html(snapshot: SwarmSnapshot) -> str:
    """The swarm as one ``div``: summary, progress to the next step, loss curve, peers and log."""
    head = "".join(f"<th {CELL}>{column}</th>" for column in COLUMNS)
    rows = "".join(map(_html_row, snapshot.peers[:MAX_ROWS]))
    more = "".join(f"<p>{html.escape(line)}</p>" for line in _more(snapshot))
    log = "<br>".join(html.escape(_plain(line, 200)) for line in snapshot.log)
    return (
        '<div style="font-family:sans-serif;font-size:13px;line-height:1.4">'
        f"<p>{html.escape(_me(snapshot))}<br><b>{html.escape(summary(snapshot))}</b></p>"
        f"{_progress(snapshot)}{_loss(snapshot.loss_history)}"
        f"<table><tr>{head}</tr>{rows}</table>{more}"
        f'<p style="font-family:monospace;font-size:11px">{log}</p></div>'
    )


def _loss(history: Sequence[tuple[int, float]]) -> str:
    """Beside the published run's where the two begin alike."""
    return loss_band.render_html(history) or render_svg(history)


def render_svg(history: Sequence[tuple[int, float]]) -> str:
    """The loss over the steps as inline SVG; empty while there are less than two finite losses."""
    points = _finite(history)
    if len(points) < 2:
        return ""
    points = [*points[:: math.ceil(len(points) / MAX_POINTS)], points[-1]]
    first, last = points[0][0], points[-1][0]
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)
    path = " ".join(
        f"{WIDTH * (step - first) / (last - first or 1):.1f},{HEIGHT * (high - loss) / (high - low or 1):.1f}"
        for step, loss in points
    )
    return (
        f'<svg width="{WIDTH + 70}" height="{HEIGHT + 30}" viewBox="-5 -10 {WIDTH + 70} {HEIGHT + 30}" '
        'role="img" aria-label="loss over steps" fill="currentColor" font-size="11">'
        f'<polyline points="{path}" fill="none" stroke="#1f77b4" stroke-width="1.5"/>'
        f'<text x="{WIDTH + 5}" y="4">{high:.3g}</text>'
        f'<text x="{WIDTH + 5}" y="{HEIGHT + 4}">{low:.3g}</text>'
        f'<text x="0" y="{HEIGHT + 16}">step {first}</text>'
        f'<text x="{WIDTH}" y="{HEIGHT + 16}" text-anchor="end">step {last}</text></svg>'
    )


def _cells(peer: PeerRow) -> tuple[str, ...]:
    return (
        _plain(peer.name) + (" (me)" if peer.me else ""),
        _plain(peer.id),
        _plain(peer.role),
        str(peer.step),
        f"{peer.samples_per_s:,.1f}",
        f"{peer.samples:,.0f}",
        {True: "yes", False: "outgoing only", None: ""}[peer.reachable],
    )


def _html_row(peer: PeerRow) -> str:
    cells = "".join(f"<td {CELL}>{html.escape(cell)}</td>" for cell in _cells(peer))
    return f"<tr>{cells}</tr>"


def _me(snapshot: SwarmSnapshot) -> str:
    traffic = f"sent {_size(snapshot.sent_bytes)}, received {_size(snapshot.received_bytes)}"
    minutes, seconds = divmod(int(snapshot.uptime_s), 60)
    uptime = f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min {seconds:02} s"
    return f"{_plain(snapshot.me)}: {_plain(snapshot.reached, 100)}, {traffic}, up {uptime}"


def _more(snapshot: SwarmSnapshot) -> list[str]:
    hidden = len(snapshot.peers) - MAX_ROWS
    return [f"  … and {hidden} more peers"] if hidden > 0 else []


def _progress(snapshot: SwarmSnapshot) -> str:
    if snapshot.target_batch_size <= 0:
        return ""
    return (
        f'<progress value="{snapshot.accumulated:.0f}" max="{snapshot.target_batch_size:.0f}"></progress><br>'
    )


def _finite(history: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    return [(step, loss) for step, loss in history if math.isfinite(loss)]


def _plain(text: str, limit: int = MAX_NAME_CHARS) -> str:
    """Without control characters, which could steer a terminal, and not endless."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in text[: limit + 1])
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def _size(size_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:,.1f} TB"
