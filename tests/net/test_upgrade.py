"""Relayed links that become punched ones, on loopback; through NATs: `tests.netlab.test_matrix`."""

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.errors import PeerError
from colab_swarm.events import Fault
from colab_swarm.net import upgrade
from colab_swarm.net.carrier import LinkType
from colab_swarm.net.node import Node
from colab_swarm.net.peers import UNDECODABLE, Contact, PeerId, Stream
from colab_swarm.net.relay import Circuits, Relay
from colab_swarm.net.upgrade import Endpoint, Upgrade, Upgrades, family_of, plan_tries, punch
from colab_swarm.net.websocket import CAN_PUNCH, bound_socket
from tests.net.swarm import Echo, Piece, Talk, candidates, peers, until

CAROL = PeerId(b"c" * 32)


@asynccontextmanager
async def relayed() -> AsyncIterator[tuple[Node, Node, dict[PeerId, str | None]]]:
    """Alice and bob; bob cannot be dialled and holds a place at carol's; the outcomes of upgrades, by peer."""
    async with peers("carol") as (carol,), peers("alice", "bob", listen=False) as (alice, bob):
        Relay(carol)
        outcomes: dict[PeerId, str | None] = {}
        for node in (alice, bob):
            bobs = Circuits(node, candidates(carol), lambda: None, random.Random(1))
            Upgrades(node, bobs.seen_at.get, outcomes.__setitem__, random.Random(2))
        bobs.start()
        await until(lambda: bobs.places)
        alice.learn(Contact(bob.id, bobs.places[carol.id]))
        yield alice, bob, outcomes


def way(node: Node, other: Node) -> LinkType | None:
    path = node.path_to(other.id)
    return path and path.way


async def test_a_relayed_link_becomes_a_punched_one_and_loses_no_stream() -> None:
    async with relayed() as (alice, bob, outcomes):
        got: list[int] = []

        async def collect(opening: Talk, stream: Stream) -> None:
            while True:
                got.append((await stream.receive(Piece))[0].index)

        bob.serve_stream(Talk, collect)
        stream = await alice.stream(bob.id, Talk(), timeout_s=5)
        assert way(alice, bob) is LinkType.RELAYED
        await stream.send(Piece(0))
        await until(lambda: outcomes == {alice.id: None, bob.id: None})
        outcomes.clear()
        assert way(alice, bob) is LinkType.PUNCHED and way(bob, alice) is LinkType.PUNCHED
        assert len(alice.linker.table.of(bob.id)) == 2  # the stream still needs the relayed one
        await stream.send(Piece(1))
        await until(lambda: got == [0, 1])
        assert await alice.call(bob.id, Echo(b"over the hole"), Echo, timeout_s=5)
        await stream.end()
        await until(lambda: len(alice.linker.table.of(bob.id)) == len(bob.linker.table.of(alice.id)) == 1)
        assert not outcomes, "an upgraded link is upgraded once"
        stream = await alice.stream(bob.id, Upgrade(), timeout_s=5)
        with pytest.raises(PeerError, match="only a relayed link can be upgraded"):
            await stream.receive(Upgrade)


@pytest.mark.parametrize(("what", "found"), [("CAN_PUNCH", False), ("family_of", lambda endpoint: None)])
async def test_without_a_hole_the_relayed_link_stays_and_says_why(
    what: str, found: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upgrade, what, found)
    monkeypatch.setattr(upgrade, "PAUSE_S", (0.0, 0.02))
    async with relayed() as (alice, bob, outcomes):
        await alice.call(bob.id, Echo(), Echo, timeout_s=5)
        await until(lambda: outcomes.get(bob.id) == "one of the two ends cannot punch holes")
        assert way(alice, bob) is LinkType.RELAYED
        assert await alice.call(bob.id, Echo(b"still"), Echo, timeout_s=5) == Echo(b"still")


def busy_at_first(monkeypatch: pytest.MonkeyPatch, times: int) -> list[Upgrade]:
    """Have the answering end be busy for the first ``times`` requests; returns the requests."""
    real, requests = Upgrades._on_upgrade, list[Upgrade]()

    async def answer(self: Upgrades, opening: Upgrade, stream: Stream) -> None:
        requests.append(opening)
        if len(requests) > times:
            await real(self, opening, stream)
        else:
            await stream.send(Upgrade(busy=True))

    monkeypatch.setattr(upgrade, "PAUSE_S", (0.0, 0.02))
    monkeypatch.setattr(Upgrades, "_on_upgrade", answer)
    return requests


async def test_an_end_that_stays_busy_is_named_and_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upgrade, "ASKS", 2)
    monkeypatch.setattr(upgrade, "AGAIN_S", 0.01)
    busy_at_first(monkeypatch, times=2)
    async with relayed() as (alice, bob, outcomes):
        await alice.call(bob.id, Echo(), Echo, timeout_s=5)
        await until(lambda: "was busy with other upgrades" in (outcomes.get(bob.id) or ""))
        await until(lambda: way(alice, bob) is LinkType.PUNCHED)


