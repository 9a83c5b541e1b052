"""The status page of a backbone or a coordinator, and the page behind an invitation. Read-only.

A snapshot is taken at most once a second, so many visitors cost little. A page loads ``/live`` again every three
seconds; its policy forbids the browser to load anything else.
"""

import asyncio
import base64
import contextlib
import hashlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from string import Template
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec
from aiohttp import web

from colab_swarm.markup import text
from colab_swarm.net.addresses import VisitorLogger, listening_socket, source_of
from colab_swarm.net.patience import VisitLimit
from colab_swarm.net.visitors import ConnectionRoom
from colab_swarm.notebook.theme import Document
from colab_swarm.project import COPY, install, notebook_links
from colab_swarm.runtime import loop_now

S = TypeVar("S")
Answering: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]
Sample: TypeAlias = tuple[str, Mapping[str, str], float]
"""Name, labels and value of a metric; names of counters end in ``_total``."""
FRESH_S = 1.0
ANSWERS_PER_S = 100  # most answers to one visitor; see `colab_swarm.net.addresses`
MAX_CONNECTIONS = 512  # most connections of all visitors
IDLE_S = 75.0  # time limit for a silent connection, and for the head of a request
PATHS = ("/", "/live", "/metrics", "/status.json")
SCRIPT = """
const live = document.getElementById("live"), lost = document.getElementById("lost");
setInterval(async () => {
  try {
    const answer = await fetch("live", {signal: AbortSignal.timeout(5000)});
    if (answer.ok) live.innerHTML = await answer.text();
    lost.style.display = answer.ok || answer.status == 429 ? "none" : "block";
  } catch { lost.style.display = "block"; }
}, 3000);
"""
# the invitation stays in the browser, because no request contains the part after the #
_JOIN_SCRIPT = """
const copy = document.getElementById("copy"), line = document.getElementById("line");
document.getElementById(location.hash.includes(".") ? "whole" : "cut").hidden = false;
line.textContent = location.href;
copy.addEventListener("click", async () => {
  try { await navigator.clipboard.writeText(location.href); copy.textContent = "Copied"; }
  catch { getSelection().selectAllChildren(line); copy.textContent = "Press Ctrl+C"; }
});
"""
_RUN_NOW = '<h2>The run now</h2><div id="lost">The backbone does not answer.</div><div id="live"></div>'


@dataclass(eq=False)
class StatusPage(Generic[S]):
    """Answers requests for `PATHS` by the snapshot that ``look()`` returns."""

    look: Callable[[], S]
    draw: Callable[[S], Sequence[Document]]  # returns the views of a snapshot; the first one names the page
    metrics: Callable[[S], Iterable[Sample]]  # returns the figures of a snapshot for Prometheus
    host: str  # the kind of server, such as ``backbone``
    url: str = field(default="", init=False)  # address of the page if it has its own server

    def __post_init__(self) -> None:
        self._seen_at = float("-inf")
        self._visits = VisitLimit(ANSWERS_PER_S)
        self._answers: dict[
            str, tuple[str, str | bytes]
        ] = {}  # type and body of each path's answer, for one snapshot
        self._runner: web.AppRunner | None = None
        self.routes = [web.get(path, self.answer) for path in PATHS]

    async def start(self, host: str, port: int) -> None:
        """Serve only this page; port 0 chooses a free port."""
        app = web.Application(client_max_size=1024)
        app.add_routes(self.routes)
        self._runner, self.url = await listen(app, host, port, lingering_time=0.0)

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def answer(self, request: web.BaseRequest) -> web.Response:
        """Answer a browser or a program that asks for one of `PATHS`."""
        now = loop_now()
        path = request.path
        if not self._visits.admit(source_of(request), now):
            return web.Response(status=429, text="try again in a second", headers={"Retry-After": "1"})
        if now - self._seen_at >= FRESH_S:
            self._seen = self.look()
            self._seen_at = now
            self._answers.clear()
        if path not in self._answers:
            self._answers[path] = self.render(self._seen, path)
        kind, body = self._answers[path]
        return _response(body, kind, SCRIPT)

    def render(self, snapshot: S, path: str = "/") -> tuple[str, str | bytes]:
        if path == "/status.json":
            return "application/json", msgspec.json.encode(snapshot)
        if path == "/metrics":
            return "text/plain", _exposition(self.metrics(snapshot))
        views = self.draw(snapshot)
        title = text(views[0].title)
        live = f"<h1>{title}</h1>{''.join([view.html() for view in views])}"
        if path == "/live":
            return "text/html", live
        return "text/html", _filled("page.html", title=title, live=live, host=self.host, script=SCRIPT)


