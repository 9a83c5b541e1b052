"""Streams between real nodes."""

from __future__ import annotations

import array
import asyncio

import pytest

from colab_swarm.errors import CallRefused, PeerLost, ProtocolError
from colab_swarm.events import EventLog, Fault
from colab_swarm.net.peers import MAX_PAYLOAD_BYTES, Refusal, Stream, StreamEnded
from tests.net.swarm import Echo, Piece, Talk, items, peers, proxied, sink, start, until


async def test_items_arrive_whole_and_in_order_and_the_buffer_may_be_reused() -> None:
    got: list[tuple[int, bytes]] = []

    async def collect(opening: Talk, stream: Stream) -> None:
        async for piece, payload in items(stream):
            got.append((piece.index, bytes(payload)))
        await stream.send(Piece(len(got)))

    async with peers("alice", "bob") as (alice, bob):
        bob.serve_stream(Talk, collect)
        sizes = [0, 1, 65536, 70000, MAX_PAYLOAD_BYTES]
        async with await alice.stream(bob.id, Talk(), timeout_s=5) as stream:
            for index, size in enumerate(sizes):
                buffer = bytearray([index]) * size
                await stream.send(Piece(index), buffer)
                buffer[:] = bytes(size)
            await stream.end()
            assert (await stream.receive(Piece))[0].index == len(sizes)
        assert got == [(index, bytes([index]) * size) for index, size in enumerate(sizes)]


async def test_a_float_payload_arrives_aligned_and_stays_valid() -> None:
    held: list[memoryview] = []

    async def keep(opening: Talk, stream: Stream) -> None:
        async for _, payload in items(stream):
            held.append(payload.cast("f"))

    async with peers("alice", "bob") as (alice, bob):
        bob.serve_stream(Talk, keep)
        async with await alice.stream(bob.id, Talk(), timeout_s=5) as stream:
            for index in range(20):
                await stream.send(Piece(index), memoryview(array.array("f", [index] * 1000)))
        await until(lambda: len(held) == 20)
        assert [view[0] for view in held] == list(range(20))


async def test_an_oversized_item_is_the_senders_mistake() -> None:
    async with peers("alice", "bob") as (alice, bob):
        bob.serve_stream(Talk, sink)
        async with await alice.stream(bob.id, Talk(), timeout_s=5) as stream:
            with pytest.raises(ValueError, match="over"):
                await stream.send(Piece(0), bytes(MAX_PAYLOAD_BYTES + 1))
            await stream.end()
            with pytest.raises(ValueError, match="after end"):
                await stream.send(Piece(0))
            assert (await stream.receive(Piece))[0].index == 0
            with pytest.raises(StreamEnded):
                await stream.receive(Piece)


async def test_a_slow_reader_blocks_its_own_stream_only() -> None:
    release = asyncio.Event()

    async def read_late(opening: Echo, stream: Stream) -> None:
        await release.wait()
        await sink(Talk(), stream)

    async def push(stream: Stream) -> int:
        for index in range(60):
            await stream.send(Piece(index), bytes(1 << 16))
        await stream.end()
        return (await stream.receive(Piece))[0].index

    async with peers("alice", "bob") as (alice, bob):
        bob.serve_stream(Echo, read_late)
        bob.serve_stream(Talk, sink)
        slow = asyncio.create_task(push(await alice.stream(bob.id, Echo(), timeout_s=5)))
        streams = [await alice.stream(bob.id, Talk(), timeout_s=5) for _ in range(31)]
        assert await asyncio.gather(*map(push, streams)) == [60] * 31
        assert not slow.done()  # 60 items of 64 KiB are over its window
        release.set()
        assert await slow == 60


async def test_streams_to_oneself_work() -> None:
    async with peers("alice") as (alice,):
        alice.serve_stream(Talk, sink)
        async with await alice.stream(alice.id, Talk(), timeout_s=5) as stream:
            for index in range(100):
                await stream.send(Piece(index), bytes(1 << 16))
            await stream.end()
            assert (await stream.receive(Piece))[0].index == 100


