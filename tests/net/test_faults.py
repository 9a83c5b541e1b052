"""Bytes damaged on the way, peers that stall, connections that go nowhere."""

import asyncio
import contextlib
import gc
import threading
import warnings

import pytest

from colab_swarm.errors import PeerLost, PeerUnreachable
from colab_swarm.net import handshake
from colab_swarm.net.handshake import Introduction
from colab_swarm.net.noise import MAX_HANDSHAKE_BYTES
from colab_swarm.net.peers import Contact, Stream
from tests.net.swarm import Echo, Piece, Talk, identity, items, peers, proxied, push, run, sink, until


@pytest.mark.parametrize(
    ("meddle", "reason"),
    [
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "does not decrypt"),
        (lambda data: data + data, "replayed"),
        (lambda data: b"\x82\xff" + bytes(4) + b"\x10\0\0\0" + data, "WebSocket frame"),
        (lambda data: b"\xf2" + data[1:], "WebSocket frame"),
        (lambda data: b"\x82\x80\0\0\0\0" + data, "does not decrypt"),
    ],
    ids=["garbled", "replayed", "oversized", "reserved bits", "empty"],
)
async def test_damaged_bytes_close_the_link(meddle, reason, caplog) -> None:  # type: ignore[no-untyped-def]
    async with peers("alice", "bob") as (alice, bob), proxied(alice, bob) as proxy:
        reasons: list[str] = []
        await alice.call(bob.id, Echo(), Echo, timeout_s=5)
        (link,) = bob.table.of(alice.id)
        bob.on_lost(lambda peer: reasons.append(link.lost or ""))
        proxy.meddle = meddle
        with pytest.raises(PeerLost):
            await alice.call(bob.id, Echo(b"damaged"), Echo, timeout_s=5)
            await alice.call(bob.id, Echo(b"after"), Echo, timeout_s=5)
        await until(lambda: bool(reasons))
        assert reason in reasons[0]
        with pytest.raises(PeerLost, match=reason):
            link.open_stream(Talk())


@pytest.mark.parametrize("status", ["101 Switching Protocols", "200 OK"])
async def test_a_web_server_at_the_address_is_no_peer(status: str) -> None:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 2\r\n\r\nhi".encode())
        writer.close()

    async with peers("alice") as (alice,):
        web = await asyncio.start_server(reply, "127.0.0.1", 0)
        bob = identity("bob").id
        alice.learn(Contact(bob, (f"ws://127.0.0.1:{web.sockets[0].getsockname()[1]}",)))
        with pytest.raises(PeerUnreachable, match=f"opens no link: HTTP status {status}"):
            await alice.call(bob, Echo(), Echo, timeout_s=5)
        web.close()


UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


def frame(opcode: int, body: bytes) -> bytes:
    """A final WebSocket frame whose mask is zero."""
    size = bytes((0x80 | len(body),)) if len(body) < 126 else b"\xfe" + len(body).to_bytes(2, "big")
    return bytes((0x80 | opcode,)) + size + bytes(4) + body


def upgraded(first: bytes) -> tuple[bytes, bytes]:
    """A request, and the first message of a handshake."""
    return UPGRADE, frame(2, first)


def hello() -> bytes:
    return Introduction(identity("eve"), addresses=(), run_id="", expected=identity("bob").id).start()


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        ((b"",), b""),
        ((b"GET / HT",), b""),
        ((UPGRADE,), b"101"),
        (upgraded(hello()), b"stalled"),
        (upgraded(b""), b"truncated"),
        (upgraded(b"x"), b"truncated"),
        (upgraded(b"x" * 40), b"this peer belongs to run"),
        (upgraded(b"x" * (MAX_HANDSHAKE_BYTES + 1)), b"is over 8192"),
    ],
)
async def test_a_caller_that_stalls_or_sends_garbage_is_dropped(
    sent: tuple[bytes, ...], answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_TIMEOUT_S", 0.05)
    async with peers("bob") as (bob,):
        reader, writer = await asyncio.open_connection("127.0.0.1", bob.port)
        writer.write(sent[0])
        got = b""
        with contextlib.suppress(ConnectionError):
            if len(sent) > 1:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(sent[1])
            while part := await reader.read(1000):  # until bob hangs up
                got += part
        assert answer in got
        writer.close()
        assert not bob.linked()


@pytest.mark.parametrize(
    "frames",
    [
        frame(9, b"") * 5000,
        frame(10, b"x") * 5000,
        frame(9, b"x" * 125),
        frame(1, b"text"),
        frame(2, b"x") * 5000,
    ],
    ids=["pings", "pongs", "a large ping", "a text", "messages"],
)
async def test_frames_before_the_handshake_end_the_connection_and_are_not_kept(frames: bytes) -> None:
    async with peers("bob") as (bob,):
        reader, writer = await asyncio.open_connection("127.0.0.1", bob.port)
        writer.write(UPGRADE)
        await reader.readuntil(b"\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            writer.write(frames)
            # well before the time limit of the handshake, and without a pong
            answer = await reader.read()
            assert bytes((0x8A,)) not in answer[:1]
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
        await stream.send(Piece(0))
        await until(lambda: outcome == ["item"])
        proxy.freeze()
        with pytest.raises(PeerLost, match=r"silent for \d\d? s"):
            await alice.call(bob.id, Echo(), Echo, timeout_s=5)
        with pytest.raises(PeerLost):
            await stream.receive(Piece)
        with pytest.raises(PeerLost):
            await stream.send(Piece(1))
        await until(lambda: not bob.linked() and outcome == ["item", "lost"])


async def test_keep_alives_hold_a_quiet_link_and_measure_the_round_trip() -> None:
    async with peers("alice", "bob", keep_alive_s=0.5) as (alice, bob):
        await alice.call(bob.id, Echo(), Echo, timeout_s=5)
        before = alice.statistics(bob.id)
        await until(lambda: alice.statistics(bob.id).received_bytes > before.received_bytes)
        assert len(alice.table.of(bob.id)) == 1
        assert 0 < (alice.statistics(bob.id).rtt_s or 0) < 1


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
        assert 0.3 < seconds < 2.0  # 1.3 MB at 2 MB/s, after a burst of 0.2 MB
