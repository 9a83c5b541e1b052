"""The backbone's dashboard: a read-only web page, JSON and metrics for Prometheus, rendered once a second at most."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence

import msgspec
from aiohttp import web

from colab_swarm.backbone.config import Dashboard
from colab_swarm.backbone.keeper import Checkpoint
from colab_swarm.backbone.observer import LossPoint, PeerLine, RoundRow
from colab_swarm.markup import (
    Labels,
    Metric,
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

RATE_POINTS = 20
"""Steps over which a rate is taken."""
FRESH_S = 1.0
ANSWERS_PER_S = 100
"""For one visitor; see `colab_swarm.net.addresses`."""
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
        name: of the collaboration.
        step: global step.
        samples_per_s: of all trainers.
        trainers, catching_up, assistants: present peers by role.
        points: the loss, oldest first.
        peers: the peers and the times when they were present.
        rounds: the last that the backbone reduced in, oldest first; ``round_count`` of all.
        checkpoints: history, oldest first.
        standing_in: step of the checkpoint for late joiners, while nobody trains.
        hub: state of pushes to the Hub; empty without pushes. ``hub_failures``: of all tries.
    """

    name: str
    step: int
    samples_per_s: float
    trainers: int
    catching_up: int
    assistants: int
    points: tuple[LossPoint, ...]
    peers: tuple[PeerLine, ...]
    rounds: tuple[RoundRow, ...]
    round_count: int
    checkpoints: tuple[Checkpoint, ...]
    standing_in: int | None
    hub: str
    hub_failures: int


class View(msgspec.Struct, frozen=True):
    """The run.

    Attributes:
        run, backbone: names.
        at: now; ``since``: when the backbone started; seconds since the epoch.
        reached: how other peers reach the backbone, in words.
        linked: peers linked to it.
        sent_bytes, received_bytes: at the backbone, since it started.
        collaborations: the models.
        contributions: most samples first.
    """

    run: str
    backbone: str
    at: float
    since: float
    reached: str
    linked: int
    sent_bytes: int
    received_bytes: int
    collaborations: tuple[CollaborationView, ...]
    contributions: tuple[ContributionView, ...]


def render_prometheus(view: View) -> str:
    """Return the figures of the run in Prometheus' text format."""
    return exposition(_metrics(view))


def _metrics(view: View) -> Iterator[Metric]:
    run = (("run", view.run),)
    yield "uptime_seconds", "gauge", {run: view.at - view.since}
    yield "linked_peers", "gauge", {run: view.linked}
    yield "sent_bytes_total", "counter", {run: view.sent_bytes}
    yield "received_bytes_total", "counter", {run: view.received_bytes}
    models: dict[Labels, CollaborationView] = {
        (*run, ("collaboration", one.name)): one for one in view.collaborations
    }
    yield "step", "gauge", {labels: one.step for labels, one in models.items()}
    yield "loss", "gauge", {labels: one.points[-1].loss for labels, one in models.items() if one.points}
    yield "samples_per_second", "gauge", {labels: one.samples_per_s for labels, one in models.items()}
    peers: dict[Labels, float] = {}
    for labels, one in models.items():
        roles = {"trainer": one.trainers, "catching up": one.catching_up, "assistant": one.assistants}
        peers |= {(*labels, ("role", role)): present for role, present in roles.items()}
    yield "peers", "gauge", peers
    yield "rounds_total", "counter", {labels: one.round_count for labels, one in models.items()}
    saved = {labels: one.checkpoints[-1] for labels, one in models.items() if one.checkpoints}
    yield "checkpoint_step", "gauge", {labels: one.step for labels, one in saved.items()}
    yield "checkpoint_timestamp_seconds", "gauge", {labels: one.at for labels, one in saved.items()}
    failures = {labels: float(one.hub_failures) for labels, one in models.items() if one.hub}
    yield "hub_failures_total", "counter", failures


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
        if one.standing_in is not None:
            parts.append(
                f'<p class="warning">There are no trainers now. New trainers continue from the checkpoint of step '
                f"{one.standing_in:,}.</p>"
            )
        parts += [_figures(one, view.at), _timeline(one.peers, view.at)]
        rounds = [
            (
                f"step {row.step:,}",
                f"{row.contributors} of {count(row.peers, 'peer')}",
                f"{row.forming_s:.2f} s",
                f"{row.exchange_s:.2f} s",
                f"{row.recovery_s:.2f} s"
                + (f", {count(row.spans_lost, 'span')} lost" if row.spans_lost else ""),
                f"{row.samples:,.0f}",
                size(row.moved_bytes),
            )
            for row in reversed(one.rounds[-SHOWN_ROUNDS:])
        ]
        if rounds:
            columns = ("", "contributed", "forming", "exchange", "recovery", "samples", "moved")
            parts.append(card("Last rounds that the backbone reduced in", table(columns, rounds)))
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


