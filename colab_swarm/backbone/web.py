"""The backbone's dashboard: a read-only web page, JSON and metrics for Prometheus, rendered once a second at most."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec
from aiohttp import web

from colab_swarm.backbone.config import Dashboard
from colab_swarm.backbone.keeper import Checkpoint
from colab_swarm.backbone.observer import LossPoint, PeerLine, RoundRow
from colab_swarm.markup import (
    Labels,
    card,
    content_security_policy,
    count,
    duration,
    exposition,
    legend,
    page,
    size,
    table,
    text,
    tiles,
)
from colab_swarm.net.addresses import VisitLimit, source_of
from colab_swarm.notebook.svg import curve, ticks

JSON = "application/json"
RATE_POINTS = 20  # Steps over which a rate is taken
FRESH_S = 1.0
ANSWERS_PER_S = 100  # For one visitor; see `colab_swarm.net.addresses`
WIDTH, ROW, NAMES, SPEEDS = 760, 20, 140, 75
"""Pixels: the page, the height of a row, the names before a timeline, the speeds behind it."""
MAX_ROWS, SHOWN_ROUNDS, MAX_SHOWN_S = 40, 15, 6 * 3600.0
CLASSES = {"trainer": "trainer", "catching up": "catching", "assistant": "assistant"}
STYLE = """
svg polyline { stroke: var(--trainer); }
.trainer { fill: var(--trainer); background: var(--trainer); }
.catching { fill: var(--catching); background: var(--catching); }
.assistant { fill: var(--assistant); background: var(--assistant); }
svg .name { fill: var(--text); } svg .away { opacity: .55; }
"""


class ContributionView(msgspec.Struct, frozen=True):
    """A peer's contribution to the run, as other peers saw it."""

    name: str
    id: str
    samples: float
    reduced_bytes: float
    relayed_bytes: float


class CollaborationView(msgspec.Struct, frozen=True):
    """One model of the run.

    Attributes:
        trainers, catching_up, assistants: present peers by role.
        rounds: the last that the backbone reduced in, oldest first; ``round_count`` of all.
    """

    name: str  # of the collaboration
    step: int  # global step
    samples_per_s: float  # of all trainers
    trainers: int
    catching_up: int
    assistants: int
    points: tuple[LossPoint, ...]  # the loss, oldest first
    peers: tuple[PeerLine, ...]  # the peers and the times when they were present
    rounds: tuple[RoundRow, ...]
    round_count: int
    checkpoints: tuple[Checkpoint, ...]  # history, oldest first
    standing_in: int | None  # step of the checkpoint for late joiners, while nobody trains
    hub: str  # state of pushes to the Hub; empty without pushes. ``hub_failures``: of all tries
    hub_failures: int


class View(msgspec.Struct, frozen=True):
    """The run.

    Attributes:
        run, backbone: names.
        sent_bytes, received_bytes: at the backbone, since it started.
    """

    run: str
    backbone: str
    at: float  # now; ``since``: when the backbone started; seconds since the epoch
    since: float
    reached: str  # how other peers reach the backbone, in words
    linked: int  # peers linked to it
    sent_bytes: int
    received_bytes: int
    collaborations: tuple[CollaborationView, ...]  # the models
    contributions: tuple[ContributionView, ...]  # most samples first


def render_prometheus(view: View) -> str:
    """Return the figures of the run in Prometheus' text format."""
    run = (("run", view.run),)
    metrics: dict[str, dict[Labels, float]] = {
        "uptime_seconds": {run: view.at - view.since},
        "linked_peers": {run: view.linked},
        "sent_bytes_total": {run: view.sent_bytes},
        "received_bytes_total": {run: view.received_bytes},
    }
    for one in view.collaborations:
        labels = (*run, ("collaboration", one.name))
        for name, value in _known(one).items():
            metrics.setdefault(name, {})[labels] = value
        roles = {"trainer": one.trainers, "catching up": one.catching_up, "assistant": one.assistants}
        for role, present in roles.items():
            metrics.setdefault("peers", {})[*labels, ("role", role)] = present
    return exposition(
        (name, "counter" if name.endswith("_total") else "gauge", values) for name, values in metrics.items()
    )


def _known(one: CollaborationView) -> dict[str, float]:
    figures = {"step": one.step, "samples_per_second": one.samples_per_s, "rounds_total": one.round_count}
    if one.points:
        figures["loss"] = one.points[-1].loss
    if one.checkpoints:
        saved = one.checkpoints[-1]
        figures |= {"checkpoint_step": saved.step, "checkpoint_timestamp_seconds": saved.at}
    return figures | ({"hub_failures_total": one.hub_failures} if one.hub else {})