class _Runner(web.AppRunner):
    """Limits the connections of its application. A connection is idle while it waits for its next request."""

    def __init__(self, app: web.Application, **options: Any) -> None:
        self._room = ConnectionRoom(most_connections())

        @web.middleware
        async def stay(request: web.Request, handler: Answering) -> web.StreamResponse:
            with self._room.busy(request.protocol):
                return await handler(request)

        app.middlewares.insert(0, stay)
        super().__init__(app, access_log=None, logger=VisitorLogger(), **options)

    @property
    def server(self) -> Any:
        """The factory that makes the protocol of a new connection."""
        serve = super().server
        if serve is None:
            return None

        def enter() -> asyncio.BaseProtocol:
            connection = serve()
            self._room.enter(connection)
            return connection

        return enter


def most_connections() -> int:
    """Return how many connections visitors may have: a small part of the files that this process may open."""
    with contextlib.suppress(ImportError):
        import resource

        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files != resource.RLIM_INFINITY:
            return min(MAX_CONNECTIONS, max(1, files // 4))
    # Windows has no limit to ask for
    return MAX_CONNECTIONS


async def listen(app: web.Application, host: str, port: int, **options: Any) -> tuple[web.AppRunner, str]:
    """Serve an application until its runner is cleaned up; return the runner and the address, or raise `PortError`.

    Unknown clients may connect. If there are more than `most_connections` connections, the oldest idle connection of
    the network with the most connections is closed.
    """
    runner = _Runner(app, keepalive_timeout=IDLE_S, **options)
    await runner.setup()
    try:
        await web.SockSite(runner, listening_socket(host, port)).start()
    except BaseException:
        await runner.cleanup()
        raise
    if host in ("", "0.0.0.0", "::"):
        host = "127.0.0.1"
    if ":" in host:
        host = f"[{host}]"
    return runner, f"http://{host}:{runner.addresses[0][1]}/"


def join_page(run: str, *, live: bool) -> Callable[[web.BaseRequest], Awaitable[web.Response]]:
    """Return a function that answers a browser that follows an invitation to ``run``.

    The page names the run. It has buttons that copy the invitation and open the notebook. If ``live``, it also shows
    ``/live`` and refreshes it.
    """
    script = _JOIN_SCRIPT
    if live:
        script += SCRIPT
    links = ""
    for name, url in notebook_links("swarm").items():
        links += f'<a class="button" href="{text(url)}" rel="noopener">Open in {name}</a> '
    body = _filled(
        "invited.html",
        run=text(run),
        notebook=links or f"Open <code>notebooks/swarm.ipynb</code> in {COPY}.",
        install=text(install("train,notebook"), 1000),
        now=_RUN_NOW if live else "",
        script=script,
    )

    async def answer(request: web.BaseRequest) -> web.Response:
        return _response(body.encode(), "text/html", script)

    return answer


def _response(body: str | bytes, kind: str, script: str) -> web.Response:
    """Return an answer whose policy lets the browser only run this one script and fetch from the same server."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    headers = {
        "Content-Security-Policy": (
            f"default-src 'none'; script-src 'sha256-{digest}'; frame-ancestors 'none'; style-src 'unsafe-inline'; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'"
        ),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }
    return web.Response(body=body, content_type=kind, charset="utf-8", headers=headers)


def _filled(name: str, **parts: str) -> str:
    template = Template(files("colab_swarm").joinpath(name).read_text(encoding="utf-8"))
    return template.substitute(parts)


def _exposition(samples: Iterable[Sample]) -> str:
    """Return the metrics in the text format of Prometheus. Of samples with equal names and labels the last is used."""
    metrics: dict[str, dict[str, float]] = {}
    escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    for name, labels, value in samples:
        pairs = [f'{label}="{words.translate(escapes)}"' for label, words in labels.items()]
        metrics.setdefault(name, {})[",".join(pairs)] = value
    text = ""
    for name, values in metrics.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        text += f"# TYPE colab_swarm_{name} {kind}\n"
        for label_text, value in values.items():
            text += f"colab_swarm_{name}{{{label_text}}} {float(value)!r}\n"
    return text
