"""A revoked peer is out at every other within a minute, whatever way the news takes."""

import asyncio
import random
from dataclasses import dataclass
from functools import partial

import pytest

from colab_swarm.dht.service import DHT
from colab_swarm.errors import PeerError
from colab_swarm.events import EventLog, Fault, Notice
from colab_swarm.net.membership import MembershipAdmission
from colab_swarm.net.peers import PeerId, short
from colab_swarm.runtime import loop_now
from colab_swarm.sim import HOME, SimNetwork, SimPeers
from colab_swarm.trust.access import PERIOD_S, RevocationWatch, repeat
from colab_swarm.trust.authority import ShareRevoked
from tests.dht.swarm import join, swarm
from tests.net.swarm import until
from tests.trust.run import Echo, call, run_with

RUN = "my-run-0badcafe"
MALLORY = PeerId(b"m" * 32)


@dataclass
class Watcher:
    peers: SimPeers
    dht: DHT
    admission: MembershipAdmission
    watch: RevocationWatch
    events: EventLog
    rechecked: list[float]


async def watchers(count: int, *, start: bool = True) -> tuple[SimNetwork, list[Watcher]]:
    """The first one is the authority."""
    network, members = await swarm(count, profile=HOME)
    found = []
    for index, member in enumerate(members):
        own = member.peers.public_key
        admission = MembershipAdmission(RUN, authority=members[0].peers.public_key, own=own)
        events, rechecked = EventLog(), list[float]()
        rng, spawn = random.Random(index), asyncio.get_running_loop().create_task
        note = partial(lambda times: times.append(loop_now()), rechecked)
        watch = RevocationWatch(member.peers, member.dht, admission, events, rng, note, spawn)
        if start:
            spawn(repeat(watch.poll, PERIOD_S, events, "looking for revocations", rng))
            member.dht.start()
        found.append(Watcher(member.peers, member.dht, admission, watch, events, rechecked))
    return network, found


def revoke(authority: Watcher, subject: PeerId = MALLORY) -> None:
    sign, now = authority.peers.sign, authority.peers.time()
    authority.admission.learn(authority.admission.revoked.adding(subject, now=now, sign=sign).encode())
    authority.watch.spread()


@pytest.mark.virtual_time
async def test_all_peers_know_a_revocation_within_a_minute() -> None:
    _, found = await watchers(16)
    await asyncio.sleep(100.0)
    revoke(found[0])
    begun = loop_now()
    await asyncio.sleep(60.0)
    late = [watcher.rechecked[0] - begun for watcher in found]
    assert max(late) < 60.0 and all(MALLORY in watcher.admission.revoked.subjects for watcher in found)
    (notice,) = found[7].events.recent(Notice)
    assert notice.text == f"the authority removed 1 peers or invitations: {short(MALLORY)}"
    assert not any(watcher.events.recent(Fault) for watcher in found)
    alice, bob = (watcher.peers for watcher in found[:2])
    ask = ShareRevoked(found[0].admission.revoked.version)
    assert await alice.call(bob.id, ask, ShareRevoked, timeout_s=5) == ask, "no list for one that has it"


@pytest.mark.virtual_time
async def test_a_peer_that_was_cut_off_learns_of_a_revocation_soon_after_its_return() -> None:
    network, found = await watchers(8)
    network.now().partition({"heidi"}, {"alice", "bob", "carol", "dave", "erin", "frank", "grace"})
    await asyncio.sleep(1.0)
    revoke(found[0])
    await asyncio.sleep(120.0)
    assert not found[7].rechecked and all(watcher.rechecked for watcher in found[:7])
    network.now().heal()
    healed = loop_now()
    await asyncio.sleep(90.0)
    assert found[7].rechecked[0] - healed < 90.0  # it finds the others again by then
    assert [fault.name for fault in network.fired] == ["partition", "heal"]


