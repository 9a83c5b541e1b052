"""The dashboard's server: its answers and its limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from colab_swarm.backbone.config import Dashboard
from colab_swarm.backbone.web import ANSWERS_PER_S, DashboardServer, View
from tests.backbone.views import view

pytestmark = pytest.mark.real_time


class Scene:
    """A server and a browser; ``looks`` counts how often the run was looked at."""

    def __init__(self, browser: aiohttp.ClientSession) -> None:
        self.looks = 0
        self.server = DashboardServer(self.look)
        self.browser = browser

    def look(self) -> View:
        self.looks += 1
        return view(evil="model")

    async def get(self, path: str) -> aiohttp.ClientResponse:
        answer = await self.browser.get(self.server.url + path)
        await answer.read()
        return answer


@asynccontextmanager
async def served() -> AsyncIterator[Scene]:
    async with aiohttp.ClientSession() as browser:
        scene = Scene(browser)
        await scene.server.start(Dashboard(port=0))
        try:
            yield scene
        finally:
            await scene.server.close()


async def test_page_json_and_metrics_are_served_and_locked_down() -> None:
    async with served() as scene:
        assert scene.server.url.startswith("http://127.0.0.1:")
        page = await scene.get("")
        assert page.status == 200 and page.content_type == "text/html"
        assert page.headers["Content-Security-Policy"].startswith("default-src 'none'")
        assert page.headers["X-Content-Type-Options"] == "nosniff"
        run = await (await scene.get("api/run")).json()
        assert run["run"] == "sahajbert" and run["collaborations"][0]["step"] == 2400
        points = await (await scene.get("api/model/points")).json()
        assert points[0]["step"] == 0 and len(points) == 300
        assert "colab_swarm_step" in await (await scene.get("metrics")).text()


@pytest.mark.parametrize(
    "path", ["api/model/secrets", "api/other/points", "api/model/__class__", "etc/passwd"]
)
async def test_other_paths_are_not_found(path: str) -> None:
    async with served() as scene:
        assert (await scene.get(path)).status == 404


async def test_the_server_is_read_only() -> None:
    async with served() as scene:
        for verb in ("POST", "PUT", "DELETE", "PATCH"):
            async with scene.browser.request(verb, scene.server.url) as answer:
                assert answer.status == 405


async def test_many_browsers_cost_one_look_a_second_and_too_many_get_429() -> None:
    async with served() as scene:
        answers = await asyncio.gather(*(scene.get("live") for _ in range(2 * ANSWERS_PER_S)))
        statuses = [answer.status for answer in answers]
        assert statuses.count(200) <= ANSWERS_PER_S * scene.looks
        assert 429 in statuses or scene.looks > 1


async def test_a_visitor_with_too_many_requests_shuts_out_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colab_swarm.net.addresses.VISIT_WINDOW_S", 600.0)  # all within one

    async with served() as scene:
        for _ in range(ANSWERS_PER_S + 1):
            headers = {"X-Forwarded-For": "198.51.100.7"}
            async with scene.browser.get(scene.server.url, headers=headers) as answer:
                last = answer.status
        assert last == 429
        assert (await scene.get("metrics")).status == 200


async def test_a_port_that_is_taken_is_an_error() -> None:
    async with served() as scene:
        other = DashboardServer(scene.look)
        port = int(scene.server.url.rstrip("/").rpartition(":")[2])
        with pytest.raises(OSError):
            await other.start(Dashboard(port=port))
        await other.close()
