"""Damaged bytes, web servers and stalled callers; peers that shake hands and then use up memory, streams and time."""

import asyncio
import contextlib
import gc
import threading
import tracemalloc
import warnings

import aiohttp
import pytest
from aiohttp import web

from colab_swarm.errors import CallRefused, PeerError, PeerLost, PeerUnreachable
from colab_swarm.events import EventLog, Notice
from colab_swarm.net import handshake
from colab_swarm.net import link as answers
from colab_swarm.net.handshake import Introduction
from colab_swarm.net.link import LEAVE_TIMEOUT_S
from colab_swarm.net.noise import MAX_HANDSHAKE_BYTES
from colab_swarm.net.peers import Contact, Stream, short
from tests.net.swarm import Echo, Piece, Talk, identity, items, peers, proxied, push, run, served, sink, until


async def test_a_peer_that_never_leaves_loses_its_quiet_link() -> None:
    async with peers("alice", "bob", keep_alive_s=0.5) as (alice, bob):
        await alice.call(bob.id, Echo(), Echo, timeout_s=5)
        (near,), (far,) = bob.table.of(alice.id), alice.table.of(bob.id)
        far.leave = lambda: None  # type: ignore[method-assign]
        near.leave()
        await until(lambda: far.mux.peer_leaving)
        assert near.lost is None
        near.used_at -= LEAVE_TIMEOUT_S
        await until(lambda: near.lost is not None)


async def test_links_that_never_leave_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colab_swarm.net.node.MAX_LINKS", 2)
    async with peers("alice", "bob", "carol", "dave", "erin", "frank") as (alice, *callers):
        outcomes = []
        for caller in callers:
            try:
                await caller.call(alice.id, Echo(), Echo, timeout_s=5)
                (link,) = caller.table.of(alice.id)
                link.leave = lambda: None  # type: ignore[method-assign]
                outcomes.append("linked")
            except PeerError as error:
                outcomes.append("busy" if "links, all busy" in str(error) else str(error))
        assert outcomes == ["linked"] * 4 + ["busy"]


async def test_handshakes_that_stall_after_the_first_message_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("colab_swarm.net.handshake.MAX_HANDSHAKES", 3)
    async with peers("alice") as (alice,), aiohttp.ClientSession() as session:
        held = []
        for _ in range(4):
            socket = await session.ws_connect(alice.contact.addresses[0])
            caller = Introduction(identity("bob"), addresses=(), run_id="", expected=alice.id)
            await socket.send_bytes(caller.start())
            held.append(socket)  # collected, it would close
            assert (await socket.receive()).type is aiohttp.WSMsgType.BINARY
        assert (await held[0].receive()).type is aiohttp.WSMsgType.CLOSED  # the oldest makes room
        for socket in held:
            await socket.close()


async def test_handlers_of_streams_given_up_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_TASKS", 3)
    release = asyncio.Event()

    async def brood(opening: Talk, stream: Stream) -> None:
        await release.wait()

    async with peers("alice", "bob") as (alice, bob):
        bob.serve_stream(Talk, brood)
        for _ in range(8):
            (await alice.stream(bob.id, Talk(), timeout_s=5)).reset()
        with pytest.raises(CallRefused, match="handlers still run"):
            await alice.call(bob.id, Echo(), Echo, timeout_s=5)
        (link,) = bob.table.of(alice.id)
        assert len(link.tasks) == 3
        release.set()
        await until(lambda: not link.tasks)
        assert await alice.call(bob.id, Echo(b"again"), Echo, timeout_s=5) == Echo(b"again")


