"""The status pages of backbone and coordinator: sound and harmless HTML, figures for programs, limits of the server."""

import asyncio
import base64
import contextlib
import html
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from colab_swarm.backbone.backbone import status_page
from colab_swarm.notebook.page import ANSWERS_PER_S, SCRIPT, StatusPage, join_page, listen
from colab_swarm.notebook.units_view import status_page as job_page
from colab_swarm.project import notebook_links
from colab_swarm.snapshot import SwarmSnapshot
from tests.backbone.views import EVIL, view
from tests.notebook.test_views import parsed
from tests.workunits.statuses import status

BACKBONE, COORDINATOR = status_page(view), job_page(status)
PAGES: list[tuple[StatusPage[Any], Any]] = [
    (BACKBONE, view()),
    (BACKBONE, view(steps=3, run=EVIL)),
    (BACKBONE, view(standing_in=2000)),
    (COORDINATOR, status()),
    (COORDINATOR, status(name=EVIL, fault=EVIL, finished=EVIL)),
]


@pytest.mark.parametrize(("page", "shown"), PAGES)
def test_a_page_is_well_formed_and_texts_of_others_are_only_text(page: StatusPage[Any], shown: Any) -> None:
    whole, live = (str(page.render(shown, path)[1]) for path in ("/", "/live"))
    elements = list(parsed(f"<div>{live}</div>").iter())
    assert "img" not in {element.tag for element in elements} and live in whole
    assert not any(name.startswith("on") for element in elements for name in element.attrib)
    assert whole.count("<script") == 1 and EVIL not in whole and SCRIPT in whole


@pytest.mark.parametrize(("page", "shown"), PAGES)
def test_the_figures_for_prometheus_are_well_formed(page: StatusPage[Any], shown: Any) -> None:
    kind, text = page.render(shown, "/metrics")
    line = re.compile(
        r'# TYPE \w+ (gauge|counter)|colab_swarm_\w+\{(\w+="([^"\\\n]|\\["\\n])*",?)+\} [-+0-9.e]+'
    )
    assert kind == "text/plain" and all(line.fullmatch(one) for one in str(text).splitlines())


def links(page: str) -> list[str]:
    return list(map(html.unescape, re.findall(r'(?:href|src|action)="([^"]*)"', page)))


async def joined(run: str, *, live: bool = False) -> str:
    answer = await join_page(run, live=live)(make_mocked_request("GET", "/join"))
    assert isinstance(answer.body, bytes)
    page = answer.body.decode()
    digest = base64.b64encode(
        sha256(page.split("<script>")[1].split("</script>")[0].encode()).digest()
    ).decode()
    assert f"script-src 'sha256-{digest}'" in answer.headers["Content-Security-Policy"]
    return page


@pytest.mark.parametrize("live", [False, True])
async def test_the_page_behind_an_invitation_runs_its_own_script_only(live: bool) -> None:
    page = await joined(EVIL, live=live)
    assert EVIL not in page and not re.search("<(img|iframe|form|link)", page)
    assert page.count("<script") == 1 and (SCRIPT in page) == ('id="live"' in page) == live


async def test_it_opens_the_notebook_of_the_known_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colab_swarm.project.repository", lambda: "https://github.com/alice/swarm")
    page = await joined("my-run")
    assert links(page) == list(notebook_links("swarm").values()) and "Open in Colab" in page
    assert "pip install &quot;colab-swarm[train,notebook] @ git+https://github.com/alice/swarm&quot;" in page
    monkeypatch.setattr("colab_swarm.project.repository", lambda: None)
    page = await joined("my-run")
    assert links(page) == [] and "<code>notebooks/swarm.ipynb</code> in your copy" in page


class Scene:
    def __init__(self, browser: aiohttp.ClientSession) -> None:
        self.looks, self.browser = 0, browser
        self.page = status_page(self.look)

    def look(self) -> tuple[SwarmSnapshot, ...]:
        self.looks += 1
        return view(evil="model")

    async def get(self, path: str, **options: Any) -> aiohttp.ClientResponse:
        answer = await self.browser.get(self.page.url + path, **options)
        await answer.read()
        return answer


@asynccontextmanager
async def served() -> AsyncIterator[Scene]:
    async with aiohttp.ClientSession() as browser:
        scene = Scene(browser)
        await scene.page.start("127.0.0.1", 0)
        try:
            yield scene
        finally:
            await scene.page.close()


