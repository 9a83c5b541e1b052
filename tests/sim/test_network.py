"""Calls and streams over the simulated network cost what the profile says; `tests.net.test_contract` has the rest."""

import asyncio

import pytest

from colab_swarm.errors import PeerError
from colab_swarm.net.peers import Stream, StreamEnded
from colab_swarm.net.websocket import HIGH_WATER_BYTES
from colab_swarm.runtime import loop_now
from colab_swarm.sim import DEDLOC16, HOME, HostProfile, SimNetwork, run_virtual
from tests.sim.talk import FAR, Ask, Tell, count_bytes, pair


async def test_bandwidth_is_shared_first_in_first_out() -> None:
    _, alice, bob = pair(bob=HostProfile(upload_bps=1e6, download_bps=8e5))
    await alice.call(bob.id, Ask(1), Tell, timeout_s=5)
    began, times = loop_now(), []

    async def push(after_s: float) -> None:
        await asyncio.sleep(after_s)  # frames of one moment may share a packet
        stream = await alice.stream(bob.id, Ask(0), timeout_s=5)
        await stream.send(Tell(1), bytes(100_000))
        await stream.end()
        await stream.receive(Tell)
        times.append(loop_now() - began)

    await asyncio.gather(push(0.0), push(0.001))
    assert times == pytest.approx([1.2, 2.2], abs=0.02)


async def test_a_network_describes_its_connections_and_the_faults_in_force() -> None:
    network = SimNetwork(HOME)
    assert str(network) == "home: 20 Mbit/s up, 100 Mbit/s down, 30 ms, 0.5% of messages repeated"
    network.now().latency(3)
    network.now().bandwidth(0.5)
    assert str(network) == "home: 10 Mbit/s up, 50 Mbit/s down, 90 ms, 0.5% of messages repeated"
    assert "16 kinds of lines, the first 200 Mbit/s up" in str(SimNetwork(DEDLOC16))


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
                times.append(loop_now())
        return times

    assert run_virtual(main(7)) == run_virtual(main(7)) != run_virtual(main(8))


async def test_lost_packets_are_sent_again_and_items_stay_in_order() -> None:
    received: list[int] = []

    async def collect(opening: Ask, stream: Stream) -> None:
        for _ in range(opening.number):
            received.append((await stream.receive(Tell))[0].number)

    network, alice, bob = pair()
    network.now().lose(0.3)
    bob.unserve(Ask)
    bob.serve_stream(Ask, collect)
    async with await alice.stream(bob.id, Ask(20), timeout_s=5) as stream:
        for number in range(20):
            await stream.send(Tell(number))
            await asyncio.sleep(0.01)
        with pytest.raises(StreamEnded):
            await stream.receive(Tell)
    assert received == list(range(20)) and loop_now() > 1.5


async def test_a_sender_is_ahead_of_its_upload_by_a_sockets_buffer_at_most() -> None:
    network = SimNetwork(FAR, seed=1)
    alice, bob = (network.peer(name, host_profile=HostProfile(8e6, 8e6)) for name in ("alice", "bob"))
    network.introduce()
    bob.serve_stream(Ask, count_bytes)
    stream = await alice.stream(bob.id, Ask(0), timeout_s=5)
    began, item = loop_now(), bytes(1 << 16)
    for _ in range(16):
        await stream.send(Tell(0), item)
    ahead_bytes = 16 * len(item) - 1e6 * (loop_now() - began)
    assert HIGH_WATER_BYTES - len(item) < ahead_bytes < HIGH_WATER_BYTES + 2 * len(item)