async def test_a_lost_link_is_an_error_at_both_ends_and_never_a_short_result() -> None:
    outcome: list[str] = []

    async def collect(opening: Talk, stream: Stream) -> None:
        try:
            async for _ in items(stream):
                outcome.append("item")
        except PeerLost:
            outcome.append("lost")
            raise

    async with peers("alice", "bob") as (alice, bob), proxied(alice, bob) as proxy:
        bob.serve_stream(Talk, collect)
        stream = await alice.stream(bob.id, Talk(), timeout_s=5)
        await stream.send(Piece(0))
        await until(lambda: outcome == ["item"])
        proxy.cut()
        with pytest.raises(PeerLost):
            await stream.receive(Piece)
        with pytest.raises(PeerLost):
            await stream.send(Piece(1))
        await until(lambda: outcome == ["item", "lost"])


async def test_a_reset_reaches_the_peer() -> None:
    seen: list[Exception] = []

    async def collect(opening: Talk, stream: Stream) -> None:
        try:
            await stream.receive(Piece)
        except PeerLost as error:
            seen.append(error)

    async with peers("alice", "bob") as (alice, bob):
        bob.serve_stream(Talk, collect)
        with pytest.raises(RuntimeError):
            async with await alice.stream(bob.id, Talk(), timeout_s=5) as stream:
                raise RuntimeError
        await until(lambda: bool(seen))
        assert "RuntimeError" in str(seen[0])
        with pytest.raises(PeerLost, match="reset here"):
            await stream.receive(Piece)


async def test_a_refused_opening_shows_on_the_first_receive() -> None:
    async def refuse(opening: Talk, stream: Stream) -> None:
        raise Refusal("full")

    async def break_down(opening: Piece, stream: Stream) -> None:
        raise RuntimeError("a bug")

    events = EventLog()
    bob = await start("bob", events=events)
    bob.serve_stream(Talk, refuse)
    bob.serve_stream(Piece, break_down)
    async with peers("alice") as (alice,):
        alice.learn(bob.contact)
        for opening, code in ((Talk(), "refused"), (Echo(), "unknown"), (Piece(1), "failed")):
            stream = await alice.stream(bob.id, opening, timeout_s=5)
            with pytest.raises(CallRefused) as caught:
                await stream.receive(Piece)
            assert caught.value.code == code
    assert [fault.where for fault in events.recent(Fault)] == ["stream handler"]
    await bob.close()


async def test_an_undecodable_item_resets_the_stream() -> None:
    async with peers("alice", "bob") as (alice, bob):

        async def send_text(opening: Talk, stream: Stream) -> None:
            await stream.send(Echo(b"no piece"))
            await stream.receive(Piece)

        bob.serve_stream(Talk, send_text)
        stream = await alice.stream(bob.id, Talk(), timeout_s=5)
        with pytest.raises(ProtocolError, match="is not a valid Piece"):
            await stream.receive(Piece)
        with pytest.raises(PeerLost):
            await stream.send(Piece(0))
        await until(lambda: "streams=0" in repr(bob.linker.table.of(alice.id)))


async def test_what_a_finished_handler_did_not_read_does_not_block_the_sender() -> None:
    async def answer_at_once(opening: Talk, stream: Stream) -> None:
        await stream.send(Piece(7))

    async with peers("alice", "bob") as (alice, bob):
        bob.serve_stream(Talk, answer_at_once)
        async with await alice.stream(bob.id, Talk(), timeout_s=5) as stream:
            for index in range(100):
                await stream.send(Piece(index), bytes(1 << 16))
            assert (await stream.receive(Piece))[0].index == 7
        await until(lambda: "streams=0" in repr(alice.linker.table.of(bob.id)))


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
            for index in range(20):
                await stream.send(Piece(index), bytes(1 << 16))
            await stream.end()
            await stream.receive(Piece)
            seconds = asyncio.get_running_loop().time() - began_at
        assert 0.3 < seconds < 2.0  # 1.3 MB at 2 MB/s, after a burst of 0.2 MB
