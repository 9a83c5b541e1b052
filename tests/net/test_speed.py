"""The speed test measures the network, and cannot be used to load a peer."""

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.errors import CallRefused, PeerTimeout, ProtocolError
from colab_swarm.net import speed
from colab_swarm.net.peers import UNDECODABLE, Stream
from colab_swarm.net.speed import MeasureSpeed, SpeedTests, TransferReport, measure
from colab_swarm.runtime import loop_now
from colab_swarm.sim import HostProfile, NetworkProfile, SimNetwork, SimPeers

pytestmark = pytest.mark.virtual_time
SLOW_UP = NetworkProfile("slow up", latency_s=0.05, hosts=(HostProfile(8e6, 80e6),))


def pair(profile: NetworkProfile = SLOW_UP) -> tuple[SimNetwork, SimPeers, SimPeers]:
    network = SimNetwork(profile, seed=1)
    alice, bob = network.peer("alice"), network.peer("bob", host_profile=HostProfile())
    network.introduce()
    SpeedTests(bob)
    return network, alice, bob


async def test_the_speeds_of_a_known_link_are_measured() -> None:
    _, alice, bob = pair()
    for size_bytes in (0, speed.MAX_SIZE_BYTES + 1):
        with pytest.raises(ValueError, match="size_bytes="):
            await measure(alice, bob.id, size_bytes=size_bytes)
    measured = await measure(alice, bob.id, size_bytes=2 << 20)
    assert alice.statistics(bob.id).sent_bytes < 1.4 * (2 << 20)
    assert measured.upload_bps == pytest.approx(8e6, rel=0.1)
    assert measured.download_bps == pytest.approx(80e6, rel=0.1)
    assert measured.rtt_s == pytest.approx(0.1, rel=0.1)


async def test_a_slow_link_ends_the_test_by_time_and_not_by_size() -> None:
    _, alice, bob = pair(NetworkProfile("slower", latency_s=0.05, hosts=(HostProfile(1e6, 1e6),)))
    await measure(alice, bob.id, size_bytes=speed.MAX_SIZE_BYTES, timeout_s=30)
    assert loop_now() < 5


async def test_one_peer_is_tested_at_a_time_and_the_same_one_after_a_pause() -> None:
    network, alice, bob = pair()
    carol = network.peer("carol")
    network.introduce()
    both = (measure(each, bob.id, size_bytes=1000) for each in (alice, carol))
    first, second = await asyncio.gather(*both, return_exceptions=True)
    assert isinstance(first, speed.Speed) and isinstance(second, CallRefused)
    with pytest.raises(CallRefused, match="wait a moment"):
        await measure(alice, bob.id, size_bytes=1000)
    await asyncio.sleep(speed.PAUSE_S)
    await measure(alice, bob.id, size_bytes=1000)


async def stay_silent(opening: MeasureSpeed, stream: Stream) -> None:
    await asyncio.get_running_loop().create_future()


async def flood(opening: MeasureSpeed, stream: Stream) -> None:
    for _ in range(2):
        await stream.receive(speed.BurstPart)
    await stream.send(TransferReport(1.0))
    for size in (0, 2000):
        await stream.send(speed.BurstPart(), bytes(size))


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        (None, CallRefused, "not served"),
        (stay_silent, PeerTimeout, "did not end in 2 s"),
        (flood, ProtocolError, "more than was agreed"),
    ],
)
async def test_a_peer_that_does_not_test_as_agreed_ends_the_test(
    answer: Any, error: type[Exception], said: str
) -> None:
    network, alice, _ = pair()
    carol = network.peer("carol")
    network.introduce()
    if answer is not None:
        carol.serve_stream(MeasureSpeed, answer)
    with pytest.raises(error, match=said):
        await measure(alice, carol.id, size_bytes=1000, timeout_s=2)


@settings(max_examples=60)
@given(
    st.binary(max_size=40)
    | st.builds(lambda *v: msgspec.msgpack.encode(v), st.integers(-(2**63), 2**64 - 1), st.floats())
)
def test_strange_bytes_are_no_test_and_no_result(body: bytes) -> None:
    for kind in (MeasureSpeed, TransferReport):
        try:
            made = msgspec.msgpack.decode(body, type=kind)
        except UNDECODABLE:
            continue
        if isinstance(made, TransferReport):
            assert made.seconds >= 0
        else:
            assert 0 < made.size_bytes <= speed.MAX_SIZE_BYTES
