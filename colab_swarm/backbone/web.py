"""The dashboard's web server: read-only, and what it answers is made once a second at most."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from colab_swarm.backbone.config import Dashboard
from colab_swarm.backbone.page import render_live, render_page
from colab_swarm.backbone.prometheus import render_prometheus
from colab_swarm.backbone.view import View
from colab_swarm.markup import content_security_policy
from colab_swarm.net.visitors import VisitLimit, source_of

FRESH_S = 1.0
ANSWERS_PER_S = 100
"""For one visitor; who comes too often is told so. See `colab_swarm.net.visitors`."""
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
