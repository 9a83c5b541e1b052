"""The dashboard's web server: read-only, and what it answers is made once a second at most."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

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
from colab_swarm.notebook.loss_band import judge, render_svg, sahajbert, ticks

RATE_POINTS = 20

"""Steps over which a rate is taken."""


class ContributionView(msgspec.Struct, frozen=True):
    """What a peer has given to the run, as the others saw it."""

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
        trainers, catching_up, assistants: how many are here.
        points: the loss, oldest first.
        peers: who was there when.
        rounds: the last that the backbone reduced in, oldest first; ``round_count`` of all.
        checkpoints: history, oldest first.
        standing_in: step of the checkpoint that newcomers get, while nobody trains.
        hub: how pushing goes, in words; empty if nothing is pushed. ``hub_failures``: of all tries.
        reference: the published run to compare with.
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
    reference: str | None

    @property
    def loss(self) -> float | None:
        """The newest."""
        return self.points[-1].loss if self.points else None

    @property
    def rates(self) -> list[tuple[float, float]]:
        """Step and steps per minute there."""
        apart = min(RATE_POINTS, 1 + len(self.points) // 4)
        spans = zip(self.points, self.points[apart:], strict=False)
        return [
            (end.step, 60 * (end.step - begin.step) / (end.at - begin.at))
            for begin, end in spans
            if end.at > begin.at
        ]


class View(msgspec.Struct, frozen=True):
    """The run.

    Attributes:
        run, backbone: names.
        at: now; ``since``: when the backbone began; seconds since the epoch.
        reached: how others reach the backbone, in words.
        linked: peers linked to it.
        sent_bytes, received_bytes: at the backbone, since it began.
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
    """The figures of the run, one a line."""
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
    yield "loss", "gauge", {labels: one.loss for labels, one in models.items() if one.loss is not None}
    yield "samples_per_second", "gauge", {labels: one.samples_per_s for labels, one in models.items()}
    yield "peers", "gauge", _peers(models)
    yield "rounds_total", "counter", {labels: one.round_count for labels, one in models.items()}
    kept = {labels: one.checkpoints[-1] for labels, one in models.items() if one.checkpoints}
    yield "checkpoint_step", "gauge", {labels: one.step for labels, one in kept.items()}
    yield "checkpoint_timestamp_seconds", "gauge", {labels: one.at for labels, one in kept.items()}
    pushed = {labels: one.hub_failures for labels, one in models.items() if one.hub}
    yield "hub_failures_total", "counter", {labels: float(count) for labels, count in pushed.items()}


def _peers(models: dict[Labels, CollaborationView]) -> dict[Labels, float]:
    counts: dict[Labels, float] = {}
    for labels, one in models.items():
        counts[(*labels, ("role", "trainer"))] = one.trainers
        counts[(*labels, ("role", "catching up"))] = one.catching_up
        counts[(*labels, ("role", "assistant"))] = one.assistants
    return counts


STYLE = """
svg polyline { stroke: var(--trainer); }
.trainer { fill: var(--trainer); background: var(--trainer); }
.catching { fill: var(--catching); background: var(--catching); }
.assistant { fill: var(--assistant); background: var(--assistant); }
.forming { fill: var(--forming); background: var(--forming); }
.lost { fill: var(--lost); background: var(--lost); } svg .name { fill: var(--text); } svg .away { opacity: .55; }
"""

WIDTH = 760

ROW = 20

NAMES = 140

"""Width of the names before a timeline."""

SPEEDS = 75

"""Width of what stands behind it."""

FIGURES = 285

"""Width of what stands behind a round."""

MAX_ROWS = 40

MAX_SHOWN_S = 6 * 3600.0

SHOWN_ROUNDS = 15

CLASSES = {"trainer": "trainer", "catching up": "catching", "assistant": "assistant"}


def render_page(view: View) -> str:
    """The whole page."""
    lost = "The backbone does not answer; this is what it said last."
    return page(text(view.run), render_live(view), lost=lost, style=STYLE)


def render_live(view: View) -> str:
    """The part of the page that changes."""
    traffic = f"{size(view.sent_bytes)} sent, {size(view.received_bytes)} received"
    return (
        f"<h1>{text(view.run)}</h1>"
        f'<p class="soft">{text(view.backbone)}: {text(view.reached)}; {count(view.linked, "peer")} linked; '
        f"up {duration(view.at - view.since)}; {traffic}</p>"
        + "".join(
            _collaboration(one, view.at, alone=len(view.collaborations) == 1) for one in view.collaborations
        )
        + _contributions(view)
    )


