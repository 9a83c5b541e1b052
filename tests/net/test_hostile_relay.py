"""Relays, callers and neighbours that mean ill."""

from __future__ import annotations

import asyncio
import gc
import os
import random
from types import SimpleNamespace
from typing import Any

import pytest

from colab_swarm.errors import CallRefused, PeerError
from colab_swarm.events import Fault
from colab_swarm.net import upgrade
from colab_swarm.net.addresses import may_dial_back
from colab_swarm.net.carrier import LinkType, Path
from colab_swarm.net.handshake import TICKET
from colab_swarm.net.peers import Ack, Contact, PeerId, Refusal
from colab_swarm.net.relay import (
    OFFERS_AT_ONCE,
    CircuitOffer,
    Circuits,
    CircuitTicket,
    OpenCircuit,
    Relay,
    RelayQuota,
    RelayState,
    Reserve,
    Reserved,
    _Pump,
)
from colab_swarm.net.upgrade import Upgrade, UpgradeReady, Upgrades
from tests.net.swarm import Echo, peers, run, until
from tests.net.test_relay import relayed as circuit
from tests.net.test_upgrade import relayed

ALICE, BOB, CAROL = PeerId(b"a" * 32), PeerId(b"b" * 32), PeerId(b"c" * 32)


class Socket:
    """What a pump asks of a WebSocket."""

    def __init__(self) -> None:
        self.reading = True

    def send(self, size: int, fill: Any) -> int:
        return size

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


async def test_many_messages_of_one_read_wait_for_the_quota_together() -> None:
    async with peers("carol") as (carol,):
        relay = Relay(carol, RelayQuota(circuit_bps=8e4))
        loop = asyncio.get_running_loop()
        circuit = relay.state.open(ALICE, BOB, loop.time(), os.urandom)
        near, far = (_Pump(relay, circuit, Socket()) for _ in range(2))  # type: ignore[arg-type]
        near.other, far.other = far, near
        while circuit.buckets[0].delay(loop.time()) < 1.0:
            near.on_message(memoryview(bytes(100)))
        await asyncio.sleep(0.1)
        assert not near.socket.reading  # type: ignore[attr-defined]
        relay.state.circuits.clear()
        relay.close()


async def test_a_relay_leads_neither_to_itself_nor_back_to_the_caller() -> None:
    async with peers("alice", "carol") as (alice, carol):
        relay = Relay(carol)
        for called in (alice.id, carol.id):
            with pytest.raises(CallRefused, match="a third peer"):
                await alice.call(carol.id, OpenCircuit(called), CircuitTicket, timeout_s=5)
        assert not relay.state.circuits
        relay.close()


def test_one_caller_cannot_use_up_what_a_peer_may_have_open() -> None:
    books = RelayState(RelayQuota(circuits_per_peer=32), now=0.0)
    with pytest.raises(Refusal, match="between the two"):
        for _ in range(32):
            books.open(ALICE, BOB, 0.0, os.urandom)
    assert books.open(CAROL, BOB, 0.0, os.urandom)


async def test_a_ticket_that_was_guessed_leaves_no_error_behind() -> None:
    unhandled: list[str] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda loop, context: unhandled.append(context["message"])
    )
    async with peers("alice", "carol") as (alice, carol):
        relay = Relay(carol)
        lost = asyncio.get_running_loop().create_future()

        class Guesser:
            def on_message(self, data: memoryview) -> None: ...
            def on_writable(self, writable: bool) -> None: ...
            def on_lost(self, reason: str) -> None:
                lost.set_result(reason)

        socket = await alice.linker.connect(carol.contact.addresses[0], Guesser())
        socket.send_bytes(TICKET + b"guess")
        assert "not valid" in await lost
        relay.close()
    gc.collect()
    assert unhandled == []


async def test_offers_without_end_are_refused() -> None:
    async with peers("alice", "carol") as (alice, carol):
        circuits = Circuits(alice, lambda: asyncio.sleep(0, []), lambda: None, random.Random(1))
        shown = 0

        async def never(relay: PeerId, token: bytes, receiver: Any) -> Any:
            nonlocal shown
            shown += 1
            await asyncio.Event().wait()

        circuits._show = never  # type: ignore[assignment,method-assign]
        refused = 0
        for _ in range(100):
            try:
                await carol.call(alice.id, CircuitOffer(BOB, bytes(16)), Ack, timeout_s=5)
            except CallRefused:
                refused += 1
        await asyncio.sleep(0)
        assert shown == OFFERS_AT_ONCE and refused == 100 - shown


async def test_a_peer_with_all_the_links_it_may_have_takes_none_through_relays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with peers("carol") as (carol,), circuit(carol) as (alice, bob, _):
        monkeypatch.setattr(bob.linker.table, "full", lambda limit: True)
        with pytest.raises(PeerError):
            await alice.call(bob.id, Echo(), Echo, timeout_s=5)
        assert bob.linked() == {carol.id}


async def test_a_relay_that_drops_peers_with_a_place_is_retried_after_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with peers("alice", listen=False) as (alice,), peers("carol") as (carol,):
        places = 0

        async def drop(peer: PeerId, message: Reserve) -> Reserved:
            nonlocal places
            places += 1
            loop = asyncio.get_running_loop()
            loop.call_later(0.002, lambda: [link.abort("") for link in carol.linker.table.of(peer)])
            return Reserved(300.0, "192.0.2.1", 1)

        carol.serve(Reserve, drop)

        async def candidates() -> list[Contact]:
            return [carol.contact]

        circuits = Circuits(alice, candidates, lambda: None, random.Random(1))
        circuits.start()
        await until(lambda: places == 1)
        await asyncio.sleep(0.15)
        assert places == 1