@pytest.mark.real_time
async def test_page_json_and_metrics_are_served_read_only_and_locked_down() -> None:
    async with served() as scene:
        assert scene.page.url.startswith("http://127.0.0.1:")
        page = await scene.get("")
        assert page.status == 200 and page.content_type == "text/html"
        policy = page.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'") and "'sha256-" in policy
        assert "script-src 'unsafe" not in policy and page.headers["X-Content-Type-Options"] == "nosniff"
        (model,) = await (await scene.get("status.json")).json()
        assert model["run"] == "sahajbert" and model["step"] == 2400 and len(model["loss_history"]) == 300
        assert "colab_swarm_step" in await (await scene.get("metrics")).text()
        for path in ("api", "status.json/secrets", "__class__", "etc/passwd"):
            assert (await scene.get(path)).status == 404
        for verb in ("POST", "PUT", "DELETE", "PATCH"):
            async with scene.browser.request(verb, scene.page.url) as answer:
                assert answer.status == 405


@pytest.mark.real_time
async def test_many_browsers_cost_one_look_a_second_and_too_many_get_429() -> None:
    async with served() as scene:
        answers = await asyncio.gather(*(scene.get("live") for _ in range(2 * ANSWERS_PER_S)))
        statuses = [answer.status for answer in answers]
        assert statuses.count(200) <= ANSWERS_PER_S * scene.looks
        assert 429 in statuses or scene.looks > 1


@pytest.mark.real_time
@pytest.mark.parametrize("sent", [b"", b"GET / HT"])
async def test_a_silent_visitor_is_hung_up_on(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr("colab_swarm.notebook.page.IDLE_S", 0.05)
    async with served() as scene:
        port = int(scene.page.url.rstrip("/").rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        writer.close()


STRANGERS = {
    "silent": b"",
    "half a head": b"GET / HTTP/1.1\r\nHost: x\r\n",
    "between requests": b"GET /status.json HTTP/1.1\r\nHost: x\r\n\r\n",
    "a body that does not come": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n",
}


@pytest.mark.real_time
@pytest.mark.parametrize("sent", STRANGERS.values(), ids=STRANGERS)
async def test_idle_connections_of_one_address_take_no_room_from_others(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr("colab_swarm.notebook.page.MAX_CONNECTIONS", 8)
    ended = 0

    async def stay(port: int) -> None:
        nonlocal ended
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
        writer.write(sent)
        with contextlib.suppress(ConnectionError):
            while await reader.read(4096):
                pass
        ended += 1
        writer.close()

    async with served() as scene:
        port = int(scene.page.url.rstrip("/").rpartition(":")[2])
        friend = await scene.get("status.json")
        strangers = []
        for _ in range(20):
            strangers.append(asyncio.create_task(stay(port)))
            await asyncio.sleep(0)
            assert (await scene.get("status.json")).status == 200
        assert friend.status == 200
        async with asyncio.timeout(10):
            while ended < 12:
                await asyncio.wait(strangers, return_when=asyncio.FIRST_COMPLETED)
                strangers = [task for task in strangers if not task.done()]
        for task in strangers:
            task.cancel()
        await asyncio.gather(*strangers, return_exceptions=True)


@pytest.mark.real_time
async def test_a_request_under_way_stays_where_idle_connections_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colab_swarm.notebook.page.MAX_CONNECTIONS", 4)
    arrived, release = asyncio.Event(), asyncio.Event()

    async def slow(request: web.Request) -> web.Response:
        arrived.set()
        await release.wait()
        return web.Response(text="done")

    app = web.Application()
    app.router.add_get("/slow", slow)
    runner, url = await listen(app, "127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession() as browser, asyncio.timeout(10):
            answer = asyncio.create_task(browser.get(f"{url}slow"))
            await arrived.wait()
            writers = []
            for _ in range(12):
                _, writer = await asyncio.open_connection("127.0.0.1", runner.addresses[0][1])
                writers.append(writer)
            release.set()
            assert await (await answer).text() == "done"
            for writer in writers:
                writer.close()
    finally:
        await runner.cleanup()


async def test_an_empty_host_listens_at_one_port_of_ipv4_and_ipv6() -> None:
    async def greet(request: web.Request) -> web.Response:
        return web.Response(text="here")

    app = web.Application()
    app.router.add_get("/", greet)
    runner, url = await listen(app, "", 0)
    port = url.rsplit(":", 1)[1].rstrip("/")
    hosts = ["127.0.0.1"]
    if socket.has_dualstack_ipv6():
        hosts.append("[::1]")
    async with aiohttp.ClientSession() as session:
        for host in hosts:
            async with session.get(f"http://{host}:{port}/") as answer:
                assert await answer.text() == "here"
    await runner.cleanup()
