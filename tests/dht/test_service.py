"""The DHT on a simulated network: found everywhere, merged, signed, surviving faults and bad clocks."""

import asyncio
import random
from typing import Any

import pytest

from colab_swarm.dht.records import Fetch, FindNear, FoundNear, Storage
from colab_swarm.dht.routing import MAX_FAILURES, distance
from colab_swarm.dht.service import DHT, is_sound, key_id
from colab_swarm.errors import CallRefused
from colab_swarm.events import EventLog, Fault
from colab_swarm.net.peers import Contact, PeerId
from colab_swarm.runtime import loop_now
from colab_swarm.sim import HOME
from tests.dht.swarm import Member, holders, join, swarm


async def read(member: Member, key: str) -> dict[bytes, Any]:
    return {subkey: found.value for subkey, found in (await member.dht.get(key)).items()}


async def test_a_peer_alone_stores_and_gets() -> None:
    _, (alice,) = await swarm(1)
    for value in (2, 1):  # within a microsecond
        await alice.dht.publish("key", value, ttl_s=60)
    assert [await read(alice, key) for key in ("key", "none")] == [{alice.peers.id: 1}, {}]
    with pytest.raises(ValueError, match="too long"):
        await alice.dht.publish("key", bytes(1 << 16), ttl_s=60)


async def test_every_peer_sees_all_progress_within_a_second_and_so_does_one_in_client_mode() -> None:
    network, members = await swarm(7, profile=HOME)
    client = await join(network, "client", members[0].peers, listen=False)
    everyone = [*members, client]
    for step in range(5):
        for member in everyone:
            assert await member.dht.publish("progress", step, ttl_s=30) >= 5
        began = loop_now()
        progress = [await read(member, "progress") for member in everyone]
        assert loop_now() - began < len(everyone)
        assert progress == [{member.peers.id: step for member in everyone}] * len(everyone)
    assert not any(client.peers.id in member.dht.table for member in members)


async def test_a_key_stored_lately_needs_no_lookup_and_outlives_all_but_one_of_its_holders() -> None:
    network, members = await swarm(40)
    took_s = []
    for value in (6, 7):
        began = loop_now()
        await members[0].dht.publish("key", value, ttl_s=600)
        took_s.append(loop_now() - began)
    assert took_s[1] < 0.8 * took_s[0]
    nearest_first = sorted(holders(members, "key"), key=lambda m: distance(m.peers.id, key_id("key")))
    reader = next(member for member in members[1:] if member not in nearest_first)
    for member in nearest_first[:3]:
        member.dht._storage = Storage(member.peers.role_by)
    assert await read(reader, "key") == {members[0].peers.id: 7}
    for member in nearest_first[3:-1]:
        network.now().crash(member.peers.name)
    assert await read(reader, "key") == {members[0].peers.id: 7}
    assert len(nearest_first) >= 5 and network.fired


async def test_a_peer_is_found_by_its_id() -> None:
    _, members = await swarm(20)
    assert await members[19].dht.find_peer(members[17].peers.id) == members[17].peers.contact
    assert await members[3].dht.find_peer(PeerId(bytes(32))) is None


@pytest.mark.parametrize("skew_s", [3600.0, -3600.0])
async def test_a_clock_that_is_off_or_set_to_and_fro_neither_raises_nor_hides_records(skew_s: float) -> None:
    """Alone a peer goes by its machine's clock, and with others as it ran while they agreed."""
    network, (alice, bob, _) = await swarm(3)
    network.now().skew("bob", 300.0)
    for value in (1, 2):
        await bob.dht.publish("by bob", value, ttl_s=20)
        await alice.dht.publish("by alice", value, ttl_s=20)
    for reader in (alice, bob):
        assert await read(reader, "by alice") == {alice.peers.id: 2}
        assert await read(reader, "by bob") == {bob.peers.id: 2}
    assert await alice.dht.publish("key", 1, ttl_s=60) == 3
    network.now().partition({"alice"}, {"bob", "carol"})
    await asyncio.sleep(200)
    assert not alice.peers.linked()
    for value, ahead_s in enumerate((skew_s, 0.0, skew_s), 2):
        network.now().skew("alice", ahead_s)
        await alice.dht.publish("key", value, ttl_s=60)
    network.now().heal()
    await alice.dht.bootstrap([bob.peers.contact])
    assert await alice.dht.publish("key", 5, ttl_s=60) >= 2
    assert await read(bob, "key") == {alice.peers.id: 5}


