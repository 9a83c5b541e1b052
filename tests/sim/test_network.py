"""Calls and streams over the simulated network cost what the profile says; `tests.net.test_contract` has the rest."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from colab_swarm.errors import PeerError, PeerTimeout, PeerUnreachable
from colab_swarm.net.mux import STREAM_WINDOW_BYTES, item_cost
from colab_swarm.net.peers import PeerId, Stream, StreamEnded
from colab_swarm.sim import HOME, HostProfile, SimNetwork, run_virtual, virtual_time
from tests.sim.talk import Ask, Tell, forever, pair


async def test_a_call_is_answered_after_a_dial_and_a_round_trip() -> None:
    _, alice, bob = pair()
    times = []
    for number in (1, 2):
        assert await alice.call(bob.id, Ask(number), Tell, timeout_s=5) == Tell(2 * number)
        times.append(virtual_time())
    assert times == pytest.approx([0.8, 1.0])


async def test_a_call_that_takes_too_long_times_out_and_cancels_the_handler() -> None:
    cancelled: list[float] = []

    async def watch(caller: PeerId, message: Ask) -> Tell:
        try:
            return await forever(caller, message)
        finally:
            cancelled.append(virtual_time())

    _, alice, bob = pair()
    bob.serve(Ask, watch)
    with pytest.raises(PeerTimeout):
        await alice.call(bob.id, Ask(1), Tell, timeout_s=2)
    at = virtual_time()
    await asyncio.sleep(1)
    assert at == pytest.approx(2) and cancelled == pytest.approx([2.1])


async def test_a_call_to_oneself_takes_no_time() -> None:
    _, _, bob = pair()
    assert (await bob.call(bob.id, Ask(4), Tell, timeout_s=1), virtual_time()) == (Tell(8), 0.0)


async def test_a_stranger_without_address_is_unreachable() -> None:
    with pytest.raises(PeerUnreachable, match="no address"):
        network = SimNetwork()
        alice, bob = network.peer("alice"), network.peer("bob")
        await alice.call(bob.id, Ask(1), Tell, timeout_s=1)


async def test_bandwidth_is_shared_first_in_first_out() -> None:
    _, alice, bob = pair(bob=HostProfile(upload_bps=1e6, download_bps=8e5))
    await alice.call(bob.id, Ask(1), Tell, timeout_s=5)
    began, times = virtual_time(), []

    async def push(after_s: float) -> None:
        await asyncio.sleep(after_s)  # frames of one moment may share a packet
        stream = await alice.stream(bob.id, Ask(0), timeout_s=5)
        await stream.send(Tell(1), bytes(100_000))
        await stream.end()
        await stream.receive(Tell)
        times.append(virtual_time() - began)

    await asyncio.gather(push(0.0), push(0.001))
    assert times == pytest.approx([1.2, 2.2], abs=0.02)


async def test_both_clocks_meet_in_the_middle() -> None:
    network, alice, bob = pair()
    network.now().skew("bob", 300.0)
    apart = bob.time() - alice.time()
    await alice.call(bob.id, Ask(1), Tell, timeout_s=5)
    assert (apart, bob.time() - alice.time()) == pytest.approx((300.0, 0.0), abs=1e-6)


async def test_statistics_count_bytes_and_round_trips() -> None:
    _, alice, bob = pair()
    await alice.call(bob.id, Ask(1), Tell, timeout_s=5)
    assert alice.statistics(bob.id).sent_bytes == bob.statistics(alice.id).received_bytes > 0
    total = alice.statistics()
    assert total.rtt_s == pytest.approx(0.2) and total.links == 1 and total.received_bytes > 0


def test_same_seed_same_trace() -> None:
    async def main(seed: int) -> list[float]:
        network = SimNetwork(HOME, seed=seed)
        peers = [network.peer(name) for name in ("alice", "bob", "carol")]
        network.introduce()
        network.now().lose(0.2)
        times = []
        for caller in peers:
            for other in peers:
                with pytest.raises(PeerError):
                    await caller.call(other.id, Ask(1), Tell, timeout_s=9)
                times.append(virtual_time())
        return times

    assert run_virtual(main(7)) == run_virtual(main(7)) != run_virtual(main(8))


# --- streams ----------------------------------------------------------------------------------------------------------

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
    assert (
        sent == -(-STREAM_WINDOW_BYTES // item_cost(msgspec.msgpack.encode(Tell(0)), CHUNK))
        and virtual_time() > 60
    )


async def test_the_end_comes_after_everything_sent() -> None:
    _, alice, bob = pair()
    async with await alice.stream(bob.id, Ask(0), timeout_s=5) as stream:
        for number in range(200):
            await stream.send(Tell(number), CHUNK)
        await stream.end()
        assert (await stream.receive(Tell))[0] == Tell(200 * len(CHUNK))