def _collaboration(one: CollaborationView, now: float, *, alone: bool) -> str:
    head = "" if alone else f"<h2>{text(one.name)}</h2>"
    return (
        f"{head}{_standing_in(one)}{_tiles(one, now)}{_loss(one)}"
        f'<div class="two">{_rate(one)}{_checkpoints(one, now)}</div>'
        f"{_timeline(one.peers, now)}{_waterfall(one.rounds)}"
    )


def _standing_in(one: CollaborationView) -> str:
    if one.standing_in is None:
        return ""
    return (
        f'<p class="warning">Nobody trains now. Whoever joins goes on from the checkpoint of step '
        f"{one.standing_in:,}.</p>"
    )


def _tiles(one: CollaborationView, now: float) -> str:
    last = one.checkpoints[-1] if one.checkpoints else None
    rates = one.rates
    shown = {
        "global step": f"{one.step:,}",
        "loss": "–" if one.loss is None else f"{one.loss:.3f}",
        "samples/s": f"{one.samples_per_s:,.1f}",
        "steps/min": f"{rates[-1][1]:,.1f}" if rates and one.trainers else "–",
        "trainers": f"{one.trainers}" + (f" (+{one.catching_up})" if one.catching_up else ""),
        "last saved": "–" if last is None else f"{duration(now - last.at)} ago",
    }
    return tiles(shown)


def _loss(one: CollaborationView) -> str:
    history = [(point.step, point.loss) for point in one.points]
    spread = [(point.step, point.low, point.high) for point in one.points]
    reference = sahajbert() if one.reference == "sahajbert" else None
    chart = render_svg(history, reference, spread=spread, width=WIDTH, height=260)
    title = "Loss: median of the trainers" + (f", over the band of {reference.name}" if reference else "")
    verdict = judge(history, reference) if reference else None
    said = (
        f'<p class="{"warning" if verdict.warning else "good"}">{text(verdict.text)}</p>' if verdict else ""
    )
    return card(title, (chart or '<p class="soft">No two losses were told yet.</p>') + said)