async def test_a_liar_that_names_endless_peers_costs_a_few_calls() -> None:
    _, (alice, mallory) = await swarm(2)
    lies = tuple(Contact(PeerId(i.to_bytes(32, "big")), ("sim://no-peer",)) for i in range(3000))
    asked: list[PeerId] = []

    async def lie(caller: PeerId, message: FindNear) -> FoundNear:
        asked.append(caller)
        return FoundNear((Contact(PeerId(b"short"), ("sim://x",)), *lies))

    mallory.peers.unserve(FindNear)
    mallory.peers.serve(FindNear, lie)
    lookup = await alice.dht.find_near(bytes(32), width=20)
    assert len(asked) == 1 and lookup.calls <= 22


async def test_wrong_keys_and_wrong_contacts_are_refused_or_not_passed_on() -> None:
    _, (alice, bob, carol) = await swarm(3)
    for wrong in (
        FindNear(key_id("key"), Contact(carol.peers.id, ("sim://bob",))),
        FindNear(b"x", bob.peers.contact),
        Fetch(b"x", 1),
    ):
        with pytest.raises(CallRefused) as refused:
            await bob.peers.call(alice.peers.id, wrong, FoundNear, timeout_s=5)
        assert refused.value.code == "refused"
    for _ in range(MAX_FAILURES):
        await bob.dht.find_near(b"x", width=1)
        alice.dht.table.failed(bob.peers.id)
    assert alice.peers.id in bob.dht.table, "an answer, too"
    endless = FindNear(key_id("key"), Contact(bob.peers.id, ("",) * 100_000))
    await bob.peers.call(alice.peers.id, endless, FoundNear, timeout_s=5)
    assert bob.peers.id not in alice.dht.table
    most = ("x" * 50,) * 16
    assert is_sound(Contact(bob.peers.id, most)) and not is_sound(Contact(bob.peers.id, (*most, "")))


async def test_a_new_peer_gets_the_records_it_is_nearest_to_by_upkeep() -> None:
    network, members = await swarm(3, upkeep=True)
    await members[0].dht.publish("key", 7, ttl_s=600)
    dave = await join(network, "dave", members[0].peers)
    await asyncio.sleep(1)
    assert holders([dave], "key") == [dave]


async def test_bootstrap_counts_the_answers_and_stop_ends_reads_and_tasks() -> None:
    network, members = await swarm(4, profile=HOME)
    late = network.peer("mallory")
    dht = DHT(late, random.Random(0))
    assert await dht.bootstrap([Contact(PeerId(bytes(32)), ("sim://no-peer",))]) == 0
    assert await dht.bootstrap([late.contact, members[2].peers.contact]) == 4
    dht.start()
    reading = asyncio.create_task(dht.get("key"))
    await asyncio.sleep(0.001)
    await dht.stop()
    assert await reading == {}
    with pytest.raises(CallRefused, match="not served"):
        await members[0].peers.call(
            late.id, FindNear(key_id("key"), members[0].peers.contact), FoundNear, timeout_s=5
        )
    assert len(asyncio.all_tasks()) == 1


async def test_upkeep_that_fails_is_an_event_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> list[bytes]:
        raise ZeroDivisionError("a bug")

    _, members = await swarm(2)
    monkeypatch.setattr("colab_swarm.dht.service.REFRESH_S", 10.0)
    events = EventLog()
    await members[1].dht.stop()
    dht = DHT(members[1].peers, random.Random(0), events)
    monkeypatch.setattr(dht.table, "refresh_targets", fail)
    dht.start()
    await asyncio.sleep(60)
    await dht.stop()
    faults = {(fault.where, fault.text) for fault in events.recent(Fault) if isinstance(fault, Fault)}
    assert faults == {("upkeep of the DHT", "ZeroDivisionError: a bug")}
    assert len(events.recent(Fault)) > 1


async def test_two_halves_of_a_swarm_meet_again_within_a_minute() -> None:
    network, members = await swarm(8, upkeep=True)
    halves = {"alice", "bob", "carol", "dave"}, {"erin", "frank", "grace", "heidi"}
    network.now().partition(*halves)
    network.now().crash(members.pop(0).peers.name)  # through alice all of them joined
    for _ in range(10):
        for member in members:
            await member.dht.publish("key", 1, ttl_s=60)
            await member.dht.find_peer(PeerId(bytes(32)))
        await asyncio.sleep(60)
    apart = {len(member.dht.table) for member in members}
    network.now().heal()
    await asyncio.sleep(60)
    assert (apart, {len(member.dht.table) for member in members}) == ({2, 3}, {6})
    assert [fault.name for fault in network.fired] == ["partition", "crash", "heal"]
