"""A closed run of real peers for these tests: each with its links, its DHT and its trust."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from colab_swarm.dht.service import DHT, DHTSettings
from colab_swarm.events import EventLog
from colab_swarm.net.identity import Identity
from colab_swarm.net.membership import Grant, MembershipAdmission
from colab_swarm.net.node import Node
from colab_swarm.net.peers import Role
from colab_swarm.trust.access import RunAccess, Trust
from colab_swarm.trust.authority import Allowlist, AuthorityBook
from colab_swarm.trust.member import Credentials, RunMember
from tests.net.swarm import LOOPBACK, echo, identity
from tests.net.swarm import Echo as Echo

RUN = "my-run-0badcafe"


class Clock:
    """A wall clock that tests can move; every peer has its own."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


class Peer:
    """One peer of the run."""

    def __init__(self, node: Node, dht: DHT, trust: Trust, events: EventLog, clock: Clock) -> None:
        self.node, self.dht, self.trust, self.events, self.clock = node, dht, trust, events, clock

    @property
    def member(self) -> RunMember:
        assert self.trust._member is not None
        return self.trust._member


class Run:
    """A run, and who is in it."""

    def __init__(self, allow: Allowlist | None) -> None:
        self.allow = allow
        self.book = AuthorityBook(RUN)
        self.peers: list[Peer] = []

    def invite(self, role: Role = Role.WORKER, *, hours: float = 24.0, uses: int = 0) -> tuple[Grant, bytes]:
        authority = self.peers[0].trust.authority
        assert authority is not None
        return authority.grant(role, hours=hours, uses=uses)

    async def start(
        self,
        name: str,
        invitation: tuple[Grant, bytes] | None = None,
        token: str = "",
        clock: Clock | None = None,
    ) -> Peer:
        """The authority if there is no invitation; raises JoinError if the peer is not let in."""
        events, clock, own = EventLog(), clock or Clock(), identity(name)
        admission = MembershipAdmission(RUN, authority=identity("authority").public_key, own=own.public_key)
        node = await Node.start(
            own, replace(LOOPBACK, run_id=RUN), events, admission=admission, wall_clock=clock
        )
        node.serve(Echo, echo, role=Role.WORKER)
        dht = DHT(node, DHTSettings(), random.Random(name))
        credentials = Credentials(invitation[0], Identity(invitation[1]), token) if invitation else None
        book = None if invitation else self.book
        access = RunAccess(RUN, "invite", admission, credentials, book, self.allow)
        trust = Trust(node, dht, events, random.Random(name), access)
        peer = Peer(node, dht, trust, events, clock)
        self.peers.append(peer)
        for other in self.peers[:-1]:
            node.learn(other.node.contact)
        await peer.trust.join()
        if invitation:
            await dht.bootstrap([other.node.contact for other in self.peers[:-1]])
        return peer

    async def leave(self, peer: Peer) -> None:
        self.peers.remove(peer)
        await peer.trust.stop()
        await peer.dht.stop()
        await peer.node.close()


@asynccontextmanager
async def run_with(*names: str, allow: Allowlist | None = None) -> AsyncIterator[tuple[Run, list[Peer]]]:
    """The authority, and members who joined by an invitation of unlimited use."""
    run = Run(allow)
    try:
        await run.start("authority")
        if names:
            invitation = run.invite()
            for name in names:
                await run.start(name, invitation)
        yield run, list(run.peers)
    finally:
        for peer in list(run.peers):
            await run.leave(peer)


async def call(one: Peer, other: Peer) -> Echo:
    """Needs the role of a worker."""
    one.node.learn(other.node.contact)
    return await one.node.call(other.node.id, Echo(b"in"), Echo, timeout_s=5)