def render_page(view: View) -> str:
    """Return the whole page."""
    lost = "The backbone does not answer. This is its last state."
    return page(text(view.run), render_live(view), lost=lost, style=STYLE)


def render_live(view: View) -> str:
    """Return the part of the page that changes."""
    traffic = f"{size(view.sent_bytes)} sent, {size(view.received_bytes)} received"
    parts = [
        f"<h1>{text(view.run)}</h1>"
        f'<p class="soft">{text(view.backbone)}: {text(view.reached)}; {count(view.linked, "peer")} linked; '
        f"up {duration(view.at - view.since)}; {traffic}</p>"
    ]
    for one in view.collaborations:
        if len(view.collaborations) > 1:
            parts.append(f"<h2>{text(one.name)}</h2>")
        parts += [_figures(one, view.at), _timeline(one.peers, view.at), _rounds(one.rounds)]
    rows = [
        (
            text(f"{one.name} ({one.id[:8]})"),
            f"{one.samples:,.0f}",
            size(one.reduced_bytes),
            size(one.relayed_bytes),
        )
        for one in view.contributions[:MAX_ROWS]
    ]
    if rows:
        parts.append(card("Contributions", table(("peer", "samples", "reduced", "relayed"), rows)))
    return "".join(parts)


def _rounds(rounds: Sequence[RoundRow]) -> str:
    rows = [
        (
            f"step {row.step:,}",
            f"{row.contributors} of {count(row.peers, 'peer')}",
            f"{row.forming_s:.2f} s",
            f"{row.exchange_s:.2f} s",
            f"{row.recovery_s:.2f} s" + (f", {count(row.spans_lost, 'span')} lost" if row.spans_lost else ""),
            f"{row.samples:,.0f}",
            size(row.moved_bytes),
        )
        for row in reversed(rounds[-SHOWN_ROUNDS:])
    ]
    columns = ("", "contributed", "forming", "exchange", "recovery", "samples", "moved")
    return card("Last rounds that the backbone reduced in", table(columns, rows)) if rows else ""