def _figures(one: CollaborationView, now: float) -> str:
    """Return the tiles, the curves of loss and rate, and the checkpoints."""
    last = one.checkpoints[-1] if one.checkpoints else None
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
        "trainers": f"{one.trainers}" + (f" (+{one.catching_up})" if one.catching_up else ""),
        "last saved": "–" if last is None else f"{duration(now - last.at)} ago",
    }
    spread = [(point.step, point.low, point.high) for point in one.points]
    loss = curve([(point.step, point.loss) for point in one.points], spread=spread, width=WIDTH, height=260)
    rate = curve(rates, label="steps per minute", from_zero=True, width=WIDTH // 2, height=190)
    rows = [
        (
            f"step {saved.step:,}",
            "" if saved.loss is None else f"{saved.loss:.3f}",
            size(saved.size_bytes),
            f"{duration(now - saved.at)} ago",
        )
        for saved in reversed(one.checkpoints[-5:])
    ]
    hub = f'<p class="soft">{text(one.hub)}</p>' if one.hub else ""
    missing = '<p class="soft">Fewer than two losses reported yet.</p>'
    unknown = '<p class="soft">Not known yet.</p>'
    return (
        tiles(head)
        + card("Loss: median of the trainers", loss or missing)
        + f'<div class="two">{card("Steps per minute", rate or unknown)}'
        + f"{card('Checkpoints', table(('', 'loss', 'size', 'saved'), rows) + hub)}</div>"
    )


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
PAGES: dict[str, tuple[str, Callable[[View], str | bytes]]] = {
    "/": ("text/html", render_page),
    "/live": ("text/html", render_live),
    "/metrics": ("text/plain", render_prometheus),
    "/api/run": ("application/json", msgspec.json.encode),
    "/api/contributions": ("application/json", lambda view: msgspec.json.encode(view.contributions)),
}
PARTS = ("points", "peers", "rounds", "checkpoints")
"""Of a collaboration, under ``/api/NAME/PART``."""


class DashboardServer:
    """Serves the view that ``look()`` returns.

    Attributes:
        url: of the page.
    """

    def __init__(self, look: Callable[[], View]) -> None:
        self._look = look
        self._view: View | None = None
        self._viewed_at = float("-inf")
        self._answers: dict[str, bytes] = {}  # made of `_view`
        self._visits = VisitLimit(ANSWERS_PER_S)
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self, settings: Dashboard) -> None:
        """Listen.

        Raises:
            OSError: the port is taken.
        """
        app = web.Application(middlewares=[self._bounded], client_max_size=1024)
        for path in PAGES:
            app.router.add_get(path, self._answer)
        app.router.add_get("/api/{name}/{part}", self._answer_part)
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

    @web.middleware
    async def _bounded(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Refresh the view, and limit the answers to one visitor."""
        now = asyncio.get_running_loop().time()
        if self._view is None or now - self._viewed_at >= FRESH_S:
            self._view, self._viewed_at = self._look(), now
            self._answers.clear()
        if not self._visits.admit(source_of(request), now):
            too_many = "too many requests: try again in a second"
            return web.Response(status=429, text=too_many, headers={"Retry-After": "1"})
        return await handler(request)

    async def _answer(self, request: web.Request) -> web.Response:
        kind, render = PAGES[request.path]
        assert self._view is not None  # the middleware looked
        if request.path not in self._answers:
            made = render(self._view)
            self._answers[request.path] = made.encode() if isinstance(made, str) else made
        body = self._answers[request.path]
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=HEADERS)

    async def _answer_part(self, request: web.Request) -> web.Response:
        assert self._view is not None
        name, part = request.match_info["name"], request.match_info["part"]
        found = [one for one in self._view.collaborations if one.name == name]
        if not found or part not in PARTS:
            raise web.HTTPNotFound(text=f"there are {', '.join(PARTS)} of each collaboration")
        body = msgspec.json.encode(getattr(found[0], part))
        return web.Response(body=body, content_type="application/json", charset="utf-8", headers=HEADERS)
