"""The account behind a token, from a stand-in for the Hub on loopback."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.errors import PeerUnreachable
from colab_swarm.net.huggingface import Account, _account, whoami
from tests.net.swarm import run

TOKEN = "hf_secretsecret"
ALICE = {"type": "user", "name": "alice", "orgs": [{"name": "neuropark", "id": "1"}], "auth": {"type": "x"}}


@asynccontextmanager
async def hub(answer: Any = ALICE, status: int = 200) -> AsyncIterator[str]:
    """The address of a Hub that knows one token."""

    async def answer_whoami(request: web.Request) -> web.Response:
        if request.headers["Authorization"] != f"Bearer {TOKEN}":
            return web.json_response({"error": "Invalid credentials"}, status=401)
        text = answer if isinstance(answer, str) else json.dumps(answer)
        return web.Response(text=text, status=status, headers={"Location": "/elsewhere"})

    app = web.Application()
    app.router.add_get("/api/whoami-v2", answer_whoami)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_a_token_names_its_user_and_organisations(monkeypatch: pytest.MonkeyPatch) -> None:
    async with hub() as address:
        monkeypatch.setenv("HF_ENDPOINT", address + "/")
        assert await whoami(TOKEN) == Account("alice", ("neuropark",))
        assert await whoami("hf_other") is None


async def test_a_token_of_an_organisation_has_no_account() -> None:
    async with hub({"type": "org", "name": "neuropark"}) as address:
        assert await whoami(TOKEN, endpoint=address) is None


@pytest.mark.parametrize(
    ("answer", "status"),
    [("<html>", 200), (ALICE, 503), (ALICE, 302), ({"orgs": 3}, 200), ("x" * 2_000_000, 200)],
)
def test_a_hub_in_trouble_is_reported_without_the_token(
    answer: Any, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with hub(answer, status) as address:
            with pytest.raises(PeerUnreachable, match="try again later") as error:
                await whoami(TOKEN, endpoint=address)
            assert TOKEN not in repr(error.value)

    with caplog.at_level(logging.DEBUG):
        run(main())
    assert TOKEN not in caplog.text


async def test_a_missing_hub_is_reported() -> None:
    async with hub() as address:
        pass
    with pytest.raises(PeerUnreachable, match="does not answer"):
        await whoami(TOKEN, endpoint=address)


@pytest.mark.parametrize("token", ["", "two words", "line\nbreak", "x" * 600])
async def test_what_cannot_be_a_token_is_not_sent(token: str) -> None:
    assert await whoami(token, endpoint="http://127.0.0.1:1") is None


@given(st.binary(max_size=300))
def test_any_answer_is_understood_or_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not an answer"):
        _account(data)
