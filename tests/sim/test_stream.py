"""Streams over the simulated network: order, credit, endings."""

from __future__ import annotations

import asyncio

import pytest

from colab_swarm.errors import CallRefused, PeerLost, ProtocolError
from colab_swarm.net.mux import STREAM_WINDOW_BYTES, item_cost
from colab_swarm.net.peers import MAX_PAYLOAD_BYTES, Message, Refusal, Stream, StreamEnded
from colab_swarm.sim import virtual_time
from colab_swarm.sim.link import encode
from tests.sim.talk import Ask, Tell, Unserved, pair

CHUNK = bytes(1 << 16)


async def test_items_arrive_whole_and_in_order_and_payloads_may_be_reused() -> None:
    received: list[tuple[int, bytes]] = []

    async def collect(opening: Ask, stream: Stream) -> None:
        for _ in range(opening.number):
            item, payload = await stream.receive(Tell)
            received.append((item.number, bytes(payload)))

    network, alice, bob = pair()
    network.now().lose(0.3)
    bob.serve_stream(Ask, collect)
    buffer = bytearray(1)
    async with await alice.stream(bob.id, Ask(20), timeout_s=5) as stream:
        for number in range(20):
            buffer[0] = number
            await stream.send(Tell(number), buffer)
        with pytest.raises(StreamEnded):
            await stream.receive(Tell)
    assert received == [(number, bytes([number])) for number in range(20)]


async def test_a_slow_reader_slows_the_sender() -> None:
    async def read_late(opening: Ask, stream: Stream) -> None:
        await asyncio.sleep(60)
        while True:
            await stream.receive(Tell)

    _, alice, bob = pair()
    bob.serve_stream(Ask, read_late)
    stream, sent = await alice.stream(bob.id, Ask(0), timeout_s=5), 0
    while virtual_time() < 60:
        await stream.send(Tell(0), CHUNK)
        sent += virtual_time() < 60
    await stream.end()
    assert sent == -(-STREAM_WINDOW_BYTES // item_cost(encode(Tell(0)), CHUNK)) and virtual_time() > 60


async def test_the_end_comes_after_everything_sent() -> None:
    _, alice, bob = pair()
    async with await alice.stream(bob.id, Ask(0), timeout_s=5) as stream:
        for number in range(200):
            await stream.send(Tell(number), CHUNK)
        await stream.end()
        assert (await stream.receive(Tell))[0] == Tell(200 * len(CHUNK))


@pytest.mark.parametrize(
    ("opening", "code"), [(Unserved(), "unknown"), (Ask(-1), "refused"), (Ask(0), "failed")]
)
async def test_a_refused_opening_shows_on_the_first_receive(opening: Message, code: str) -> None:
    async def refuse(opening: Ask, stream: Stream) -> None:
        raise Refusal("negative") if opening.number < 0 else ZeroDivisionError

    _, alice, bob = pair()
    bob.serve_stream(Ask, refuse)
    stream = await alice.stream(bob.id, opening, timeout_s=5)
    with pytest.raises(CallRefused) as caught:
        await stream.receive(Tell)
    assert caught.value.code == code


async def test_leaving_by_an_exception_resets_the_stream_at_the_peer() -> None:
    errors: list[str] = []

    async def hear(opening: Ask, stream: Stream) -> None:
        try:
            await stream.receive(Tell)
        except PeerLost as error:
            errors.append(str(error))

    _, alice, bob = pair()
    bob.serve_stream(Ask, hear)
    with pytest.raises(KeyError):
        async with await alice.stream(bob.id, Ask(0), timeout_s=5):
            raise KeyError
    await asyncio.sleep(1)
    assert errors == ["alice reset the stream: KeyError"]


async def test_an_item_of_another_type_resets_the_stream() -> None:
    class Words(Message, frozen=True):
        text: str

    with pytest.raises(PeerLost, match="not a valid Words"):
        _, alice, bob = pair()
        async with await alice.stream(bob.id, Ask(0), timeout_s=5) as stream:
            await stream.end()
            with pytest.raises(ProtocolError):
                await stream.receive(Words)
            await stream.receive(Tell)


async def test_sending_after_the_end_is_the_senders_mistake() -> None:
    with pytest.raises(ValueError, match="send after end"):
        _, alice, bob = pair()
        stream = await alice.stream(bob.id, Ask(0), timeout_s=5)
        await stream.end()
        await stream.send(Tell(0))


async def test_a_sender_that_waits_while_its_stream_is_ended_fails_as_well() -> None:
    async def unread(opening: Ask, stream: Stream) -> None:
        await asyncio.sleep(60)

    with pytest.raises(ValueError, match="send after end"):
        _, alice, bob = pair()
        bob.serve_stream(Ask, unread)
        stream = await alice.stream(bob.id, Ask(0), timeout_s=5)
        for _ in range(STREAM_WINDOW_BYTES // len(CHUNK)):
            await stream.send(Tell(0), CHUNK)
        late = asyncio.create_task(stream.send(Tell(0), CHUNK))
        await asyncio.sleep(1)
        await stream.end()
        await late


async def test_a_payload_over_the_limit_is_the_senders_mistake() -> None:
    with pytest.raises(ValueError, match="limit"):
        _, alice, bob = pair()
        async with await alice.stream(bob.id, Ask(0), timeout_s=5) as stream:
            await stream.send(Tell(0), bytes(MAX_PAYLOAD_BYTES + 1))


async def test_a_stream_to_oneself_works() -> None:
    _, _, bob = pair()
    async with await bob.stream(bob.id, Ask(0), timeout_s=5) as stream:
        await stream.send(Tell(0), b"four")
        await stream.end()
        assert (await stream.receive(Tell))[0] == Tell(4)


async def test_an_unread_stream_that_is_left_does_not_block_its_sender() -> None:
    async def look_away(opening: Ask, stream: Stream) -> None:
        pass

    _, alice, bob = pair()
    bob.serve_stream(Ask, look_away)
    async with await alice.stream(bob.id, Ask(0), timeout_s=5) as stream:
        for _ in range(4 * STREAM_WINDOW_BYTES // len(CHUNK)):
            await stream.send(Tell(0), CHUNK)
