"""Attacks from outside, and on others through honest peers, at real links."""

import asyncio
import contextlib
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from colab_swarm.errors import CallRefused, PeerError
from colab_swarm.events import EventLog
from colab_swarm.net.handshake import MAX_HANDSHAKES
from colab_swarm.net.node import REDIAL_S
from colab_swarm.net.peers import Contact, PeerId
from colab_swarm.net.reachability import DialBack, DialledBack, ReachabilityWatch
from colab_swarm.notebook.page import StatusPage
from colab_swarm.notebook.theme import Document
from tests.net.swarm import Echo, candidates, peers, start, until

pytestmark = pytest.mark.real_time
IDLE = 2000  # half-open connections; a socket at each end: 4,000 of this process' files


async def hold_open(port: int, opened: Counter[str]) -> None:
    """An idle connection from another address; if it is dropped, another one 5 s later."""
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
            opened["in all"] += 1
            with contextlib.closing(writer):
                while await reader.read(4096):
                    pass
        await asyncio.sleep(5.0)


@pytest.mark.slow
async def test_late_joiners_enter_beside_two_thousand_idle_connections_from_one_address() -> None:
    opened = Counter[str]()
    joined = 0
    async with peers("alice") as (alice,):
        idle = [asyncio.create_task(hold_open(alice.port or 0, opened)) for _ in range(IDLE)]
        await until(lambda: opened["in all"] >= IDLE)
        for index in range(20):
            joiner = await start(f"dave {index}")
            joiner.learn(alice.contact)
            with contextlib.suppress(PeerError):
                await joiner.call(alice.id, Echo(b"in"), Echo, timeout_s=20)
                joined += 1
            await joiner.close()
        # The system queues some, which are accepted together.
        assert len(alice.listener._fresh.open) <= MAX_HANDSHAKES + 100
        for task in idle:
            task.cancel()
        await asyncio.gather(*idle, return_exceptions=True)
    assert joined >= 19  # 95 %


@contextlib.asynccontextmanager
async def listening(host: str) -> AsyncIterator[tuple[str, Counter[str]]]:
    """A victim: its address, and how often it was connected to."""
    hits = Counter[str]()

    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hits["connections"] += 1
        writer.close()

    server = await asyncio.start_server(count, host, 0)
    try:
        yield f"ws://{host}:{server.sockets[0].getsockname()[1]}", hits
    finally:
        server.close()


async def test_a_peer_that_is_dialled_back_elsewhere_is_so_only_at_its_own_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seen at a public address, it names its own, another one, and one of the honest peer's own machine."""
    async with peers("alice", "mallory") as (alice, mallory), listening("127.0.0.1") as (victim, hits):
        ReachabilityWatch(alice, candidates(), EventLog(), random.Random(1))
        await mallory.call(alice.id, Echo(), Echo, timeout_s=5)
        path = alice.path_to(mallory.id)
        assert path is not None
        elsewhere = ("ws://203.0.113.9:1", "ws://[2001:db8::1]:1", "ws://169.254.169.254:80")
        mallory_seen = replace(path, remote=("198.51.100.7", 5))
        monkeypatch.setattr(alice, "path_to", lambda peer: mallory_seen)
        answer = await mallory.call(alice.id, DialBack((victim, *elsewhere)), DialledBack, timeout_s=5)
        assert answer.outcomes == () and answer.seen_host == "198.51.100.7" and not hits


async def test_dial_backs_of_many_identities_at_one_host_are_bounded() -> None:
    names = [f"mallory {index}" for index in range(12)]
    async with peers("alice", *names) as (alice, *sybils), listening("127.0.0.1") as (victim, hits):
        ReachabilityWatch(alice, candidates(), EventLog(), random.Random(1))
        asked = 0
        began = asyncio.get_running_loop().time()
        for one in sybils:
            with contextlib.suppress(CallRefused):
                await one.call(alice.id, DialBack((victim,) * 16), DialledBack, timeout_s=5)
                asked += 1
        seconds = asyncio.get_running_loop().time() - began
        assert asked == 12 and 0 < hits["connections"] <= 8 * (2 + seconds)  # of 192


async def test_a_record_that_names_a_victim_has_it_dialled_ever_more_rarely() -> None:
    async with peers("alice") as (alice,), listening("127.0.0.3") as (victim, hits):
        alice.learn(Contact(PeerId(b"m" * 32), (victim,)))
        time, left_out = asyncio.get_running_loop().time, alice._unanswered
        began = time()
        while hits["connections"] < 5:  # two for each dial: aiohttp tries again
            await until(lambda: not left_out.ends(time()))
            for _ in range(50):
                with pytest.raises(PeerError):
                    await alice.call(PeerId(b"m" * 32), Echo(), Echo, timeout_s=5)
        assert time() - began >= (1 + 2) * REDIAL_S


GARBAGE = (
    b"",
    b"\x00" * 300,
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET /%zz HTTP/9.9\r\nHost: \xff\r\n\r\n",
    b"\x16\x03\x01" + bytes(90),  # TLS
)


async def test_garbage_connections_print_nothing_and_are_counted(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    rng = random.Random(17)
    async with peers("alice", "bob") as (alice, bob):
        for index in range(100):
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", alice.port)
                writer.write(GARBAGE[index % len(GARBAGE)] or rng.randbytes(rng.randrange(500)))
                writer.write_eof()
                await reader.read()
                writer.close()
        assert await bob.call(alice.id, Echo(b"on"), Echo, timeout_s=5) == Echo(b"on")
    bad = [one for one in caplog.records if one.name == "colab_swarm.http"]
    assert len([one for one in bad if one.levelno == logging.DEBUG]) >= 20
    assert len([one for one in bad if one.levelno == logging.INFO]) <= 1
    assert not [one for one in caplog.records if one.levelno > logging.INFO or one.exc_info]
    assert "Traceback" not in capfd.readouterr().err


async def test_a_body_that_nobody_wants_is_not_read(caplog: pytest.LogCaptureFixture) -> None:
    page = StatusPage[int](
        lambda: 1, lambda one: [Document("test", label="test")], lambda one: [], host="test"
    )
    await page.start("127.0.0.1", 0)
    port = int(page.url.rstrip("/").rpartition(":")[2])
    for method in (b"GET", b"POST"):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(method + b" / HTTP/1.1\r\nHost: a\r\nContent-Length: 200000000\r\n\r\n" + bytes(1000))
        status = int((await reader.readline()).split()[1])
        assert status == (200 if method == b"GET" else 405)
        async with asyncio.timeout(8):  # it used to wait 10 s for the rest
            while await reader.read(1 << 16):
                pass
        writer.close()
    await page.close()
    assert not [one for one in caplog.records if one.levelno > logging.INFO]
