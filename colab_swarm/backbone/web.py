"""The backbone's dashboard: a read-only web page, JSON and metrics for Prometheus, rendered once a second at most."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
from aiohttp import web

from colab_swarm.backbone.config import Dashboard
from colab_swarm.backbone.keeper import Checkpoint
from colab_swarm.backbone.observer import LossPoint, PeerLine
from colab_swarm.markup import Labels, content_security_policy, count, duration, exposition, page, size, text
from colab_swarm.net.addresses import VisitLimit, source_of
from colab_swarm.notebook.svg import curve
from colab_swarm.notebook.theme import Document

FRESH_S = 1.0
ANSWERS_PER_S = 100  # For one visitor; see `colab_swarm.net.addresses`
HEADERS = {
    "Content-Security-Policy": content_security_policy(),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class CollaborationView(msgspec.Struct, frozen=True):
    """One model of the run.

    Attributes:
        trainers, catching_up, assistants: present peers by role.
    """

    name: str  # of the collaboration
    step: int  # global step
    samples_per_s: float  # of all trainers
    trainers: int
    catching_up: int
    assistants: int
    points: tuple[LossPoint, ...]  # the loss, oldest first
    peers: tuple[PeerLine, ...]  # the present ones
    checkpoints: tuple[Checkpoint, ...]  # on disk, oldest first
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
        figures = {"step": one.step, "samples_per_second": one.samples_per_s}
        if one.points:
            figures["loss"] = one.points[-1].loss
        if one.checkpoints:
            saved = one.checkpoints[-1]
            figures |= {"checkpoint_step": saved.step, "checkpoint_timestamp_seconds": saved.at}
        if one.hub:
            figures["hub_failures_total"] = one.hub_failures
        for name, value in figures.items():
            metrics.setdefault(name, {})[labels] = value
        roles = {"trainer": one.trainers, "catching up": one.catching_up, "assistant": one.assistants}
        for role, present in roles.items():
            metrics.setdefault("peers", {})[*labels, ("role", role)] = present
    return exposition(
        (name, "counter" if name.endswith("_total") else "gauge", values) for name, values in metrics.items()
    )


def render_page(view: View) -> str:
    """Return the whole page."""
    lost = "The backbone does not answer. This is its last state."
    return page(text(view.run), render_live(view), lost=lost)


def render_live(view: View) -> str:
    """Return the part of the page that changes."""
    shown = Document(
        view.run,
        f"{view.backbone}: {view.reached}; {count(view.linked, 'peer')} linked; up {duration(view.at - view.since)}; "
        f"{size(view.sent_bytes)} sent, {size(view.received_bytes)} received",
        label="dashboard",
    )
    for one in view.collaborations:
        _draw(shown, one, view.at)
    return shown.html()


def _draw(shown: Document, one: CollaborationView, now: float) -> None:
    saved = one.checkpoints[-1] if one.checkpoints else None
    if one.standing_in is not None:
        where = f"New trainers continue from the checkpoint of step {one.standing_in:,}."
        shown.warn(f"There are no trainers now. {where}")
    shown.note(one.name)
    shown.figures(
        {
            "global step": f"{one.step:,}",
            "loss": f"{one.points[-1].loss:.3f}" if one.points else "–",
            "samples/s": f"{one.samples_per_s:,.1f}",
            "trainers": f"{one.trainers}" + f" (+{one.catching_up})" * bool(one.catching_up),
            "last saved": f"step {saved.step:,}\n{duration(now - saved.at)} ago" if saved else "–",
        }
    )
    drawn = curve([(point.step, point.loss) for point in one.points], width=760, height=260)
    shown.draw(drawn or '<p class="soft">Fewer than two losses reported yet.</p>')
    shown.table(
        ("peer", "role", "step", "samples/s"),
        one.peers,
        lambda peer: (
            f"{peer.name} ({peer.id[:8]})",
            peer.role,
            f"{peer.step:,}",
            f"{peer.samples_per_s:,.1f}",
        ),
        what="peers",
        numbers=(2, 3),
    )
    if one.hub:
        shown.note(one.hub)


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
            return "application/json", msgspec.json.encode(view)
        case ["api", name, "points"]:
            for one in view.collaborations:
                if one.name == name:
                    return "application/json", msgspec.json.encode(one.points)
    raise web.HTTPNotFound
