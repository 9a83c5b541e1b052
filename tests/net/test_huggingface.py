"""The account behind a token, from a stand-in for the Hub on loopback."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from colab_swarm.errors import PeerUnreachable
from colab_swarm.net.membership import Account, whoami
from tests.net.swarm import run

TOKEN = "hf_secretsecret"
ALICE = {"type": "user", "name": "alice", "orgs": [{"name": "neuropark", "id": "1"}], "auth": {"type": "x"}}


@asynccontextmanager
async def hub(answer: Any = ALICE, status: int = 200) -> AsyncIterator[None]:
    """A Hub that knows one token."""

    async def answer_whoami(request: web.Request) -> web.Response:
        if request.headers["Authorization"] != f"Bearer {TOKEN}":
            return web.json_response({"error": "Invalid credentials"}, status=401)
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        return web.Response(body=body, status=status, headers={"Location": "/elsewhere"})

    app = web.Application()
    app.router.add_get("/api/whoami-v2", answer_whoami)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{runner.addresses[0][1]}/")
            yield
    finally:
        await runner.cleanup()


async def test_a_token_names_its_user_and_organisations() -> None:
    async with hub():
        assert await whoami(TOKEN) == Account("alice", orgs=(Account("neuropark"),))
        assert await whoami("hf_other") is None


async def test_a_token_of_an_organisation_has_no_account() -> None:
    async with hub({"type": "org", "name": "neuropark"}):
        assert await whoami(TOKEN) is None


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        *((answer, 200) for answer in (b"<html>", b"", b'{"name":"\xff"}', b"[" * 100_000, b"x" * 2_000_000)),
        *(({"orgs": 3}, 200), (ALICE, 503), (ALICE, 302)),
    ],
)
def test_a_hub_in_trouble_is_reported_without_the_token(
    answer: Any, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with hub(answer, status):
            with pytest.raises(PeerUnreachable, match="try again later") as error:
                await whoami(TOKEN)
            assert TOKEN not in repr(error.value)

    with caplog.at_level(logging.DEBUG):
        run(main())
    assert TOKEN not in caplog.text


async def test_a_missing_hub_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(PeerUnreachable, match="does not answer"):
        await whoami(TOKEN)


@pytest.mark.parametrize("token", ["", "two words", "line\nbreak", "x" * 600])
async def test_what_cannot_be_a_token_is_not_sent(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert await whoami(token) is None
