"""The swarm as a map: this peer in the middle, a line for each link, wider for faster links. Pure functions.

A peer knows only its own links, so the map shows only these. A relayed link goes by way of its relay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from colab_swarm.markup import aligned, bandwidth, count, milliseconds, plain, text
from colab_swarm.notebook import theme
from colab_swarm.notebook.theme import Document
from colab_swarm.snapshot import PeerRow, SwarmSnapshot

MAX_PEERS = 32  # the panel's first page counts all peers
WIDTH, ROW, RADIUS = 600, 30, 90
RELAYED = "relayed by "
ID_CHARS = 8
WAY_CHARS = 17  # length of ``via peer-01234567``
KEY = '<p class="soft">line: a link, wider if faster; dashed: through a relay; no line: no link</p>'

State = tuple[str, str, str]  # hue, symbol and word
Place = tuple[float, float]


def draw(snapshot: SwarmSnapshot) -> Document:
    """Return the map with its key; the text lists the links."""
    others = sorted((peer for peer in snapshot.peers if not peer.me), key=lambda peer: not peer.connected)
    shown = others[:MAX_PEERS]
    names = {peer.id[:ID_CHARS]: peer.name for peer in shown}
    own, states = _own_state(snapshot), list(map(_state, shown))
    links = [_link_words(peer, names) for peer in shown]
    rows = [(f"{own[1]} {plain(snapshot.me, 24)} (me)", own[2], "", "", "")]
    for peer, (_, symbol, word), link in zip(shown, states, links, strict=True):
        rows.append((f"{symbol} {plain(peer.name, 24)}", word, *link))
    height = max(6 * ROW, ROW * math.ceil(len(shown) / 2)) + ROW
    middle = (WIDTH / 2, height / 2)
    placed = list(zip(shown, _places(len(shown), height), strict=True))
    places = {peer.id[:ID_CHARS]: place for peer, place in placed}
    lines = "".join(_line(peer, place, middle, places) for peer, place in placed if peer.connected)
    nodes = "".join(map(_node, placed, states, links))
    key = "".join(
        f"{theme.mark(h, symbol, text(word))} &#160; " for h, symbol, word in sorted({own, *states})
    )
    run, linked = plain(snapshot.run, 40), _linked(others)
    page = Document(run, linked, label="map of the swarm", line=f"links of {run}: {linked}")
    page.draw(
        f'<svg viewBox="0 0 {WIDTH} {height}" width="100%" style="max-width:720px" role="img" '
        f'aria-label="map of {count(len(shown) + 1, "peer")}">{lines}{nodes}{_dot(middle, own, 15)}'
        f'<text x="{middle[0]}" y="{middle[1] + 29}" text-anchor="middle" style="fill:var(--ink);'
        f'stroke:var(--paper);stroke-width:4px;paint-order:stroke">{text(snapshot.me, 24)} (me)</text></svg>'
        f"<p>{key}</p>{KEY}",
        *aligned(rows),
    )
    if len(others) > MAX_PEERS:
        page.note(f"… and {len(others) - MAX_PEERS} more peers")
    return page


def _linked(others: Sequence[PeerRow]) -> str:
    relayed = sum(peer.connected.startswith(RELAYED) for peer in others)
    linked = count(sum(bool(peer.connected) for peer in others), "link")
    return linked + (f", {relayed} of them relayed" if relayed else "")


def _state(peer: PeerRow) -> State:
    role = plain(peer.role, 24) or "idle"
    marks = {"paused": ("amber", "‖"), "catching": ("purple", "◔"), "left": ("red", "✖")}
    for word, (hue, symbol) in marks.items():
        if word in role:
            return hue, symbol, role
    return ("green", "●", "training") if peer.samples_per_s > 0 else ("soft", "○", role)


def _own_state(snapshot: SwarmSnapshot) -> State:
    if snapshot.paused:
        return "amber", "‖", "paused"
    me = next((peer for peer in snapshot.peers if peer.me), None)
    return ("blue", "◉", plain(snapshot.state, 24)) if me is None else _state(me)


def _link_words(peer: PeerRow, names: Mapping[str, str]) -> tuple[str, str, str]:
    """Return round trip, way and speed."""
    relay = peer.connected.removeprefix(RELAYED)[:ID_CHARS]
    way = f"via {names.get(relay, relay)}" if peer.connected.startswith(RELAYED) else peer.connected
    bps = _bandwidth_bps(peer)
    return milliseconds(peer.rtt_s), plain(way, WAY_CHARS) or "no link", bandwidth(bps) if bps else ""


def _bandwidth_bps(peer: PeerRow) -> float:
    known = [bps for bps in (peer.upload_bps, peer.download_bps) if bps is not None and math.isfinite(bps)]
    return min(known, default=0.0)


def _places(number: int, height: float) -> list[Place]:
    """Return places on an ellipse, at even heights so that labels stay apart: right half first, then left."""
    right = math.ceil(number / 2)
    places = []
    for index in range(number):
        side, row, rows = (1, index, right) if index < right else (-1, index - right, number - right)
        y = ROW / 2 + (height - ROW) * (row + 0.5) / rows
        bent = math.sqrt(max(1 - (2 * y / height - 1) ** 2, 0.0))
        places.append((WIDTH / 2 + side * (40 + RADIUS * bent), y))
    return places


def _line(peer: PeerRow, place: Place, middle: Place, by_id: Mapping[str, Place]) -> str:
    relayed = peer.connected.startswith(RELAYED)
    begin = by_id.get(peer.connected.removeprefix(RELAYED)[:ID_CHARS], middle) if relayed else middle
    dashed = ' stroke-dasharray="5 4"' if relayed else ""
    # 1 pixel for 1 Mbit/s or less, 1.3 more for each factor of ten
    width = min(1 + 1.3 * math.log10(max(_bandwidth_bps(peer) / 1e6, 1.0)), 6.0)
    return (
        f'<path class="soft" d="M{begin[0]:.1f} {begin[1]:.1f}L{place[0]:.1f} {place[1]:.1f}" fill="none" '
        f'stroke="currentColor" stroke-width="{width:.1f}"{dashed}/>'
    )


def _dot(place: Place, state: State, radius: float) -> str:
    hue, symbol, word = state
    x, y = place
    return (
        f'<g class="{hue}"><title>{text(word)}</title><circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" '
        f'style="fill:var(--card)" stroke="currentColor" stroke-width="2"/>'
        f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle" style="fill:currentColor">{symbol}</text></g>'
    )


def _node(placed: tuple[PeerRow, Place], state: State, link: Sequence[str]) -> str:
    peer, (x, y) = placed
    at, anchor = (x + 15, "start") if x > WIDTH / 2 else (x - 15, "end")
    short, full = (", ".join(filter(None, parts)) for parts in (link[:2], link))
    return _dot((x, y), state, 10) + (
        f'<text x="{at:.1f}" y="{y - 2:.1f}" text-anchor="{anchor}" style="fill:var(--ink)">'
        f'{text(peer.name, 24)}</text><text x="{at:.1f}" y="{y + 11:.1f}" text-anchor="{anchor}">{text(short)}'
        f"<title>{text(full)}</title></text>"
    )
