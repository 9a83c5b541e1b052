"""iroh as a carrier: `tests.net.test_contract` has the tests of all carriers."""

import asyncio
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from colab_swarm.errors import PeerUnreachable
from colab_swarm.events import EventLog, Notice
from colab_swarm.net import iroh as carrier
from colab_swarm.net.addresses import host_of, is_address, may_dial_back, only_local
from colab_swarm.net.peers import Contact, PeerId
from tests.net.swarm import LOOPBACK, Echo, peers, start, until, without_iroh

pytestmark = without_iroh
ID = "ab" * 32
BY_IROH = replace(LOOPBACK, listen=False, iroh="direct")


def test_an_address_names_the_endpoint_and_where_to_find_it() -> None:
    for place in ("192.0.2.1:4500", "[2001:db8::1]:4500", "relay.test"):
        assert is_address(f"iroh://{ID}@{place}")
    for wrong in (f"//{ID}", f"//{ID[:-1]}@192.0.2.1:1", f"//{ID}@relay.test/x", ID):
        assert not is_address(f"iroh:{wrong}")
    assert host_of(f"iroh://{ID}@192.0.2.1:4500") == "192.0.2.1"
    assert not may_dial_back(f"iroh://{ID}@192.0.2.1:4500", "192.0.2.1")
    assert only_local([Contact(PeerId(bytes(32)), (f"iroh://{ID}@127.0.0.1:1",))])


async def test_without_iroh_a_peer_is_reached_otherwise_and_with_it_always_at_one_endpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with peers("alice", "bob") as (alice, bob):
        monkeypatch.setitem(sys.modules, "iroh", None)
        alice.learn(Contact(bob.id, (f"iroh://{ID}@127.0.0.1:9",)))
        assert await alice.call(bob.id, Echo(b"ws"), Echo, timeout_s=5) == Echo(b"ws")
        with pytest.raises(PeerUnreachable, match="pip install iroh"):
            await alice.iroh.start()
    with pytest.raises(PeerUnreachable, match="pip install iroh"):
        await start("carol", BY_IROH)
    monkeypatch.undo()
    ids = set()
    for _ in range(2):
        async with peers("dave", settings=BY_IROH) as (dave,):
            ids.add(dave.contact.addresses[0].partition("@")[0])
    assert len(ids) == 1 and dave.id.hex() not in ids.pop(), "the same endpoint after a restart"


async def test_a_relay_is_used_only_after_a_yes_and_others_are_met_at_their_ip_addresses() -> None:
    public, refused = "use1-1.relay.n0.iroh.link", "is an iroh relay, which this peer may not use"
    async with peers("carol") as (carol,):
        with pytest.raises(PeerUnreachable, match="public iroh relay, which only iroh='public' allows"):
            await carol.dial_direct(carol.id, f"iroh://{ID}@{public}")
        assert carol.iroh._endpoint is None  # nothing was sent
    alone = replace(LOOPBACK, iroh_relays=False)
    async with peers("alice", settings=alone) as (alice,), peers("bob", settings=BY_IROH) as (bob,):
        for relay in ("relay.test", public):
            with pytest.raises(PeerUnreachable, match=f"{relay} {refused}"):
                await alice.dial_direct(bob.id, f"iroh://{ID}@{relay}")
        assert alice.iroh._endpoint is None  # nothing was sent
        alice.learn(bob.contact)
        assert await alice.call(bob.id, Echo(b"direct"), Echo, timeout_s=10) == Echo(b"direct")


async def test_an_own_relay_that_is_dead_leaves_the_direct_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrier, "ONLINE_S", 0.2)
    dead = replace(BY_IROH, iroh="https://127.0.0.1:9")
    async with peers("alice", "bob", settings=dead) as (alice, bob), peers("carol") as (carol,):
        assert [event.text for event in bob.iroh._events.recent(Notice)] == [carrier.NO_RELAY]
        assert bob.iroh.relayed  # nobody has come yet, and it was told to use one
        assert await alice.call(bob.id, Echo(b"x"), Echo, timeout_s=5) == Echo(b"x")
        assert alice.way_to(bob.id) == bob.way_to(alice.id) == "iroh"
        assert not bob.iroh.relayed
        name = bob.contact.addresses[0].partition("@")[0]
        with pytest.raises(PeerUnreachable):
            await carol.probe(bob.id, f"{name}@localhost:9", timeout_s=0.5)


async def test_silent_connections_take_no_room_from_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrier, "MAX_HANDSHAKES", 8)
    monkeypatch.setattr(carrier, "HANDSHAKE_TIMEOUT_S", 0.5)
    async with peers("alice") as (alice,), peers("bob", settings=BY_IROH) as (bob,):
        alice.learn(bob.contact)
        (address,) = bob.contact.addresses
        deaf: Any = SimpleNamespace(on_lost=lambda reason: None)
        held = [await alice.iroh.connect(address, deaf) for _ in range(2)]
        for websocket in held:
            websocket.send_bytes(b"?")  # no handshake; a stream that is silent is not seen at all
        await until(lambda: bob.iroh._fresh.total() == 2)
        third = asyncio.create_task(alice.call(bob.id, Echo(b"in"), Echo, timeout_s=20))
        await until(lambda: bob.iroh._fresh.total() < 2)
        assert await third == Echo(b"in")
        for websocket in held:
            websocket.abort()


async def test_public_relays_carry_their_quota_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrier, "WATCH_S", 0.001)
    monkeypatch.setattr(carrier, "QUOTA_BYTES", 1000.0)
    events = EventLog()
    async with peers("alice", settings=replace(LOOPBACK, iroh="direct")) as (alice,):
        endpoint = alice.iroh
        endpoint._public, endpoint._events = True, events
        relayed, direct = (MagicMock(relayed=carried > 0, relayed_bytes=carried) for carried in (850, 0))
        endpoint._carried = {relayed: 0, direct: 0}
        counting = asyncio.create_task(endpoint._watch())
        await until(lambda: bool(events.recent(Notice)))
        assert not relayed.abort.called
        relayed.relayed_bytes = 1001
        await until(lambda: relayed.abort.called)
        assert not direct.abort.called
        with pytest.raises(PeerUnreachable, match="used up"):
            await alice.dial_direct(alice.id, f"iroh://{ID}@use1-1.relay.n0.iroh.link")
        counting.cancel()


def test_the_fast_copy_writes_what_the_slow_one_does_and_only_in_the_iroh_that_it_fits() -> None:
    from iroh import iroh_ffi

    carrier._load()
    assert carrier._prepared[iroh_ffi], "iroh's version has changed: see `_copy_fast`"
    for value in (b"", b"x", bytearray(b"abc"), memoryview(b"0123456789" * 1000)):
        trial = iroh_ffi._UniffiRustBufferBuilder()
        trial.write(b"head")
        trial.write(value)
        assert bytes(trial.rbuf.data[: trial.rbuf.len]) == b"head" + bytes(value)
        trial.discard()

    class Builder:
        def write(self, value: bytes) -> None:
            raise RuntimeError("changed")

        def _reserve(self, size: int) -> None: ...

    module, write = SimpleNamespace(_UniffiRustBufferBuilder=Builder), Builder.write
    for version, other in (("1.3.0", module), ("1.2.0", module), ("1.2.0", SimpleNamespace())):
        assert not carrier._copy_fast(other, version)
    assert Builder.write is write