def test_a_relay_that_lies_about_where_it_sees_a_peer_does_not_keep_it_from_upgrading() -> None:
    async def main() -> None:
        async with relayed() as (alice, bob, outcomes):
            await alice.call(bob.id, Echo(), Echo, timeout_s=5)
            await until(lambda: outcomes == {alice.id: None, bob.id: None})

    for seen in (("", 0), ("192.0.2.1", 70_000), ("no address", -1)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Relay, "_seen", lambda relay, peer, seen=seen: seen)
            run(main())


EVIL = (
    "ws://127.0.0.1:1/api?delete=all",
    "s://127.0.0.1/admin",
    "ws://10.0.0.1:22",
    "ws://169.254.169.254:80",
    "ws://203.0.113.9:22",
    "ws://localhost:2",
    "wss://localhost:2",
)


async def test_a_relayed_peer_can_only_have_its_own_host_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Upgrades, "_on_relayed", lambda self, link: None)
    async with relayed() as (alice, bob, _):
        dialled: list[str] = []

        async def dial(peer: PeerId, address: str) -> Any:
            dialled.append(address)
            raise PeerError(address)

        monkeypatch.setattr(bob.linker, "dial_direct", dial)
        await alice.call(bob.id, Echo(), Echo, timeout_s=5)
        bob.linker.book.replace(Contact(alice.id, (*EVIL, "ws://127.0.0.1:2")))
        stream = await alice.stream(bob.id, Upgrade(), timeout_s=5)
        await stream.receive(UpgradeReady)
        assert dialled == ["ws://127.0.0.1:2"]  # where the relay sees alice
        await stream.end()


@pytest.mark.parametrize(
    ("relay_at", "claimed", "believed"),
    [
        ("203.0.113.1", "203.0.113.9", "203.0.113.9"),
        ("192.168.1.2", "203.0.113.9", "203.0.113.9"),
        ("192.168.1.2", "192.168.1.5", "192.168.1.5"),
        ("203.0.113.1", "192.168.1.5", ""),
        ("203.0.113.1", "127.0.0.1", ""),
        ("192.168.1.2", "127.0.0.1", ""),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
    ],
)
async def test_a_relay_that_is_not_in_our_network_names_no_host_in_it(
    relay_at: str, claimed: str, believed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with peers("alice") as (alice,):
        upgrades = Upgrades(alice, lambda relay: None, lambda peer, fault: None, random.Random(1))
        monkeypatch.setattr(alice, "path_to", lambda relay: Path(remote=(relay_at, 1)))
        assert upgrades._seen(Path(LinkType.RELAYED, relay=CAROL, caller_host=claimed)) == believed


async def test_a_peer_that_requests_upgrades_and_stays_silent_is_refused_after_a_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
                    await stream.receive(UpgradeReady)
            texts.append(str(caught.value))
        assert not faults, faults
        assert "minute" in texts[-1] and not any("minute" in text for text in texts[:-1])


@pytest.mark.parametrize(
    ("address", "seen", "may"),
    [
        ("ws://198.51.100.7:22", "198.51.100.7", True),
        ("ws://198.51.100.7:22", "203.0.113.9", False),
        ("ws://[2001:db8::1]:22", "203.0.113.9", False),
        ("ws://198.51.100.7:22", "2001:db8::1", False),
        ("ws://[2001:db8::1]:22", "2001:db8:0::1", True),
        ("ws://198.51.100.7:22", "::ffff:198.51.100.7", True),
        ("ws://198.51.100.7:22", "192.168.1.2", False),
        ("ws://198.51.100.7:22/relay/" + "0" * 64, "198.51.100.7", False),
        ("ws://metadata.internal:80", "203.0.113.9", False),
        ("ws://192.168.1.1:80", "192.168.1.2", False),
        ("ws://192.168.1.2:80", "192.168.1.2", True),
        ("ws://169.254.169.254:80", "192.168.1.2", False),
        ("ws://169.254.169.254:80", "127.0.0.1", False),
        ("ws://192.168.1.1:80", "", False),
        ("ws://127.0.0.1:80", "", False),
        ("ws://[::ffff:127.0.0.1]:80", "192.168.1.2", False),
        ("ws://0.0.0.0:80", "192.168.1.2", False),
        ("ws://198.51.100.7:22/admin", "198.51.100.7", False),
        ("wss://localhost:80", "127.0.0.1", False),
        ("ws://127.0.0.1:80", "192.168.1.2", False),
        ("ws://[::1]:80", "127.0.0.1", True),
        ("ws://127.evil.example:80", "127.0.0.1", False),
        ("ws://2130706433:80", "127.0.0.1", False),
        ("ws://198.51.100.7:22", "", False),
        ("ws://198.51.100.7:22", "no address", False),
    ],
)
def test_only_the_requesting_host_is_dialled_back(address: str, seen: str, may: bool) -> None:
    assert may_dial_back(address, seen) is may


@pytest.mark.parametrize(
    ("remote", "way"), [("203.0.113.9", LinkType.DIRECT), ("127.0.0.1", LinkType.TUNNEL)]
)
async def test_a_caller_outside_is_not_taken_for_the_tunnels_agent(
    remote: str, way: LinkType, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with peers("alice") as (alice,):
        monkeypatch.setattr(alice.linker, "_receiver", lambda expected, path: path)
        request: Any = SimpleNamespace(remote=remote, headers={"X-Forwarded-For": "198.51.100.7"})
        path: Any = alice.linker._receive_caller(request)
        assert path.way is way
