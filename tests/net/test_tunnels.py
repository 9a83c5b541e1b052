"""Tunnels by stand-ins for the ngrok and cloudflared programs, whose edge is a port on loopback."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from colab_swarm.errors import TunnelError
from colab_swarm.events import EventLog, Notice
from colab_swarm.net import tunnels
from colab_swarm.net.tunnels import Tunnel, TunnelSettings, probe, settings_of
from tests.net import agents
from tests.net.swarm import Echo, peers, served, until

TOKEN = "2abcDEFsecretTOKEN"
PROCESSES = Path("/proc")
needs_posix = pytest.mark.skipif(not PROCESSES.exists(), reason="the stand-ins are scripts; /proc finds them")
pytestmark = needs_posix


def running(folder: Path) -> list[int]:
    """Processes that the test has started: the folder is in their environment."""
    pids = [int(entry.name) for entry in PROCESSES.glob("[0-9]*")]
    return [pid for pid in pids if str(folder).encode() in read(pid, "environ")]


def agent_of(folder: Path, *, guardian: bool = False) -> int:
    (found,) = [pid for pid in running(folder) if (b"sys.stdin" in read(pid, "cmdline")) == guardian]
    return found


def read(pid: int, what: str) -> bytes:
    try:
        return (PROCESSES / str(pid) / what).read_bytes()
    except OSError:
        return b""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the stand-ins are; no user's configuration and no token is in sight."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(tunnels, "CHECK_S", 0.05)
    monkeypatch.setenv("NGROK_AUTHTOKEN", "of the environment, not used")
    return tmp_path


def ngrok(folder: Path, token: str = TOKEN, quota_bytes: float | None = 1e9) -> TunnelSettings:
    agent = agents.install("ngrok", folder)
    return TunnelSettings("ngrok", auth_token=token, agent=agent, quota_bytes=quota_bytes)


@asynccontextmanager
async def tunnel(settings: TunnelSettings, port: int = 9, **more: object) -> AsyncIterator[Tunnel]:
    wiring = {"on_change": lambda address: None, "events": EventLog(), "sent_bytes": lambda: 0, **more}
    opened = await Tunnel(settings, port, **wiring).open()
    try:
        yield opened
    finally:
        await opened.close()


@pytest.mark.slow
async def test_peers_link_through_a_tunnel_again_when_its_agent_is_killed(folder: Path) -> None:
    async def call_through(address: str) -> None:
        bob.addresses = (address,)
        alice.learn(bob.contact)
        assert await alice.call(bob.id, Echo(bytes(200_000)), Echo, timeout_s=10) == Echo(bytes(200_000))

    changes: asyncio.Queue[str | None] = asyncio.Queue()
    events = EventLog()
    async with peers("bob") as (bob,), peers("alice", listen=False) as (alice,):
        settings = ngrok(folder)
        async with tunnel(settings, bob.port, on_change=changes.put_nowait, events=events) as opened:
            assert opened.address is not None
            await call_through(opened.address)
            assert TOKEN.encode() not in read(agent_of(folder), "cmdline")
            files = [path for path in folder.rglob("*") if path.is_file()]
            assert not any(TOKEN.encode() in path.read_bytes() for path in files)
            before = opened.address
            os.kill(agent_of(folder), signal.SIGKILL)
            assert await changes.get() is None
            assert await changes.get() == opened.address != before
            await until(lambda: bob.id not in alice.linked())
            await call_through(opened.address)
    assert ["lost" in change.text for change in events.recent(Notice)] == [False, True, False]
    assert running(folder) == []


@pytest.mark.slow
async def test_an_agent_that_hangs_or_leads_nowhere_is_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunnels, "PROBE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(tunnels, "PROBE_S", 0.05)
    events = EventLog()
    changes: asyncio.Queue[str | None] = asyncio.Queue()
    more = {"on_change": changes.put_nowait, "events": events}
    async with peers("bob") as (bob,):
        async with tunnel(ngrok(folder), bob.port, **more):
            os.kill(agent_of(folder), signal.SIGSTOP)
            assert await changes.get() is None and await changes.get() is not None
            assert agent_of(folder), "only one runs"
        async with tunnel(ngrok(folder), **more):  # no peer listens at that port
            assert await changes.get() is None
    faults = iter(["off", "off", None, "off", "off", "off"])
    monkeypatch.setattr("colab_swarm.net.tunnels.probe", lambda address: asyncio.sleep(0, next(faults)))
    monkeypatch.setattr(tunnels, "PROBE_S", 0.01)
    async with tunnel(ngrok(folder, quota_bytes=None), **more):
        assert await changes.get() is None and next(faults, "all three in a row") == "all three in a row"
    reasons = [change.text for change in events.recent(Notice) if "tunnel lost: " in change.text]
    assert reasons[0] == "tunnel lost: its public address does not lead here: TimeoutError"
    assert reasons[1].startswith("tunnel lost: its public address does not lead here: ngrok: ERR_NGROK_8012")


@pytest.mark.parametrize(
    ("token", "text"),
    [
        ("session-107", "does not accept this token .* get your token at .*ERR_NGROK_107"),
        ("session-9999", "docs/errors/err_ngrok_9999"),
        ("tunnel-8013", "card on file"),
        ("offline", "Kaggle: Settings, Internet on"),
        ("silent", "ngrok cannot be reached: .*no tunnel after 1 s"),
    ],
)
async def test_errors_of_ngrok_are_reported_with_their_fix_and_without_the_token(
    folder: Path, token: str, text: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("colab_swarm.net.tunnels.OPEN_TIMEOUT_S", 1.0)
    caplog.set_level(logging.DEBUG)
    with pytest.raises(TunnelError, match=text) as caught:
        async with tunnel(ngrok(folder, token)):
            pass
    assert "Your authtoken: " + token not in str(caught.value) + caplog.text
    assert caught.value.__context__ is None and running(folder) == []


async def test_without_token_or_agent_nothing_is_tried(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(text: str, *kind: Any, **settings: Any) -> None:
        with pytest.raises(TunnelError, match=text):
            async with tunnel(TunnelSettings(*kind, **settings)):
                pass

    await refused("secret NGROK_AUTHTOKEN .*ERR_NGROK_4018", "ngrok")
    await refused("/nowhere/ngrok: leave", "ngrok", auth_token="t", agent="/nowhere/ngrok")
    await refused("no cloudflared is at /nowhere", "cloudflared", agent="/nowhere/cloudflared")
    monkeypatch.setenv("PATH", "")
    await refused("releases/latest", "cloudflared")
    assert TOKEN not in repr(TunnelSettings("ngrok", auth_token=TOKEN))
    assert settings_of("cloudflared").auth_token is None
    with pytest.raises(ValueError, match="take 'ngrok' or 'cloudflared'"):
        TunnelSettings("carrier pigeon")  # type: ignore[arg-type]


async def test_the_quota_is_metered_from_the_opening_on(folder: Path) -> None:
    events, sent_bytes = EventLog(), [5_000.0]
    settings = ngrok(folder, quota_bytes=1000.0)

    def warnings() -> list[str]:
        return [one.text for one in events.recent(Notice) if "of the plan's" in one.text]

    async with tunnel(settings, events=events, sent_bytes=lambda: sent_bytes[0]) as opened:
        for used, warned in ((499, 0), (500, 1), (799, 1), (800, 2), (949, 2), (950, 3), (2000, 3)):
            sent_bytes[0] = 5_000 + used
            await until(lambda: len(warnings()) >= warned)  # noqa: B023 (awaited in the loop)
            opened._check_quota()
            assert len(warnings()) == warned, used
    assert warnings()[0] == "tunnel: 0 MB sent, 50% of the plan's 0 MB a month"


async def test_pyngroks_own_agent_is_taken_and_downloaded_if_there_is_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYNGROK_NGROK_PATH", raising=False)
    monkeypatch.setattr("pyngrok.installer.get_ngrok_cdn_url", lambda *_: "http://127.0.0.1:9/ngrok.tgz")
    settings = TunnelSettings("ngrok", auth_token=TOKEN)
    monkeypatch.setattr("pyngrok.conf.DEFAULT_NGROK_PATH", agents.install("ngrok", folder))
    async with tunnel(settings) as opened:
        assert str(opened.address).startswith("ws://127.0.0.1:")
    monkeypatch.setattr("pyngrok.conf.DEFAULT_NGROK_PATH", str(folder / "bin" / "ngrok"))
    with pytest.raises(TunnelError, match=r"Kaggle: Settings, Internet on.* downloading"):
        async with tunnel(settings):
            pass
    assert running(folder) == [], "also when closed at once"
    assert not (folder / ".config").exists() and not list(folder.rglob("ngrok.yml")), "the user's"


@pytest.mark.slow
async def test_cloudflared_is_opened_and_opened_again(folder: Path) -> None:
    changes: asyncio.Queue[str | None] = asyncio.Queue()
    settings = TunnelSettings("cloudflared", agent=agents.install("cloudflared", folder))
    async with tunnel(settings, on_change=changes.put_nowait) as opened:
        assert opened.address == "wss://calm-green-otter.trycloudflare.com"
        for guardian in (False, True):
            os.kill(agent_of(folder, guardian=guardian), signal.SIGKILL)
            assert await changes.get() is None and await changes.get() == opened.address
    assert running(folder) == []
    (folder / "refused").mkdir()
    refusing = TunnelSettings("cloudflared", agent=agents.install("cloudflared", folder / "refused"))
    with pytest.raises(TunnelError, match="429 Too Many Requests"):
        async with tunnel(refusing):
            pass


async def test_the_public_address_is_found_dead_or_alive() -> None:
    async with peers("bob") as (bob,):
        assert await probe(bob.contact.addresses[0]) is None
        address = bob.contact.addresses[0]
    assert "Connect" in (await probe(address) or "")

    async def reply(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=int(request.path[1:]))

    async with served(reply) as at:
        dead = [bool(await probe(f"ws://{at}/{status}")) for status in (404, 426, 499, 500)]
        assert dead == [True, False, False, True]


OPENER = """
import asyncio, sys
from colab_swarm.events import EventLog
from colab_swarm.net.tunnels import Tunnel, TunnelSettings
settings = TunnelSettings("ngrok", auth_token=sys.argv[1], agent=sys.argv[2])
async def main():
    await Tunnel(settings, 9, on_change=print, events=EventLog(), sent_bytes=lambda: 0).open()
asyncio.run(main())
"""


@pytest.mark.slow
async def test_an_agent_that_starts_dies_with_an_opening_given_up_and_with_its_killed_owner(
    folder: Path,
) -> None:
    one = Tunnel(ngrok(folder, "silent"), 9, on_change=print, events=EventLog(), sent_bytes=lambda: 0)
    opening = asyncio.create_task(one.open())
    await until(lambda: len(running(folder)) == 2)  # the agent and its guardian
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert running(folder) == []
    binary = agents.install("ngrok", folder)
    with subprocess.Popen([sys.executable, "-c", OPENER, "silent", binary]) as owner:
        await until(lambda: len(running(folder)) == 3)  # the owner, the agent and its guardian
        owner.kill()
    await until(lambda: not running(folder))
