"""The swarm as a map: this peer in the middle of the others, links as wide as the lines are fast. Pure functions.

A peer knows its own links only, so the map shows these; a relayed one goes by way of its relay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from colab_swarm.markup import count, plain, text
from colab_swarm.notebook import theme
from colab_swarm.snapshot import PeerRow, SwarmSnapshot

MAX_PEERS = 32
"""More would be no map any more; the first page counts them all."""
WIDTH, ROW, RADIUS = 600, 30, 90
RELAYED = "relayed by "
ID_CHARS = 8
WAY_CHARS = 17
"""As long as ``via peer-01234567``: a relay seldom trains and tells its name."""
ABOVE, BELOW = 25, 45
"""How far a relayed link keeps off this peer, at whose mark and name it is only passing."""

State = tuple[str, str, str]
"""Hue, symbol and word."""
Place = tuple[float, float]


def render_html(snapshot: SwarmSnapshot) -> str:
    """The map with its key."""
    shown, hidden = _others(snapshot)
    key = "".join(
        f"{theme.mark(state[0], state[1], text(state[2]))} &#160; "
        for state in sorted({_own_state(snapshot), *map(_state, shown)})
    )
    more = f'<p class="soft">… and {hidden} more peers</p>' if hidden else ""
    legend = '<p class="soft">line: a link, wider for a faster line; dashed: by way of a relay; no line: no link</p>'
    head = theme.heading(text(snapshot.run), _linked(shown))
    return theme.wrap(f"{head}{_svg(snapshot, shown)}{more}<p>{key}</p>{legend}", "map of the swarm")


def _svg(snapshot: SwarmSnapshot, shown: Sequence[PeerRow]) -> str:
    height = max(6 * ROW, ROW * math.ceil(len(shown) / 2)) + ROW
    middle = (WIDTH / 2, height / 2)
    placed = list(zip(shown, _places(len(shown), height), strict=True))
    places = {peer.id[:ID_CHARS]: place for peer, place in placed}
    names = {peer.id[:ID_CHARS]: peer.name for peer in shown}
    links = "".join(_link(peer, place, middle, places) for peer, place in placed)
    nodes = "".join(_node(peer, place, names) for peer, place in placed)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" width="100%" style="max-width:720px" role="img" '
        f'aria-label="map of {count(len(shown) + 1, "peer")}">{links}{nodes}'
        f"{_dot(middle, _own_state(snapshot), 15)}"
        f'<text x="{middle[0]}" y="{middle[1] + 29}" text-anchor="middle" style="fill:var(--ink);'
        f'stroke:var(--paper);stroke-width:4px;paint-order:stroke">{text(snapshot.me, 24)} (me)</text></svg>'
    )


def render_text(snapshot: SwarmSnapshot) -> str:
    """The same as aligned lines."""
    shown, hidden = _others(snapshot)
    names = {peer.id[:ID_CHARS]: peer.name for peer in shown}
    _, symbol, word = _own_state(snapshot)
    rows = [(f"{symbol} {plain(snapshot.me, 24)} (me)", word, "", "", "")]
    for peer in shown:
        _, symbol, word = _state(peer)
        rows.append((f"{symbol} {plain(peer.name, 24)}", word, *_told(peer, names)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    more = [f"… and {hidden} more peers"] if hidden else []
    head = f"links of {plain(snapshot.run, 40)}: {_linked(shown)}"
    return "\n".join([head, *(f"  {line}" for line in lines + more)])


def _others(snapshot: SwarmSnapshot) -> tuple[list[PeerRow], int]:
    """Those to show, linked ones first, and how many are not."""
    others = sorted((peer for peer in snapshot.peers if not peer.me), key=lambda peer: not peer.connected)
    return others[:MAX_PEERS], max(len(others) - MAX_PEERS, 0)


def _linked(shown: Sequence[PeerRow]) -> str:
    linked = sum(bool(peer.connected) for peer in shown)
    relayed = sum(peer.connected.startswith(RELAYED) for peer in shown)
    return f"{count(linked, 'link')}, {relayed} of them relayed" if relayed else count(linked, "link")


def _state(peer: PeerRow) -> State:
    role = plain(peer.role, 24) or "idle"
    if "paused" in role:
        return "amber", "‖", role
    if "catching" in role:
        return "purple", "◔", role
    if "left" in role:
        return "red", "✖", role
    return ("green", "●", "training") if peer.samples_per_s > 0 else ("soft", "○", role)


def _own_state(snapshot: SwarmSnapshot) -> State:
    if snapshot.paused:
        return "amber", "‖", "paused"
    return next(
        (_state(peer) for peer in snapshot.peers if peer.me), ("blue", "◉", plain(snapshot.state, 24))
    )


def _told(peer: PeerRow, names: Mapping[str, str]) -> tuple[str, str, str]:
    """Round-trip time, way and speed of a link; empty where not known."""
    relay = peer.connected.removeprefix(RELAYED)[:ID_CHARS]
    way = f"via {names.get(relay, relay)}" if peer.connected.startswith(RELAYED) else peer.connected
    bps = _slower(peer)
    speed = "" if bps is None else bits_per_s(bps)
    return milliseconds(peer.rtt_s), plain(way, WAY_CHARS) or "no link", speed


def bits_per_s(bps: float) -> str:
    """In the unit that fits."""
    unit, factor = next(((u, f) for u, f in (("Gbit/s", 1e9), ("Mbit/s", 1e6)) if bps >= f), ("kbit/s", 1e3))
    return f"{bps / factor:.3g} {unit}"


def milliseconds(seconds: float | None) -> str:
    """Of a round trip; empty where not measured."""
    if seconds is None or not math.isfinite(seconds):
        return ""
    return "<1 ms" if seconds < 0.001 else f"{1000 * seconds:,.0f} ms"


def _slower(peer: PeerRow) -> float | None:
    """Bits per second of the line's slower way; None unless the peer tells."""
    speeds = [bps for bps in (peer.upload_bps, peer.download_bps) if bps is not None and math.isfinite(bps)]
    return min(speeds, default=None)


