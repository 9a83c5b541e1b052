"""A run of real peers for these tests: each with its links, its DHT and its trust."""

import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from colab_swarm.dht.service import DHT
from colab_swarm.events import EventLog
from colab_swarm.invite import Access, Invite
from colab_swarm.net.membership import Membership, MembershipAdmission
from colab_swarm.net.node import Node
from colab_swarm.net.peers import Role
from colab_swarm.trust.access import RunAccess, RunMember, Trust
from colab_swarm.trust.authority import Allowlist
from tests.net.swarm import LOOPBACK, echo, identity
from tests.net.swarm import Echo as Echo

RUN = "my-run-0badcafe"
ALLOW = Allowlist(("alice",), ("neuropark",))


@dataclass
class Clock:
    ahead_s: float = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


@dataclass
class Peer:
    access: RunAccess
    node: Node
    dht: DHT
    trust: Trust
    events: EventLog
    clock: Clock

    @property
    def member(self) -> RunMember:
        assert self.trust._member is not None
        return self.trust._member

    @property
    def admission(self) -> MembershipAdmission:
        assert self.access.admission is not None
        return self.access.admission

    @property
    def shown(self) -> Membership:
        return Membership.decode(self.admission.membership)

    def sleep(self, seconds: float) -> None:
        """Wake up so much later, with the monotonic clock as it was, before any clocks are compared."""
        self.clock.ahead_s += seconds
        for peer in self.node.linked():
            self.node.clock.forget(peer)

    def invite(self, **options: Any) -> Invite:
        return Invite.parse(str(self.access.invite(self.node, self.trust.authority, **options)))


def found(name: str = "my-run", *, access: Access = "invite", key_file: Path | None = None) -> RunAccess:
    allow = ALLOW if access == "allowlist" else None
    return RunAccess.create(name, identity("authority"), access=access, allow=allow, key_file=key_file)


class Run:
    def __init__(self, access: Access, *, listen: bool) -> None:
        self.access, self._settings = found(access=access), replace(LOOPBACK, listen=listen)
        self.peers: list[Peer] = []

    def invite(self, **options: Any) -> Invite:
        return self.peers[0].invite(**options)

    async def start(
        self, name: str, invite: Invite | None = None, token: str = "", clock: Clock | None = None
    ) -> Peer:
        """The authority if there is no invitation; raises JoinError if the peer is not let in."""
        events, clock, own, access = EventLog(), clock or Clock(), identity(name), self.access
        if invite is not None:
            access = RunAccess.from_invitation(invite, own, token=token)
        elif access.admission is not None:  # as after a restart
            key = own.public_key
            access = replace(access, admission=MembershipAdmission(access.run_id, authority=key, own=key))
        settings = replace(self._settings, run_id=access.run_id)
        node = await Node.start(own, settings, events, admission=access.admission, wall_clock=clock)
        node.serve(Echo, echo, role=Role.WORKER)
        dht = DHT(node, random.Random(name))
        peer = Peer(access, node, dht, Trust(node, dht, events, random.Random(name), access), events, clock)
        self.peers.append(peer)
        for contact in access.entries:
            node.learn(contact)
        await peer.trust.join()
        await dht.bootstrap(access.entries)
        return peer

    async def leave(self, peer: Peer) -> None:
        self.peers.remove(peer)
        await peer.trust.stop()
        await peer.dht.stop()
        await peer.node.close()


@asynccontextmanager
async def run_with(
    *names: str, access: Access = "invite", listen: bool = True
) -> AsyncIterator[tuple[Run, list[Peer]]]:
    run = Run(access, listen=listen)
    try:
        await run.start("authority")
        for name in names:
            await run.start(name, run.invite())
        yield run, list(run.peers)
    finally:
        for peer in list(run.peers):
            await run.leave(peer)


async def call(one: Peer, other: Peer) -> Echo:
    one.node.learn(other.node.contact)
    return await one.node.call(other.node.id, Echo(b"in"), Echo, timeout_s=5)
