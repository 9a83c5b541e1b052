"""Punching on loopback, where nothing is in the way, and its timing. Through NATs: `tests.netlab.test_punch`."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.net.peers import UNDECODABLE
from colab_swarm.net.upgrade import Endpoint, plan_tries, punch
from colab_swarm.net.websocket import CAN_PUNCH, bound_socket

needs_reuse = pytest.mark.skipif(not CAN_PUNCH, reason="this system has no SO_REUSEPORT")


def free_port(family: int = socket.AF_INET) -> int:
    with bound_socket(family) as bound:
        return int(bound.getsockname()[1])


async def first_name(
    me: bytes, port: int, targets: Sequence[Endpoint], seconds: float = 10.0
) -> bytes | None:
    """Greet over every connection that comes up; the first name heard."""
    loop = asyncio.get_running_loop()
    heard: asyncio.Queue[bytes] = asyncio.Queue()

    async def greet(connected: socket.socket) -> None:
        with connected:
            await loop.sock_sendall(connected, me)
            heard.put_nowait(await loop.sock_recv(connected, 16))
            await loop.sock_recv(connected, 16)  # until the other end has heard, too

    until, name = loop.time() + seconds, None
    tries = plan_tries(loop.time(), until, rtt_s=0.0, answering=True, rng=random.Random(0))
    greetings: list[asyncio.Task[None]] = []
    punching = asyncio.create_task(
        punch(port, targets, tries, lambda connected: greetings.append(asyncio.create_task(greet(connected))))
    )
    with suppress(TimeoutError):
        async with asyncio.timeout_at(until):
            name = await heard.get()
    for task in (punching, *greetings):
        task.cancel()
    await asyncio.gather(punching, *greetings, return_exceptions=True)
    return name


@needs_reuse
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_two_ends_that_punch_each_other_talk(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with bound_socket(family) as probe:
            probe.connect_ex((host, 9))
            alice, bob = free_port(family), free_port(family)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    names = await asyncio.gather(
        first_name(b"alice", alice, [Endpoint("192.0.2.1", 9), Endpoint(host, bob)]),
        first_name(b"bob", bob, [Endpoint(host, alice)]),
    )
    assert [*names] == [b"bob", b"alice"]


@needs_reuse
async def test_an_end_that_only_listens_is_reached() -> None:
    alice, bob = free_port(), free_port()
    no_use = Endpoint("127.0.0.1", free_port())
    names = await asyncio.gather(
        first_name(b"alice", alice, [Endpoint("127.0.0.1", bob)]), first_name(b"bob", bob, [no_use])
    )
    assert [*names] == [b"bob", b"alice"]


@needs_reuse
async def test_without_the_other_end_punching_ends_in_silence_and_frees_the_port() -> None:
    port = free_port()
    targets = [Endpoint("127.0.0.1", free_port()), Endpoint("no address", 1), Endpoint("224.0.0.1", 1)]
    assert await first_name(b"alice", port, targets, seconds=0.05) is None
    with socket.socket() as plain:
        plain.bind(("127.0.0.1", port))


@needs_reuse
async def test_a_connection_to_oneself_is_refused() -> None:
    port = free_port()
    assert await first_name(b"alice", port, [Endpoint("127.0.0.1", port)], seconds=0.05) is None


@needs_reuse
def test_the_port_of_an_open_connection_can_be_bound_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, bound_socket() as dialling:
        dialling.setblocking(True)
        dialling.connect(server.getsockname())
        with bound_socket(port=dialling.getsockname()[1]) as again:
            assert again.getsockname()[1] == dialling.getsockname()[1]
            assert not again.getblocking()


@given(st.floats(0.0, 0.4), st.floats(0.0, 1.0), st.integers())
def test_syns_cross_even_if_the_two_directions_differ_in_latency(
    rtt_s: float, way_there: float, seed: int
) -> None:
    """Sent at 0, the signal takes any part of the round trip; the direct way takes half of it."""
    asking = plan_tries(0.0, 30.0, rtt_s=rtt_s, answering=False, rng=random.Random(seed))
    received_at = way_there * rtt_s
    answering = plan_tries(received_at, 30.0, rtt_s=rtt_s, answering=True, rng=random.Random(seed))
    apart_s = [abs(one - other) for one, other in zip(asking, answering, strict=False)]
    assert min(apart_s) <= rtt_s / 2
    if way_there == 0.5:
        assert apart_s[0] < 1e-9


@given(st.floats(0.0, 5.0), st.floats(0.0, 10.0), st.booleans(), st.integers())
def test_tries_leave_time_for_a_refusal_and_end_in_time(
    rtt_s: float, seconds: float, answering: bool, seed: int
) -> None:
    tries = plan_tries(100.0, 100.0 + seconds, rtt_s=rtt_s, answering=answering, rng=random.Random(seed))
    assert all(later - earlier > 1.4 * rtt_s for earlier, later in pairwise(tries))
    assert len(tries) <= seconds / 0.15 + 1
    assert all(at >= 100.0 for at in tries)


@given(st.binary(max_size=64))
def test_garbage_is_no_endpoint(data: bytes) -> None:
    try:
        endpoint = msgspec.msgpack.decode(data, type=Endpoint)
    except UNDECODABLE:
        return
    assert 1 <= endpoint.port <= 65535 and len(endpoint.host) <= 45
    assert endpoint.family in (None, socket.AF_INET, socket.AF_INET6)


@given(st.text(max_size=45))
def test_a_host_that_is_no_address_has_no_family(host: str) -> None:
    assert Endpoint(host, 1).family in (None, socket.AF_INET, socket.AF_INET6)
    assert Endpoint("example.org", 1).family is None
    assert Endpoint("2001:db8::1%eth0", 1).family is None
