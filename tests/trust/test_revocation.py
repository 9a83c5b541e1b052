"""A revoked peer is out at every other within a minute, whatever way the news takes."""

import asyncio
import random
from dataclasses import dataclass

import pytest

from colab_swarm.errors import PeerError
from colab_swarm.events import EventLog, Fault, Notice
from colab_swarm.net.membership import MembershipAdmission
from colab_swarm.net.peers import PeerId, short
from colab_swarm.runtime import BackgroundTasks, loop_now
from colab_swarm.sim import HOME, SimNetwork, SimPeers
from colab_swarm.trust.access import PULL_S, RevocationGossip
from colab_swarm.trust.authority import ShareRevoked
from tests.dht.swarm import join, swarm
from tests.net.swarm import until
from tests.trust.run import Echo, call, run_with

RUN = "my-run-0badcafe"
MALLORY = PeerId(b"m" * 32)


@dataclass
class Member:
    peers: SimPeers
    admission: MembershipAdmission
    gossip: RevocationGossip
    events: EventLog

    @property
    def knows(self) -> bool:
        return MALLORY in self.admission.revoked.subjects

    @property
    def learned_at(self) -> float:
        (notice,) = self.events.recent(Notice)
        return notice.at


def member(peers: SimPeers, authority: SimPeers, *, start: bool = True) -> Member:
    admission = MembershipAdmission(RUN, authority=authority.public_key, own=peers.public_key)
    events, rng = EventLog(), random.Random(peers.name)
    gossip = RevocationGossip(peers, admission, events, rng)
    if start:
        BackgroundTasks("revocations", events, rng).every(PULL_S, gossip.pull)
    return Member(peers, admission, gossip, events)


async def run_of(count: int, *, start: bool = True) -> tuple[SimNetwork, list[Member]]:
    """The first one is the authority."""
    network, members = await swarm(count, profile=HOME, upkeep=start)
    return network, [member(each.peers, members[0].peers, start=start) for each in members]


def revoke(authority: Member) -> None:
    sign, now = authority.peers.sign, authority.peers.time()
    authority.admission.learn(authority.admission.revoked.adding(MALLORY, now=now, sign=sign).encode())
    authority.gossip.spread()


@pytest.mark.virtual_time
async def test_all_peers_know_a_revocation_within_a_minute() -> None:
    _, found = await run_of(16)
    await asyncio.sleep(100.0)
    revoke(found[0])
    begun = loop_now()
    await asyncio.sleep(60.0)
    assert all(one.knows for one in found) and max(one.learned_at for one in found[1:]) - begun < 60.0
    (notice,) = found[7].events.recent(Notice)
    assert notice.text == f"the authority removed 1 peers or invitations: {short(MALLORY)}"
    assert not any(one.events.recent(Fault) for one in found)
    alice, bob = (one.peers for one in found[:2])
    ask = ShareRevoked(found[0].admission.revoked.version)
    assert await alice.call(bob.id, ask, ShareRevoked, timeout_s=5) == ask, "no list for one that has it"


@pytest.mark.virtual_time
async def test_late_joiners_and_peers_that_were_cut_off_learn_of_a_revocation_without_the_authority() -> None:
    network, found = await run_of(8)
    network.now().partition({"heidi"}, {"alice", "bob", "carol", "dave", "erin", "frank", "grace"})
    await asyncio.sleep(1.0)
    revoke(found[0])
    await asyncio.sleep(120.0)
    assert [one.knows for one in found] == [True] * 7 + [False]
    network.now().crash("alice")
    late = await join(network, "ivan", found[1].peers)
    ivan = member(late.peers, found[0].peers)
    network.now().heal()
    await asyncio.sleep(90.0)
    assert ivan.knows and found[7].knows
    assert [fault.name for fault in network.fired] == ["partition", "crash", "heal"]


@pytest.mark.virtual_time
async def test_a_list_that_is_not_the_authority_s_changes_nothing() -> None:
    _, (alice, bob, carol) = await run_of(3, start=False)
    sign = bob.peers.sign
    forged = bob.admission.revoked.adding(MALLORY, now=9e9, sign=sign).encode()
    for rubbish in (forged, b"rubbish"):
        ask, peer = ShareRevoked(5, rubbish), carol.peers.id
        assert (await bob.peers.call(peer, ask, ShareRevoked, timeout_s=5)).version == 0
    assert not carol.knows and not alice.knows


async def test_a_revoked_peer_loses_its_links_everywhere_and_gets_none_again() -> None:
    async with run_with("alice", "bob", "mallory") as (_, (authority, alice, bob, mallory)):
        for one in (alice, bob):
            assert await call(mallory, one) == Echo(b"in")
        await call(alice, bob)
        with pytest.raises(ValueError, match="this is the authority itself"):
            authority.trust.revoke(authority.node.id)
        with pytest.raises(PermissionError, match="only the peer that created the run"):
            alice.trust.revoke(mallory.node.id)
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