@pytest.mark.virtual_time
async def test_the_news_outlives_the_authority() -> None:
    network, found = await watchers(8)
    revoke(found[0])
    await asyncio.sleep(30.0)
    assert found[0].peers.id in await found[1].dht.get(found[1].watch.key)
    network.now().crash("alice")
    ivan = await join(network, "ivan", found[1].peers)
    admission = MembershipAdmission(RUN, authority=found[0].admission.own, own=ivan.peers.public_key)
    rng, spawn = random.Random(0), asyncio.get_running_loop().create_task
    await RevocationWatch(ivan.peers, ivan.dht, admission, EventLog(), rng, lambda: None, spawn).poll()
    assert admission.revoked.subjects == (MALLORY,)
    assert [fault.name for fault in network.fired] == ["crash"]


@pytest.mark.virtual_time
async def test_members_that_stuff_the_key_do_not_hide_the_news() -> None:
    _, found = await watchers(8, start=False)
    for watcher in found[1:]:
        assert await watcher.dht.publish(watcher.watch.key, bytes(30_000), ttl_s=3600)
    revoke(found[0])
    await asyncio.sleep(10.0)
    assert found[0].peers.id in await found[1].dht.get(found[1].watch.key)


@pytest.mark.virtual_time
async def test_the_news_passes_from_peer_to_peer_where_the_dht_has_none() -> None:
    _, found = await watchers(8)
    for watcher in found[1:]:
        watcher.watch.key = "another"
    revoke(found[0])
    await asyncio.sleep(60.0)
    assert all(watcher.rechecked for watcher in found)


@pytest.mark.virtual_time
async def test_a_list_that_is_not_the_authority_s_changes_nothing() -> None:
    _, found = await watchers(3, start=False)
    alice, bob, carol = found
    sign = bob.peers.sign
    forged = bob.admission.revoked.adding(MALLORY, now=9e9, sign=sign).encode()
    for rubbish in (forged, b"rubbish"):
        ask, peer = ShareRevoked(5, rubbish), carol.peers.id
        assert (await bob.peers.call(peer, ask, ShareRevoked, timeout_s=5)).version == 0
    assert not carol.rechecked and not alice.rechecked


async def test_a_revoked_peer_loses_its_links_everywhere_and_gets_none_again() -> None:
    async with run_with("alice", "bob", "mallory") as (_, (authority, alice, bob, mallory)):
        for one in (alice, bob):
            assert await call(mallory, one) == Echo(b"in")
        await call(alice, bob)
        authority.trust.revoke(mallory.node.id)
        await until(lambda: all(mallory.node.id not in one.node.linked() for one in (authority, alice, bob)))
        for one in (alice, bob, authority):
            with pytest.raises(PeerError, match="revoked your membership: ask its organizer"):
                await call(mallory, one)
        assert await call(alice, bob) == Echo(b"in")


async def test_a_revoked_invitation_spares_peers_that_the_authority_has_confirmed() -> None:
    async with run_with() as (here, (authority,)):
        invitation = here.invite()
        alice, bob = await here.start("alice", invitation), await here.start("bob", invitation)
        await alice.member.tick()
        authority.trust.revoke(invitation.key.id)
        assert await call(alice, authority) == Echo(b"in")
        with pytest.raises(PeerError, match="revoked"):
            await call(bob, alice)


async def test_only_the_authority_revokes_others_and_it_remembers_after_a_restart() -> None:
    async with run_with("alice") as (here, (authority, alice)):
        with pytest.raises(ValueError, match="this is the authority itself"):
            authority.trust.revoke(authority.node.id)
        with pytest.raises(PermissionError, match="only the peer that created the run"):
            alice.trust.revoke(MALLORY)
        authority.trust.revoke(MALLORY)
        await here.leave(authority)
        again = await here.start("authority")
        assert again.admission.revoked.subjects == (MALLORY,)


@pytest.mark.virtual_time
async def test_background_work_that_fails_emits_an_event_and_is_done_again() -> None:
    async def fail() -> None:
        raise ZeroDivisionError("a bug")

    events = EventLog()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.5 * PERIOD_S):
            await repeat(fail, PERIOD_S, events, "looking for revocations", random.Random(0))
    faults = [(fault.where, fault.text) for fault in events.recent(Fault) if isinstance(fault, Fault)]
    assert faults == [("looking for revocations", "ZeroDivisionError: a bug")] * 2
