"""Fetching: peers forward queries, within bounds, and a liar hides no answer of others."""

import asyncio
from collections import Counter

from colab_swarm.dht.records import Fetch, Fetched, FindNear, FoundNear
from colab_swarm.dht.service import FORWARD_WIDTH, MAX_FORWARDS, key_id
from colab_swarm.net.peers import PeerId
from colab_swarm.runtime import loop_now
from colab_swarm.sim import HOME
from tests.dht.swarm import Member, forged, holders, swarm


async def test_every_peer_fetches_a_stored_value() -> None:
    _, members = await swarm(20)
    await members[1].dht.publish("key", 7, ttl_s=60)
    readings = [await member.dht.fetch("key") for member in members]
    assert [reading.found[members[1].peers.id].value for reading in readings] == [7] * 20
    assert {0, 1} <= {reading.hops for reading in readings}
    nothing = await members[0].dht.fetch("nothing")
    assert (nothing.found, nothing.hops) == ({}, None)


async def test_silent_peers_delay_nothing() -> None:
    network, members = await swarm(16, profile=HOME)
    await members[0].dht.publish("key", 7, ttl_s=600)
    reader = next(member for member in members if member not in holders(members, "key"))
    nearest = [contact.id for contact in reader.dht.table.nearest(key_id("key"), 2)]
    silent = {member.peers.name for member in members if member.peers.id in nearest}
    network.now().partition(silent, {member.peers.name for member in members} - silent)
    began = loop_now()
    found = (await reader.dht.fetch("key")).found.values()
    assert [one.value for one in found] == [7] and loop_now() - began < 1
    assert [fault.name for fault in network.fired] == ["partition"]


async def test_a_liar_forges_no_signed_value() -> None:
    _, members = await swarm(8)
    alice = members[0]
    await alice.dht.publish("key", "true", ttl_s=60)
    lies = Counter[type]()
    readers = [member for member in members if member not in holders(members, "key")]

    async def lie_at_once(caller: PeerId, message: Fetch) -> Fetched:
        lies[Fetch] += 1
        return Fetched((forged(alice.peers),), 0)

    async def lie(caller: PeerId, message: FindNear) -> FoundNear:
        lies[FindNear] += 1
        return FoundNear((), (forged(alice.peers),))

    nearest = min(members, key=lambda m: int.from_bytes(m.peers.id) ^ int.from_bytes(key_id("key")))
    for kind, handler in ((Fetch, lie_at_once), (FindNear, lie)):
        nearest.peers.unserve(kind)
        nearest.peers.serve(kind, handler)  # type: ignore[arg-type]
    for reader in readers:
        for found in ((await reader.dht.fetch("key")).found, await reader.dht.get("key")):
            assert [one.value for one in found.values()] == ["true"]
    assert len(readers) == 3 and lies[Fetch] and lies[FindNear]


async def test_a_fetch_costs_a_bounded_number_of_queries() -> None:
    _, members = await swarm(20)
    asked = []
    for member in members:

        async def count(caller: PeerId, message: Fetch, member: Member = member) -> Fetched:
            asked.append(message)
            return await member.dht._on_fetch(caller, message)

        member.peers.unserve(Fetch)
        member.peers.serve(Fetch, count)
    for forwards, least, most in (
        (0, 1, 1),
        (1 << 40, 2, sum(FORWARD_WIDTH**i for i in range(MAX_FORWARDS + 1))),
    ):
        asked.clear()
        wanted = Fetch(key_id("nothing"), forwards)
        await members[0].peers.call(members[1].peers.id, wanted, Fetched, timeout_s=5)
        await asyncio.sleep(1)
        assert least <= len(asked) <= most