def _rate(one: CollaborationView) -> str:
    chart = render_svg(one.rates, label="steps per minute", from_zero=True, width=WIDTH // 2, height=190)
    return card("Steps per minute", chart or '<p class="soft">Not known yet.</p>')


def _checkpoints(one: CollaborationView, now: float) -> str:
    rows = [
        (
            f"step {kept.step:,}",
            "" if kept.loss is None else f"{kept.loss:.3f}",
            size(kept.size_bytes),
            f"{duration(now - kept.at)} ago",
        )
        for kept in reversed(one.checkpoints[-5:])
    ]
    hub = f'<p class="soft">{text(one.hub)}</p>' if one.hub else ""
    return card("Checkpoints", table(("", "loss", "size", "saved"), rows) + hub)


def _timeline(peers: Sequence[PeerLine], now: float) -> str:
    shown = [line for line in peers if now - line.spans[-1].until < MAX_SHOWN_S][:MAX_ROWS]
    if not shown:
        return ""
    begin = max(min(line.spans[0].since for line in shown), now - MAX_SHOWN_S)
    begin = min(begin, now - 60.0)
    scale = (WIDTH - NAMES - SPEEDS) / (now - begin)
    rows = [_line(line, y * ROW, begin, scale) for y, line in enumerate(shown)]
    bottom = ROW * len(shown)
    axis = [
        f'<text x="{WIDTH - SPEEDS - minutes * 60 * scale:.0f}" y="{bottom + 15}" text-anchor="middle">'
        f"{'now' if not minutes else f'−{minutes:g} min'}</text>"
        for minutes in ticks(0, (now - begin) / 60, 6)
    ]
    more = f'<p class="soft">and {len(peers) - len(shown)} more</p>' if len(peers) > len(shown) else ""
    svg = _svg(bottom + 20, [*rows, *axis], "peers over time")
    return card(f"Peers {legend(CLASSES.items())}", svg + more)


def _line(line: PeerLine, y: int, begin: float, scale: float) -> str:
    bars = []
    for span in line.spans:
        start = max(span.since, begin)
        width = max((span.until - start) * scale, 2.0)
        if span.until >= begin:
            bars.append(
                f'<rect class="{CLASSES.get(span.role, "forming")}" x="{NAMES + (start - begin) * scale:.1f}" '
                f'y="{y + 4}" width="{width:.1f}" height="{ROW - 8}" rx="2"><title>{text(span.role)}, '
                f"{duration(span.until - span.since)}</title></rect>"
            )
    speed = f"{line.samples_per_s:,.1f}/s" if line.samples_per_s else "" if line.here else "gone"
    return (
        f'<g class="{"here" if line.here else "away"}"><text class="name" x="0" y="{y + 14}">{text(line.name, 20)}'
        f"<title>{text(line.id)}</title></text>{''.join(bars)}"
        f'<text x="{WIDTH}" y="{y + 14}" text-anchor="end">{speed}</text></g>'
    )


def _waterfall(rounds: Sequence[RoundRow]) -> str:
    """The last rounds, newest first: forming the group, exchange with the reducers, recovery of what was lost."""
    shown = list(reversed(rounds[-SHOWN_ROUNDS:]))
    if not shown:
        return ""
    longest = max(one.forming_s + one.exchange_s + one.recovery_s for one in shown) or 1.0
    rows, wide = [], WIDTH - NAMES - FIGURES
    for y, one in enumerate(shown):
        at, bars = float(NAMES), []
        phases = {"forming": one.forming_s, "trainer": one.exchange_s, "lost": one.recovery_s}
        for phase, seconds in phases.items():
            width = wide * seconds / longest
            bars.append(
                f'<rect class="{phase}" x="{at:.1f}" y="{y * ROW + 4}" width="{width:.1f}" height="{ROW - 8}"/>'
            )
            at += width
        lost = f", {count(one.spans_lost, 'span')} lost" if one.spans_lost else ""
        total = one.forming_s + one.exchange_s + one.recovery_s
        rows.append(
            f'<text class="name" x="0" y="{y * ROW + 14}">step {one.step:,}: {count(one.peers, "peer")}</text>'
            f'{"".join(bars)}<text x="{at + 8:.0f}" y="{y * ROW + 14}">{total:.2f} s, {one.samples:,.0f} samples, '
            f"{size(one.moved_bytes)}{lost}</text>"
        )
    names = legend((("forming", "forming"), ("exchange", "trainer"), ("recovery", "lost")))
    return card(f"Rounds that this peer took part in {names}", _svg(ROW * len(shown), rows, "last rounds"))


def _contributions(view: View) -> str:
    rows = [
        (
            text(f"{one.name} ({one.id[:8]})"),
            f"{one.samples:,.0f}",
            size(one.reduced_bytes),
            size(one.relayed_bytes),
        )
        for one in view.contributions[:MAX_ROWS]
    ]
    if not rows:
        return ""
    return card("Contributions", table(("peer", "samples", "reduced", "relayed"), rows))


def _svg(height: int, parts: Iterable[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" width="100%" role="img" aria-label="{label}" font-size="12">'
        f"{''.join(parts)}</svg>"
    )


FRESH_S = 1.0

ANSWERS_PER_S = 100

"""For one visitor; who comes too often is told so. See `colab_swarm.net.addresses`."""

HEADERS = {
    "Content-Security-Policy": content_security_policy(),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

Render = Callable[[View], str | bytes]

PAGES: dict[str, tuple[str, Render]] = {
    "/": ("text/html", render_page),
    "/live": ("text/html", render_live),
    "/metrics": ("text/plain", render_prometheus),
    "/api/run": ("application/json", msgspec.json.encode),
    "/api/contributions": ("application/json", lambda view: msgspec.json.encode(view.contributions)),
}

PARTS = ("points", "peers", "rounds", "checkpoints")

"""Of a collaboration, under ``/api/NAME/PART``."""


class DashboardServer:
    """Serves what ``look()`` returns.

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
        """Listen no more."""
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _bounded(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        now = asyncio.get_running_loop().time()
        if self._view is None or now - self._viewed_at >= FRESH_S:
            self._view, self._viewed_at = self._look(), now
            self._answers.clear()
        if not self._visits.admit(source_of(request), now):
            return web.Response(
                status=429, text="too often: try again in a second", headers={"Retry-After": "1"}
            )
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