@pytest.mark.parametrize("size", [100_000, 1])
async def test_streams_that_nobody_reads_take_bounded_memory_and_honest_ones_go_on(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "PEER_UNREAD_BYTES", 4 << 20)
    monkeypatch.setattr(answers, "UNREAD_BYTES", 6 << 20)
    release, events, held = asyncio.Event(), EventLog(), list[Stream]()

    async def wait(opening: Talk, stream: Stream) -> None:
        held.append(stream)
        await release.wait()

    async def fill(stream: Stream) -> None:
        with contextlib.suppress(PeerError):
            while True:
                await stream.send(Piece(0), bytes(size))

    async with peers("victim", events=events) as (victim,), peers("alice", "mallory", "sybil") as everyone:
        victim.serve_stream(Talk, wait)
        victim.serve_stream(Echo, sink)
        for one in everyone:
            one.learn(victim.contact)
        honest, *hostile = everyone
        early = await honest.stream(victim.id, Talk(), timeout_s=5)
        await early.send(Piece(0), bytes(1_000_000))
        tracemalloc.start()
        opened = [await one.stream(victim.id, Talk(), timeout_s=5) for one in hostile for _ in range(12)]
        filling = [asyncio.create_task(fill(stream)) for stream in opened]
        assert await push(await honest.stream(victim.id, Echo(), timeout_s=5), 100, 100_000) == 100
        await until(lambda: len(events.recent(Notice)) == 2)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        texts = str(events.recent(Notice))
        assert all(short(one.id) in texts for one in hostile) and short(honest.id) not in texts
        assert sum(stream.held_bytes for stream in held) <= answers.UNREAD_BYTES + answers.RECOUNT_BYTES
        assert next(one for one in held if one.peer == honest.id).held_bytes > 1_000_000
        assert most < 32 << 20, f"{most / 2**20:.1f} MiB, of 48 sent"
        for task in filling:
            task.cancel()
        await asyncio.gather(*filling, return_exceptions=True)
        release.set()


@pytest.mark.parametrize(
    ("meddle", "reason"),
    [
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "does not decrypt"),
        (lambda data: data + data, "replayed"),
        (lambda data: b"\xf2" + data[1:], "WebSocket frame"),
        (lambda data: b"\x82\x80\0\0\0\0" + data, "does not decrypt"),
    ],
    ids=["garbled", "replayed", "reserved bits", "empty"],
)
async def test_damaged_bytes_close_the_link(meddle, reason) -> None:  # type: ignore[no-untyped-def]
    async with peers("alice", "bob") as (alice, bob), proxied(alice, bob) as proxy:
        await alice.call(bob.id, Echo(), Echo, timeout_s=5)
        (link,) = bob.table.of(alice.id)
        proxy.meddle = meddle
        with pytest.raises(PeerLost):
            await alice.call(bob.id, Echo(b"damaged"), Echo, timeout_s=5)
            await alice.call(bob.id, Echo(b"after"), Echo, timeout_s=5)
        await until(lambda: link.lost is not None)
        with pytest.raises(PeerLost, match=reason):
            link.open_stream(Talk())


