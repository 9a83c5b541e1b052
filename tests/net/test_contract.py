"""What `colab_swarm.net.peers` promises, on loopback and in the simulator."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from colab_swarm import errors
from colab_swarm.errors import CallRefused, PeerLost, PeerTimeout, PeerUnreachable, ProtocolError
from colab_swarm.net import peers
from colab_swarm.net.identity import id_of, verify
from colab_swarm.net.node import Node
from colab_swarm.net.peers import Contact, Message, PeerId, Refusal, Role, Stream, StreamEnded
from tests.net.swarm import Echo, Piece, Talk, items, peers_by_iroh, push, sink, until, without_iroh
from tests.net.swarm import peers as on_loopback
from tests.sim.talk import simulated

Meet = Callable[..., AbstractAsyncContextManager[list[Any]]]
pytestmark = pytest.mark.parametrize(
    "meet",
    [
        pytest.param(on_loopback, id="internet"),
        pytest.param(peers_by_iroh, id="iroh", marks=without_iroh),
        pytest.param(simulated, id="simulation", marks=pytest.mark.virtual_time),
    ],
)


class Ask(Message, frozen=True):
    kind: str


class Long(Message, frozen=True):
    body: bytes


LONG = {Ask("longest"): peers.MAX_MESSAGE_BYTES - 6, Ask("long"): peers.MAX_MESSAGE_BYTES - 5}


async def answer(peer: PeerId, message: Any) -> Message:
    if message in LONG:
        return Long(bytes(LONG[message]))
    texts = {Ask("refused"): "not today", Ask("control"): "\x1b[31mred\a"}
    raise Refusal(texts[message]) if message in texts else RuntimeError("a bug \udc80")


async def ask(alice: Node, bob: Node, message: Message = Echo()) -> Message:  # noqa: B008
    return await alice.call(bob.id, message, Echo, timeout_s=5)


async def test_a_call_is_counted_and_answered_both_ways_and_by_oneself(meet: Meet) -> None:
    async with meet("alice", "bob") as (alice, bob):
        await ask(alice, bob, Echo(bytes(1000)))
        sent, received = alice.statistics(), bob.statistics(alice.id)
        assert (sent.rtt_s or 0) > 0
        assert 1000 < received.received_bytes <= sent.sent_bytes < 1300 and sent.received_bytes > 1000
        for message in (Echo(b"hello"), Echo(bytes(200_000))):
            assert await ask(alice, bob, message) == message
        assert await ask(bob, alice, Echo(b"back")) == Echo(b"back")
        assert alice.linked() == {bob.id} and bob.linked() == {alice.id}
        assert alice.way_to(bob.id) and await ask(alice, alice, Echo(b"me")) == Echo(b"me")
        assert alice.linked() == {bob.id} and alice.way_to(alice.id) == ""
        assert id_of(alice.public_key) == alice.id == alice.contact.id
        assert verify(alice.public_key, alice.sign(b"hello"), b"hello")


async def refuse(opening: Ask, stream: Stream) -> None:
    await answer(stream.peer, opening)


async def test_every_way_a_handler_can_fail_reaches_the_caller_as_a_code(meet: Meet) -> None:
    impostor = type("Ask", (Message,), {"__annotations__": {"kind": int}}, frozen=True)
    async with meet("alice", "bob") as (alice, bob):
        bob.serve(Ask, answer)
        bob.serve_stream(Ask, refuse)
        for message, code, text in (
            (Ask("refused"), "refused", "not today"),
            (Ask("control"), "refused", r"\?\[31mred\?$"),  # its text cannot control a terminal
            (Ask("bug"), "failed", "a bug"),
            (Ask("long"), "failed", str(peers.MAX_MESSAGE_BYTES)),
            (impostor(5), "invalid", "undecodable"),
            (Talk(), "unknown", "Talk"),
        ):
            with pytest.raises(CallRefused, match=text) as caught:
                await ask(alice, bob, message)
            assert caught.value.code == code
        for opening, code in ((Ask("refused"), "refused"), (Echo(), "unknown"), (Ask("bug"), "failed")):
            stream = await alice.stream(bob.id, opening, timeout_s=5)
            with pytest.raises(CallRefused) as caught:
                await stream.receive(Piece)
            assert caught.value.code == code
        longest = await alice.call(bob.id, Ask("longest"), Long, timeout_s=5)
        assert len(longest.body) == LONG[Ask("longest")]
        with pytest.raises(ProtocolError, match="not a valid Piece"):
            await alice.call(bob.id, Echo(b"text"), Piece, timeout_s=5)
        with pytest.raises(CallRefused, match="Long is not served here"):
            await ask(alice, bob, Long(bytes(peers.MAX_MESSAGE_BYTES - 12)))
        with pytest.raises(ValueError, match=str(peers.MAX_MESSAGE_BYTES)):
            await ask(alice, bob, Long(bytes(peers.MAX_MESSAGE_BYTES - 11)))
        with pytest.raises(ValueError, match="a handler of Echo serves already; unserve it first"):
            bob.serve(Echo, answer)
        bob.unserve(Echo)
        bob.serve(Echo, answer)
        with pytest.raises(CallRefused, match="a bug"):
            await ask(alice, bob)


@pytest.mark.parametrize("how", ["timeout", "cancel", "link lost"])
async def test_a_caller_that_gives_up_cancels_the_handler(meet: Meet, how: str) -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def wait_for_ever(peer: PeerId, message: Talk) -> Message:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return message

    async with meet("alice", "bob") as (alice, bob):
        bob.serve(Talk, wait_for_ever)
        await ask(alice, bob)
        timeout_s = 0.02 if how == "timeout" else 5
        call = asyncio.create_task(alice.call(bob.id, Talk(), Talk, timeout_s=timeout_s))
        await started.wait()
        if how == "cancel":
            call.cancel()
        if how == "link lost":
            await alice.close()
        expected = {"timeout": PeerTimeout, "cancel": asyncio.CancelledError, "link lost": PeerLost}[how]
        with pytest.raises(expected):
            await call
        await cancelled.wait()


async def test_a_peer_in_client_mode_is_called_back_over_its_own_link(meet: Meet) -> None:
    async with meet("alice", "bob", clients=["alice"]) as (alice, bob):
        assert alice.contact.addresses == ()
        with pytest.raises(PeerUnreachable, match="no address"):
            await ask(bob, alice)
        await ask(alice, bob)
        assert await ask(bob, alice, Echo(b"back")) == Echo(b"back")


async def test_where_another_peer_answers_the_next_address_is_dialled(meet: Meet) -> None:
    async with meet("alice", "bob", "carol") as (alice, bob, carol):
        nobody = PeerId(bytes(32))
        alice.learn(Contact(nobody, bob.contact.addresses))
        with pytest.raises(errors.WrongPeer, match=f"{bob.id.hex()[:8]} answered, 00000000 was expected"):
            await alice.call(nobody, Echo(), Echo, timeout_s=5)
        await until(lambda: not bob.linked())
        alice.learn(Contact(bob.id, (*carol.contact.addresses, *bob.contact.addresses)))
        assert await ask(alice, bob) == Echo()


async def test_both_dialling_at_once_loses_nothing_and_leaves_one_link(meet: Meet) -> None:
    async with meet("alice", "bob") as (alice, bob):
        ends = [(alice, bob), (bob, alice)] * 5
        calls = [ask(one, other, Echo(bytes([n // 2]))) for n, (one, other) in enumerate(ends)]
        assert len(await asyncio.gather(*calls)) == 10 and await ask(alice, bob) == Echo()
        await until(lambda: len(alice.table) == len(bob.table) == 1)
        assert await ask(bob, alice) == Echo()


async def test_a_role_is_refused_what_it_may_not(meet: Meet) -> None:
    async with meet("alice", "bob", viewers=["alice"]) as (alice, bob):
        bob.serve(Ask, answer, role=Role.WORKER)
        bob.serve_stream(Talk, sink, role=Role.REDUCER)
        assert bob.role_of(alice.id) is Role.GUEST, "they have no link yet"
        with pytest.raises(CallRefused, match="needs the role worker; yours is viewer") as refused:
            await ask(alice, bob, Ask("refused"))
        assert refused.value.code == "refused" and bob.role_of(alice.id) is Role.VIEWER
        stream = await alice.stream(bob.id, Talk(), timeout_s=5)
        with pytest.raises(CallRefused, match="needs the role reducer; yours is viewer"):
            await stream.receive(Piece)
        assert alice.role_of(bob.id) is Role.WORKER and bob.role_of(bob.id) is Role.AUTHORITY


async def test_a_peer_that_leaves_is_reported_and_its_calls_fail(meet: Meet) -> None:
    lost: list[PeerId] = []
    async with meet("alice", "bob") as (alice, bob):
        stop = alice.on_lost(lost.append)
        await ask(alice, bob)
        await bob.close()
        await until(lambda: bool(lost))
        stop()
        assert lost == [bob.id] and not alice.linked()
        with pytest.raises((PeerUnreachable, PeerTimeout)):  # a UDP port that is closed refuses nothing
            await ask(alice, bob)
        with pytest.raises(errors.PeerError):
            await ask(bob, alice)


@pytest.mark.parametrize("oneself", [False, True])
async def test_items_arrive_in_order_and_their_buffer_may_be_reused(meet: Meet, oneself: bool) -> None:
    got: list[tuple[int, memoryview]] = []

    async def collect(opening: Talk, stream: Stream) -> None:
        async for piece, payload in items(stream):
            got.append((piece.index, payload))
        await stream.send(Piece(len(got)))

    async with meet("alice", "bob") as (alice, bob):
        served = alice if oneself else bob
        served.serve_stream(Talk, collect)
        sizes = [0, 1, 65536, 70000, peers.MAX_PAYLOAD_BYTES, *[4000] * 20]
        async with await alice.stream(served.id, Talk(), timeout_s=5) as stream:
            for index, size in enumerate(sizes):
                buffer = bytearray([index]) * size
                await stream.send(Piece(index), buffer)
                buffer[:] = bytes(size)
            await stream.end()
            assert (await stream.receive(Piece))[0].index == len(sizes)
        assert got == [(index, bytes([index]) * size) for index, size in enumerate(sizes)]
        assert all(view.readonly for _, view in got[-20:])


async def test_a_mistake_of_the_sender_leaves_the_stream_usable(meet: Meet) -> None:
    async with meet("alice", "bob") as (alice, bob):
        bob.serve_stream(Talk, sink)
        async with await alice.stream(bob.id, Talk(), timeout_s=5) as stream:
            with pytest.raises(ValueError, match=str(peers.MAX_PAYLOAD_BYTES)):
                await stream.send(Piece(0), bytes(peers.MAX_PAYLOAD_BYTES + 1))
            await stream.end()
            with pytest.raises(ValueError, match="after end"):
                await stream.send(Piece(0))
            assert (await stream.receive(Piece))[0].index == 0
            with pytest.raises(StreamEnded):
                await stream.receive(Piece)


async def test_a_slow_reader_blocks_its_own_stream_only(meet: Meet) -> None:
    release = asyncio.Event()

    async def read_late(opening: Echo, stream: Stream) -> None:
        await release.wait()
        await sink(Talk(), stream)

    async with meet("alice", "bob") as (alice, bob):
        bob.serve_stream(Echo, read_late)
        bob.serve_stream(Talk, sink)
        slow = asyncio.create_task(push(await alice.stream(bob.id, Echo(), timeout_s=5), 60))
        streams = [await alice.stream(bob.id, Talk(), timeout_s=5) for _ in range(7)]
        assert await asyncio.gather(*(push(stream, 60) for stream in streams)) == [60] * 7
        assert not slow.done()  # 60 items of 64 KiB are over its window
        release.set()
        assert await slow == 60


async def test_a_reset_and_an_undecodable_item_end_the_stream_at_both_ends(meet: Meet) -> None:
    seen: list[Exception] = []

    async def collect(opening: Talk, stream: Stream) -> None:
        try:
            await stream.receive(Piece)
        except PeerLost as error:
            seen.append(error)

    async def send_text(opening: Echo, stream: Stream) -> None:
        await stream.send(Echo(b"no piece"))
        await stream.receive(Piece)

    async with meet("alice", "bob") as (alice, bob):
        bob.serve_stream(Talk, collect)
        bob.serve_stream(Echo, send_text)
        with pytest.raises(RuntimeError):
            async with await alice.stream(bob.id, Talk(), timeout_s=5) as stream:
                raise RuntimeError
        await until(lambda: bool(seen))
        assert "RuntimeError" in str(seen[0])
        with pytest.raises(PeerLost):
            await stream.receive(Piece)
        stream = await alice.stream(bob.id, Echo(), timeout_s=5)
        with pytest.raises(ProtocolError, match="not a valid Piece"):
            await stream.receive(Piece)
        with pytest.raises(PeerLost):
            await stream.send(Piece(0))
        await until(lambda: "streams=0" in repr(bob.table.of(alice.id)))


async def test_what_a_finished_handler_did_not_read_does_not_block_the_sender(meet: Meet) -> None:
    async def answer_at_once(opening: Talk, stream: Stream) -> None:
        await stream.send(Piece(7))

    async with meet("alice", "bob") as (alice, bob):
        bob.serve_stream(Talk, answer_at_once)
        async with await alice.stream(bob.id, Talk(), timeout_s=5) as stream:
            assert await push(stream, 100) == 7
        await until(lambda: "streams=0" in repr(alice.table.of(bob.id)))