def _places(number: int, height: float) -> list[Place]:
    """On an ellipse, at even heights so that labels stay apart; the first half at the right, the rest at the left."""
    right = math.ceil(number / 2)
    places = []
    for index in range(number):
        side, row, rows = (1, index, right) if index < right else (-1, index - right, number - right)
        y = ROW / 2 + (height - ROW) * (row + 0.5) / rows
        bent = math.sqrt(max(1 - (2 * y / height - 1) ** 2, 0.0))
        places.append((WIDTH / 2 + side * (40 + RADIUS * bent), y))
    return places


def _thickness(bps: float | None) -> float:
    """1 for 1 Mbit/s or less, 1.3 more for each factor of ten."""
    return 1.0 if bps is None else min(1 + 1.3 * math.log10(max(bps / 1e6, 1.0)), 6.0)


def _link(peer: PeerRow, place: Place, middle: Place, by_id: Mapping[str, Place]) -> str:
    if not peer.connected:
        return ""
    begin, dashed, bend = middle, "", "L"
    if peer.connected.startswith(RELAYED):
        dashed = ' stroke-dasharray="5 4"'
        if relay := by_id.get(peer.connected.removeprefix(RELAYED)[:ID_CHARS]):
            begin, bend = relay, _around(middle, relay, place)
    return (
        f'<path class="soft" d="M{begin[0]:.1f} {begin[1]:.1f}{bend}{place[0]:.1f} {place[1]:.1f}" fill="none" '
        f'stroke="currentColor" stroke-width="{_thickness(_slower(peer)):.1f}"{dashed}/>'
    )


def _around(middle: Place, begin: Place, end: Place) -> str:
    """The beginning of a curve, half of whose way is above or below the middle."""
    x, y = (begin[0] + end[0]) / 2, (begin[1] + end[1]) / 2
    half = max(y, middle[1] + BELOW) if y >= middle[1] else min(y, middle[1] - ABOVE)
    return f"Q{x:.1f} {2 * half - y:.1f} "


def _dot(place: Place, state: State, radius: float) -> str:
    hue, symbol, word = state
    x, y = place
    return (
        f'<g class="{hue}"><title>{text(word)}</title><circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" '
        f'style="fill:var(--card)" stroke="currentColor" stroke-width="2"/>'
        f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle" style="fill:currentColor">{symbol}</text></g>'
    )


def _node(peer: PeerRow, place: Place, names: Mapping[str, str]) -> str:
    x, y = place
    at, anchor = (x + 15, "start") if x > WIDTH / 2 else (x - 15, "end")
    rtt, way, speed = _told(peer, names)
    short, all_of_it = (", ".join(filter(None, parts)) for parts in ((rtt, way), (rtt, way, speed)))
    name = text(peer.name, 24)
    return _dot(place, _state(peer), 10) + (
        f'<text x="{at:.1f}" y="{y - 2:.1f}" text-anchor="{anchor}" style="fill:var(--ink)">{name}</text>'
        f'<text x="{at:.1f}" y="{y + 11:.1f}" text-anchor="{anchor}">{text(short)}'
        f"<title>{text(all_of_it)}</title></text>"
    )