async def test_a_web_server_at_the_address_is_no_peer() -> None:
    async def reply(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(text="hi")

    async with peers("alice") as (alice,), served(reply) as at:
        bob = identity("bob").id
        alice.learn(Contact(bob, (f"ws://{at}",)))
        with pytest.raises(PeerUnreachable, match="opens no link: HTTP status 200 OK"):
            await alice.call(bob, Echo(), Echo, timeout_s=5)


UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


def frame(opcode: int, body: bytes) -> bytes:
    """A final WebSocket frame whose mask is zero."""
    size = bytes((0x80 | len(body),)) if len(body) < 126 else b"\xfe" + len(body).to_bytes(2, "big")
    return bytes((0x80 | opcode,)) + size + bytes(4) + body


HELLO = Introduction(identity("eve"), addresses=(), run_id="", expected=identity("bob").id).start()


@pytest.mark.parametrize(
    ("head", "frames", "answer", "stalls"),
    [
        pytest.param(b"GET / HT", b"", b"", True, id="no request"),
        pytest.param(UPGRADE, b"", b"stalled", True, id="silence"),
        pytest.param(UPGRADE, frame(2, HELLO), b"stalled", True, id="one message"),
        pytest.param(UPGRADE, frame(2, b"x" * 40), b"this peer belongs to run", False, id="garbage"),
        pytest.param(UPGRADE, frame(2, b"x" * (MAX_HANDSHAKE_BYTES + 1)), b"is over 8192", False, id="long"),
        pytest.param(UPGRADE, frame(9, b"") * 5000, b"", False, id="pings"),
    ],
)
async def test_a_caller_that_stalls_or_sends_garbage_is_dropped(
    head: bytes, frames: bytes, answer: bytes, stalls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience_s = 0.05 if stalls else 60.0  # garbage is not waited for
    monkeypatch.setattr(handshake, "HANDSHAKE_TIMEOUT_S", patience_s)
    async with peers("bob") as (bob,):
        reader, writer = await asyncio.open_connection("127.0.0.1", bob.port)
        writer.write(head)
        with contextlib.suppress(ConnectionError):
            if head == UPGRADE:
                assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
            writer.write(frames)
            got = await reader.read()  # until bob hangs up
            assert answer in got and not got.startswith(b"\x8a"), "no pong"
        writer.close()
        assert not bob.linked()


@pytest.mark.slow
async def test_a_half_open_link_is_given_up_and_no_stream_ends_short() -> None:
    outcome: list[str] = []

    async def collect(opening: Talk, stream: Stream) -> None:
        try:
            async for _ in items(stream):
                outcome.append("item")
        except PeerLost:
            outcome.append("lost")
            raise

    async with peers("alice", "bob", keep_alive_s=0.5) as (alice, bob), proxied(alice, bob) as proxy:
        bob.serve_stream(Talk, collect)
        stream = await alice.stream(bob.id, Talk(), timeout_s=5)
        before = alice.statistics(bob.id)
        await stream.send(Piece(0))
        await until(lambda: outcome == ["item"])
        await until(lambda: alice.statistics(bob.id).received_bytes > before.received_bytes)  # keep-alives
        assert 0 < (alice.statistics(bob.id).rtt_s or 0) < 1 and len(alice.table.of(bob.id)) == 1
        proxy.moving.clear()
        with pytest.raises(PeerLost, match=r"silent for \d\d? s"):
            await alice.call(bob.id, Echo(), Echo, timeout_s=5)
        with pytest.raises(PeerLost):
            await stream.receive(Piece)
        with pytest.raises(PeerLost):
            await stream.send(Piece(1))
        await until(lambda: not bob.linked() and outcome == ["item", "lost"])


def test_close_leaves_no_task_thread_or_socket() -> None:
    async def main() -> None:
        async with peers("alice", "bob") as (alice, bob), proxied(alice, bob):
            await asyncio.gather(*(alice.call(bob.id, Echo(), Echo, timeout_s=5) for _ in range(10)))
            await alice.call(alice.id, Echo(), Echo, timeout_s=5)
            await alice.close()
            await alice.close()

    gc.collect()  # what other tests left is not held against this one
    threads = threading.active_count()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(main())
        gc.collect()
    assert threading.active_count() == threads


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["upload_bps", "download_bps"])
async def test_a_bandwidth_limit_holds(limit: str) -> None:
    alice_limit = {} if limit == "download_bps" else {limit: 16e6}
    bob_limit = {limit: 16e6} if limit == "download_bps" else {}
    async with peers("alice", **alice_limit) as (alice,), peers("bob", **bob_limit) as (bob,):
        alice.learn(bob.contact)
        bob.serve_stream(Talk, sink)
        async with await alice.stream(bob.id, Talk(), timeout_s=5) as stream:
            began_at = asyncio.get_running_loop().time()
            await push(stream, 20)
            seconds = asyncio.get_running_loop().time() - began_at
        assert seconds > 0.3  # 1.3 MB at 2 MB/s, after a burst of 0.2 MB
