"""The swarm as a map: this peer in the middle of the others, links as wide as the lines are fast. Pure functions.

A peer knows its own links only, so the map shows these; a relayed one goes by way of its relay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from colab_swarm.markup import count, plain, text
from colab_swarm.snapshot import PeerRow, SwarmSnapshot
from colab_swarm.widgets import theme

MAX_PEERS = 32
"""More would be no map any more; the first page counts them all."""
WIDTH, ROW, RADIUS = 800, 30, 130
RELAYED = "relayed by "
ID_CHARS = 8

State = tuple[str, str, str]
"""Hue, symbol and word."""
Place = tuple[float, float]


def render_html(snapshot: SwarmSnapshot) -> str:
    """The map with its key."""
    shown, hidden = _others(snapshot)
    height = max(5 * ROW, ROW * math.ceil(len(shown) / 2)) + ROW
    middle = (WIDTH / 2, height / 2)
    places = _places(len(shown), height)
    by_id = {peer.id[:ID_CHARS]: place for peer, place in zip(shown, places, strict=True)}
    links = "".join(_link(peer, place, middle, by_id) for peer, place in zip(shown, places, strict=True))
    nodes = "".join(_node(peer, place, _state(peer)) for peer, place in zip(shown, places, strict=True))
    me = (
        f'<text x="{middle[0]}" y="{middle[1] + 30}" text-anchor="middle">{text(snapshot.me, 24)} (me)</text>'
    )
    states = {_own_state(snapshot), *map(_state, shown)}
    key = " ".join(theme.mark(hue, symbol, word + " ") for hue, symbol, word in sorted(states))
    drawn = (
        f'<svg viewBox="0 0 {WIDTH} {height}" width="100%" role="img" '
        f'aria-label="map of {count(len(shown) + 1, "peer")}">'
        f"{links}{nodes}{_dot(middle, _own_state(snapshot), 15)}{me}</svg>"
    )
    more = f'<p class="soft">… and {hidden} more peers</p>' if hidden else ""
    legend = '<p class="soft">line: a link, wider for a faster line; dashed: by way of a relay; no line: no link</p>'
    return theme.wrap(
        theme.heading(text(snapshot.run), _linked(shown)) + f"{drawn}{more}<p>{key}</p>{legend}",
        "map of the swarm",
    )


def render_text(snapshot: SwarmSnapshot) -> str:
    """The same as aligned lines."""
    shown, hidden = _others(snapshot)
    _, symbol, word = _own_state(snapshot)
    rows = [(f"{symbol} {plain(snapshot.me, 24)} (me)", word, "", "", "")]
    for peer in shown:
        _, symbol, word = _state(peer)
        rows.append((f"{symbol} {plain(peer.name, 24)}", word, _rtt(peer), _way(peer), _speed(peer)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    more = [f"… and {hidden} more peers"] if hidden else []
    return "\n".join(
        [f"links of {plain(snapshot.run)}: {_linked(shown)}", *(f"  {line}" for line in lines + more)]
    )


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


def _rtt(peer: PeerRow) -> str:
    return "" if peer.rtt_s is None or not math.isfinite(peer.rtt_s) else f"{1000 * peer.rtt_s:,.0f} ms"


def _way(peer: PeerRow) -> str:
    return plain(peer.connected, 24) or "no link"


def _speed(peer: PeerRow) -> str:
    """Up and down; empty unless the peer tells both."""
    if peer.upload_bps is None or peer.download_bps is None:
        return ""
    return f"{peer.upload_bps / 1e6:.3g}/{peer.download_bps / 1e6:.3g} Mbit/s"


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


def _thickness(peer: PeerRow) -> float:
    """1 for 1 Mbit/s or less, 2 more for each factor of ten, by the slower of the line's two ways."""
    speeds = [bps for bps in (peer.upload_bps, peer.download_bps) if bps is not None and math.isfinite(bps)]
    return 1.5 if not speeds else min(1 + 2 * math.log10(max(min(speeds) / 1e6, 1.0)), 7.0)


def _link(peer: PeerRow, place: Place, middle: Place, by_id: Mapping[str, Place]) -> str:
    if not peer.connected:
        return ""
    begin, dashed = middle, ""
    if peer.connected.startswith(RELAYED):
        dashed = ' stroke-dasharray="5 4"'
        begin = by_id.get(peer.connected.removeprefix(RELAYED)[:ID_CHARS], middle)
    told = ", ".join(filter(None, (_way(peer), _rtt(peer), _speed(peer))))
    return (
        f'<path class="soft" d="M{begin[0]:.1f} {begin[1]:.1f}L{place[0]:.1f} {place[1]:.1f}" fill="none" '
        f'stroke="currentColor" stroke-width="{_thickness(peer):.1f}"{dashed}><title>{text(told)}</title></path>'
    )


def _dot(place: Place, state: State, radius: float) -> str:
    hue, symbol, word = state
    x, y = place
    return (
        f'<g class="{hue}"><title>{text(word)}</title><circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" '
        f'style="fill:var(--card)" stroke="currentColor" stroke-width="2"/>'
        f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle">{symbol}</text></g>'
    )


def _node(peer: PeerRow, place: Place, state: State) -> str:
    x, y = place
    at, anchor = (x + 15, "start") if x > WIDTH / 2 else (x - 15, "end")
    told = ", ".join(filter(None, (_rtt(peer), _way(peer), _speed(peer))))
    name = text(peer.name, 24)
    return _dot(place, state, 10) + (
        f'<text x="{at:.1f}" y="{y - 2:.1f}" text-anchor="{anchor}" style="fill:var(--ink)">{name}</text>'
        f'<text x="{at:.1f}" y="{y + 11:.1f}" text-anchor="{anchor}">{text(told)}</text>'
    )