def _figures(one: CollaborationView, now: float) -> str:
    """Return the tiles, the curves of loss and rate, and the checkpoints."""
    apart = min(RATE_POINTS, 1 + len(one.points) // 4)
    rates = [
        (end.step, 60 * (end.step - begin.step) / (end.at - begin.at))
        for begin, end in zip(one.points, one.points[apart:], strict=False)
        if end.at > begin.at
    ]
    head = {
        "global step": f"{one.step:,}",
        "loss": f"{one.points[-1].loss:.3f}" if one.points else "–",
        "samples/s": f"{one.samples_per_s:,.1f}",
        "steps/min": f"{rates[-1][1]:,.1f}" if rates and one.trainers else "–",
        "trainers": f"{one.trainers}" + f" (+{one.catching_up})" * bool(one.catching_up),
        "last saved": f"{duration(now - one.checkpoints[-1].at)} ago" if one.checkpoints else "–",
    }
    spread = [(point.step, point.low, point.high) for point in one.points]
    losses = [(point.step, point.loss) for point in one.points]
    loss = curve(losses, spread=spread, width=WIDTH, height=260) or _soft(
        "Fewer than two losses reported yet."
    )
    rate = curve(rates, label="steps per minute", from_zero=True, width=WIDTH // 2, height=190)
    steps = card("Steps per minute", rate or _soft("Not known yet."))
    return (
        f"{_warning(one)}{tiles(head)}{card('Loss: median of the trainers', loss)}"
        f'<div class="two">{steps}{card("Checkpoints", _checkpoints(one, now))}</div>'
    )


def _warning(one: CollaborationView) -> str:
    if one.standing_in is None:
        return ""
    where = f"New trainers continue from the checkpoint of step {one.standing_in:,}."
    return f'<p class="warning">There are no trainers now. {where}</p>'


def _checkpoints(one: CollaborationView, now: float) -> str:
    rows = [
        (
            f"step {saved.step:,}",
            "" if saved.loss is None else f"{saved.loss:.3f}",
            size(saved.size_bytes),
            f"{duration(now - saved.at)} ago",
        )
        for saved in reversed(one.checkpoints[-5:])
    ]
    return table(("", "loss", "size", "saved"), rows) + (_soft(text(one.hub)) if one.hub else "")


def _soft(words: str) -> str:
    return f'<p class="soft">{words}</p>'


def _timeline(peers: Sequence[PeerLine], now: float) -> str:
    """Return a bar for each time when a peer was present."""
    shown = [line for line in peers if now - line.spans[-1].until < MAX_SHOWN_S][:MAX_ROWS]
    if not shown:
        return ""
    begin = max(min(line.spans[0].since for line in shown), now - MAX_SHOWN_S)
    begin = min(begin, now - 60.0)
    scale = (WIDTH - NAMES - SPEEDS) / (now - begin)
    parts = [_line(line, y * ROW, begin, scale) for y, line in enumerate(shown)]
    bottom = ROW * len(shown)
    parts += [
        f'<text x="{WIDTH - SPEEDS - minutes * 60 * scale:.0f}" y="{bottom + 15}" text-anchor="middle">'
        f"{'now' if not minutes else f'−{minutes:g} min'}</text>"
        for minutes in ticks(0, (now - begin) / 60, 6)
    ]
    more = f'<p class="soft">and {len(peers) - len(shown)} more</p>' if len(peers) > len(shown) else ""
    svg = (
        f'<svg viewBox="0 0 {WIDTH} {bottom + 20}" width="100%" role="img" aria-label="peers over time" '
        f'font-size="12">{"".join(parts)}</svg>'
    )
    return card(f"Peers {legend(CLASSES.items())}", svg + more)


def _line(line: PeerLine, y: int, begin: float, scale: float) -> str:
    bars = []
    for span in line.spans:
        start = max(span.since, begin)
        width = max((span.until - start) * scale, 2.0)
        if span.until >= begin:
            bars.append(
                f'<rect class="{CLASSES.get(span.role, "trainer")}" x="{NAMES + (start - begin) * scale:.1f}" '
                f'y="{y + 4}" width="{width:.1f}" height="{ROW - 8}" rx="2"><title>{text(span.role)}, '
                f"{duration(span.until - span.since)}</title></rect>"
            )
    speed = f"{line.samples_per_s:,.1f}/s" if line.samples_per_s else "" if line.here else "gone"
    return (
        f'<g class="{"here" if line.here else "away"}"><text class="name" x="0" y="{y + 14}">{text(line.name, 20)}'
        f"<title>{text(line.id)}</title></text>{''.join(bars)}"
        f'<text x="{WIDTH}" y="{y + 14}" text-anchor="end">{speed}</text></g>'
    )


HEADERS = {
    "Content-Security-Policy": content_security_policy(),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
PARTS = ("points", "peers", "rounds", "checkpoints")  # Of a collaboration, under ``/api/NAME/PART``


def answer(view: View, path: str) -> tuple[str, str | bytes]:
    """Return content type and body for a path of the dashboard.

    Raises:
        HTTPNotFound: there is no such path.
    """
    match path.split("/")[1:]:
        case [""]:
            return "text/html", render_page(view)
        case ["live"]:
            return "text/html", render_live(view)
        case ["metrics"]:
            return "text/plain", render_prometheus(view)
        case ["api", "run"]:
            return JSON, msgspec.json.encode(view)
        case ["api", "contributions"]:
            return JSON, msgspec.json.encode(view.contributions)
        case ["api", name, part] if part in PARTS:
            for one in view.collaborations:
                if one.name == name:
                    return JSON, msgspec.json.encode(getattr(one, part))
    raise web.HTTPNotFound(text=f"there are {', '.join(PARTS)} of each collaboration")


class DashboardServer:
    """Serves the view that ``look()`` returns.

    Attributes:
        url: of the page.
    """

    def __init__(self, look: Callable[[], View]) -> None:
        self._look = look
        self._view: View | None = None
        self._viewed_at = float("-inf")
        self._answers: dict[str, tuple[str, str | bytes]] = {}  # made of `_view`
        self._visits = VisitLimit(ANSWERS_PER_S)
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self, settings: Dashboard) -> None:
        """Listen.

        Raises:
            OSError: the port is taken.
        """
        app = web.Application(client_max_size=1024)
        app.router.add_get("/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, settings.host, settings.port)
        await site.start()
        port = self._runner.addresses[0][1]
        host = "127.0.0.1" if settings.host in ("", "0.0.0.0", "::") else settings.host
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}/"

    async def close(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        now, path = asyncio.get_running_loop().time(), request.path
        if not self._visits.admit(source_of(request), now):
            too_many = "too many requests: try again in a second"
            return web.Response(status=429, text=too_many, headers={"Retry-After": "1"})
        if self._view is None or now - self._viewed_at >= FRESH_S:
            self._view, self._viewed_at = self._look(), now
            self._answers.clear()
        if path not in self._answers:
            self._answers[path] = answer(self._view, path)
        kind, body = self._answers[path]
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=HEADERS)
