"""From `create` over a line of text to `join`: what everybody knows and may."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from colab_swarm.dht.service import DHT, DHTSettings
from colab_swarm.errors import JoinError, PeerError
from colab_swarm.events import EventLog
from colab_swarm.invite import Access, Invite
from colab_swarm.net.identity import Identity
from colab_swarm.net.node import Node
from colab_swarm.net.peers import Contact, Role
from colab_swarm.trust.access import RunAccess, Trust
from colab_swarm.trust.authority import Allowlist
from tests.net.swarm import LOOPBACK, Echo, echo, identity

ALLOW = Allowlist(("alice",))


def found(name: str = "my-run", *, access: Access = "invite", key_file: Path | None = None) -> RunAccess:
    allow = ALLOW if access == "allowlist" else None
    return RunAccess.found(name, identity("authority"), access=access, allow=allow, key_file=key_file)


@dataclass
class Peer:
    way: RunAccess
    node: Node
    dht: DHT
    trust: Trust

    def invite(self, **options: Any) -> str:
        return str(self.way.invite(self.node, self.trust.authority, **options))


@asynccontextmanager
async def peer(own: Identity, way: RunAccess, *, listen: bool = True) -> AsyncIterator[Peer]:
    settings = replace(LOOPBACK, run_id=way.run_id, listen=listen)
    node, rng = await Node.start(own, settings, admission=way.admission), random.Random(0)
    try:
        node.serve(Echo, echo, role=Role.WORKER)
        dht = DHT(node, DHTSettings(), rng)
        trust = Trust(node, dht, EventLog(), rng, way)
        for contact in way.entries:
            node.learn(contact)
        await trust.join()
        if way.entries:
            assert await dht.bootstrap(way.entries) > 0
        trust.start()
        yield Peer(way, node, dht, trust)
        await trust.stop()
        await dht.stop()
    finally:
        await node.close()


def joining(name: str, text: str, **options: Any) -> Any:
    own = identity(name)
    return peer(own, RunAccess.by(Invite.parse(text), own), **options)


@pytest.mark.parametrize("access", ["open", "invite"])
async def test_an_invited_peer_takes_part_and_invites_others(access: Access) -> None:
    async with (
        peer(identity("authority"), found(access=access)) as authority,
        joining("alice", authority.invite()) as alice,
        joining("bob", alice.invite()) as bob,
    ):
        assert bob.way.entries[0].id == (alice.node.id if access == "open" else authority.node.id)
        bob.node.learn(alice.node.contact)
        assert await bob.node.call(alice.node.id, Echo(b"in"), Echo, timeout_s=5) == Echo(b"in")


async def test_a_closed_run_admits_no_peer_without_an_invitation() -> None:
    async with (
        peer(identity("authority"), found()) as authority,
        joining("alice", authority.invite()) as alice,
    ):
        strange = Invite(authority.way.run_id, (alice.node.contact,), 4e9)
        with pytest.raises(PeerError, match="no membership: join with an invitation"):
            own = identity("mallory")
            mallory = await Node.start(own, replace(LOOPBACK, run_id=strange.run_id))
            try:
                mallory.learn(alice.node.contact)
                await mallory.call(alice.node.id, Echo(), Echo, timeout_s=5)
            finally:
                await mallory.close()


async def test_a_counted_invitation_leads_to_the_authority_and_gives_its_role() -> None:
    async with (
        peer(identity("authority"), found()) as authority,
        joining("alice", authority.invite(role="viewer", uses=1)) as alice,
    ):
        assert authority.node.role_of(alice.node.id) is Role.VIEWER
        with pytest.raises(PermissionError, match="only the organizer's peer chooses"):
            alice.invite(role="worker")
        passed_on = Invite.parse(alice.invite())
        assert passed_on.role is Role.VIEWER and passed_on.uses == 1


async def test_an_unusable_invitation_is_not_made() -> None:
    async with peer(identity("authority"), found(), listen=False) as authority:
        with pytest.raises(JoinError, match="start one on any machine"):
            authority.invite()
        authority.node.announce((f"ws://203.0.113.7:4500/relay/{'a' * 64}",))
        assert Invite.parse(authority.invite()).entries == (authority.node.contact,)
        with pytest.raises(JoinError, match="requires that others can dial this peer"):
            authority.invite(uses=3)


async def test_an_open_run_has_no_roles() -> None:
    async with peer(identity("authority"), found(access="open")) as authority:
        with pytest.raises(PermissionError, match="open run"):
            authority.invite(role="viewer")


def test_a_run_that_cannot_be_created_says_why(tmp_path: Path) -> None:
    assert found(key_file=tmp_path / "key").admission is not None
    with pytest.raises(ValueError, match="is the key of the run 'my-run': use another file for 'other'"):
        found("other", key_file=tmp_path / "key")
    with pytest.raises(ValueError, match="no run name"):
        found("My Run")
    with pytest.raises(ValueError, match="need each other"):
        RunAccess.found("my-run", identity("a"), access="invite", allow=ALLOW, key_file=None)
    assert found(access="allowlist").allow == ALLOW


async def test_a_token_is_in_no_repr() -> None:
    entry = Contact(identity("authority").id, ("ws://127.0.0.1:1",))
    async with peer(identity("authority"), found()) as authority:
        invitation = Invite.parse(authority.invite()).with_entries([entry])
        shown = repr(RunAccess.by(invitation, identity("alice"), token="hf_secret"))
        assert "hf_secret" not in shown and repr(invitation.secret) not in shown


@pytest.mark.parametrize("access", ["open", "invite"])
def test_a_run_is_the_same_after_a_restart_with_its_key_file(access: Access, tmp_path: Path) -> None:
    first, again = (found(access=access, key_file=tmp_path / "key") for _ in range(2))
    assert first.run_id == again.run_id != found(access=access).run_id