async def test_a_busy_end_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = busy_at_first(monkeypatch, times=upgrade.TRIES + 1)
    async with relayed() as (alice, bob, outcomes):
        await alice.call(bob.id, Echo(), Echo, timeout_s=5)
        await until(lambda: way(alice, bob) is LinkType.PUNCHED)
        await until(lambda: outcomes.get(bob.id, "not yet") is None)
    assert len(requests) == upgrade.TRIES + 2


@pytest.mark.parametrize("seen", [("", 0), ("192.0.2.1", 70_000), ("no address", -1)])
async def test_a_relay_that_lies_about_an_address_prevents_no_upgrade(
    seen: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Relay, "_seen", lambda relay, peer: seen)
    async with relayed() as (alice, bob, outcomes):
        await alice.call(bob.id, Echo(), Echo, timeout_s=5)
        await until(lambda: outcomes == {alice.id: None, bob.id: None})


async def test_silent_requests_to_upgrade_are_refused_after_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upgrade, "TALK_TIMEOUT_S", 0.01)
    monkeypatch.setattr(upgrade, "PUNCH_S", 0.01)
    monkeypatch.setattr(Upgrades, "_on_relayed", lambda self, link: None)
    async with relayed() as (alice, bob, _):
        faults: list[object] = []
        bob.linker._events.listen(lambda event: faults.append(event) if isinstance(event, Fault) else None)
        await alice.call(bob.id, Echo(), Echo, timeout_s=5)
        texts = []
        for _ in range(upgrade.TRIES + 1):
            stream = await alice.stream(bob.id, Upgrade(), timeout_s=5)
            with pytest.raises(PeerError) as caught:
                while True:
                    await stream.receive(Upgrade)
            texts.append(str(caught.value))
        assert not faults, faults
        assert "minute" in texts[-1] and not any("minute" in text for text in texts[:-1])


needs_reuse = pytest.mark.skipif(not CAN_PUNCH, reason="this system has no SO_REUSEPORT")


def free_port(family: int = socket.AF_INET) -> int:
    with bound_socket(family) as bound:
        return int(bound.getsockname()[1])


async def first_name(me: bytes, port: int, targets: list[Endpoint], seconds: float = 10.0) -> bytes | None:
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
@pytest.mark.parametrize(("host", "both"), [("127.0.0.1", True), ("127.0.0.1", False), ("::1", True)])
async def test_two_ends_talk_of_which_both_punch_or_one_only_listens(host: str, both: bool) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with bound_socket(family) as probe:
            probe.connect_ex((host, 9))
            alice, bob = free_port(family), free_port(family)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    one = first_name(b"alice", alice, [("192.0.2.1", 9), (host, bob)])
    other = first_name(b"bob", bob, [(host, alice if both else free_port(family))])
    assert await asyncio.gather(one, other) == [b"bob", b"alice"]


@needs_reuse
async def test_without_another_end_punching_ends_in_silence_and_frees_the_port() -> None:
    port = free_port()
    targets = [("127.0.0.1", free_port()), ("no address", 1), ("224.0.0.1", 1)]
    assert await first_name(b"alice", port, targets, seconds=0.05) is None
    with socket.socket() as plain:
        plain.bind(("127.0.0.1", port))


@needs_reuse
async def test_a_connection_to_oneself_is_refused() -> None:
    port = free_port()
    assert await first_name(b"alice", port, [("127.0.0.1", port)], seconds=0.05) is None


@given(st.floats(0.0, 0.4), st.floats(0.0, 1.0), st.integers())
def test_syns_cross_even_if_the_directions_differ(rtt_s: float, way_there: float, seed: int) -> None:
    """Sent at 0, the signal takes any part of the round trip; the direct way takes half of it."""
    asking = plan_tries(0.0, 30.0, rtt_s=rtt_s, answering=False, rng=random.Random(seed))
    received_at = way_there * rtt_s
    answering = plan_tries(received_at, 30.0, rtt_s=rtt_s, answering=True, rng=random.Random(seed))
    apart_s = [abs(one - other) for one, other in zip(asking, answering, strict=False)]
    assert min(apart_s) <= rtt_s / 2
    if way_there == 0.5:
        assert apart_s[0] < 1e-9


@given(st.floats(0.0, 5.0), st.floats(0.0, 10.0), st.booleans(), st.integers())
def test_tries_leave_time_for_a_refusal(rtt_s: float, seconds: float, answering: bool, seed: int) -> None:
    tries = plan_tries(100.0, 100.0 + seconds, rtt_s=rtt_s, answering=answering, rng=random.Random(seed))
    assert all(later - earlier > 1.4 * rtt_s for earlier, later in pairwise(tries))
    assert len(tries) <= seconds / 0.15 + 1 and all(at >= 100.0 for at in tries)


@given(st.binary(max_size=64) | st.text(max_size=45).map(lambda host: msgspec.msgpack.encode((host, 1))))
def test_garbage_is_no_endpoint(data: bytes) -> None:
    for name in ("example.org", "2001:db8::1%eth0"):
        assert family_of((name, 1)) is None
    try:
        endpoint: Endpoint = msgspec.msgpack.decode(data, type=Endpoint)
    except UNDECODABLE:
        return
    host, port = endpoint
    assert 1 <= port <= 65535 and len(host) <= 45
    assert family_of(endpoint) in (None, socket.AF_INET, socket.AF_INET6)
