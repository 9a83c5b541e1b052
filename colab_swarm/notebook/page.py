"""The status page of a backbone or a coordinator: a view for browsers, the same figures for programs. Read-only.

A snapshot is taken once a second at most, so visitors cost nothing. `VisitLimit` counts the visits of each source.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import msgspec
from aiohttp import web

from colab_swarm.markup import Sample, content_security_policy, exposition, page, text
from colab_swarm.net.addresses import VisitLimit, source_of
from colab_swarm.notebook.theme import Document

S = TypeVar("S")
FRESH_S = 1.0
ANSWERS_PER_S = 100  # for one visitor; see `colab_swarm.net.addresses`
PATHS = ("/", "/live", "/metrics", "/status.json")
HEADERS = {
    "Content-Security-Policy": content_security_policy(),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class StatusPage(Generic[S]):
    """Answers requests for `PATHS` with what ``look()`` returns.

    Args:
        look: takes a snapshot.
        title: names it.
        draw: returns its views, one below the other.
        metrics: returns its figures for Prometheus.
        host: what answers, such as ``backbone``.

    Attributes:
        url: of the page, once it listens by itself.
    """

    def __init__(
        self,
        look: Callable[[], S],
        title: Callable[[S], str],
        draw: Callable[[S], Sequence[Document]],
        metrics: Callable[[S], Iterable[Sample]],
        *,
        host: str,
    ) -> None:
        self._look, self._title, self._draw, self._metrics, self._host = look, title, draw, metrics, host
        self._seen_at, self._visits = float("-inf"), VisitLimit(ANSWERS_PER_S)
        self._answers: dict[str, tuple[str, str | bytes]] = {}  # type and body by path, of one snapshot
        self._runner: web.AppRunner | None = None
        self.routes = [web.get(path, self._answer) for path in PATHS]
        self.url = ""

    async def start(self, host: str, port: int) -> None:
        """Listen without any other routes; port 0 chooses a free one.

        Raises:
            OSError: the port is taken.
        """
        app = web.Application(client_max_size=1024)
        app.add_routes(self.routes)
        self._runner, self.url = await listen(app, host, port)

    async def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        now, path = asyncio.get_running_loop().time(), request.path
        if not self._visits.admit(source_of(request), now):
            too_many = "too many requests: try again in a second"
            return web.Response(status=429, text=too_many, headers={"Retry-After": "1"})
        if now - self._seen_at >= FRESH_S:
            self._seen, self._seen_at = self._look(), now
            self._answers.clear()
        if path not in self._answers:
            self._answers[path] = self.render(self._seen, path)
        kind, body = self._answers[path]
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=HEADERS)

    def render(self, snapshot: S, path: str = "/") -> tuple[str, str | bytes]:
        """Return type and body of the answer for one of `PATHS`."""
        if path == "/status.json":
            return "application/json", msgspec.json.encode(snapshot)
        if path == "/metrics":
            return "text/plain", exposition(self._metrics(snapshot))
        title = text(self._title(snapshot))
        live = f"<h1>{title}</h1>{''.join(view.html() for view in self._draw(snapshot))}"
        return "text/html", live if path == "/live" else page(title, live, host=self._host)


async def listen(app: web.Application, host: str, port: int, **options: Any) -> tuple[web.AppRunner, str]:
    """Serve an application until its runner is cleaned up; return the runner and the address for browsers.

    Raises:
        OSError: the port is taken.
    """
    runner = web.AppRunner(app, access_log=None, **options)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except BaseException:
        await runner.cleanup()
        raise
    shown = "127.0.0.1" if host in ("", "0.0.0.0", "::") else host
    return runner, f"http://{f'[{shown}]' if ':' in shown else shown}:{runner.addresses[0][1]}/"
