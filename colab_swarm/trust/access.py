"""How a peer gets into a run and invites others, its trust services, and how a revocation reaches every peer.

The authority stores its signed list in the DHT under its own subkey, which no other peer can write.
Every peer reads it each 20 s and asks one linked peer for the newest list; a peer that learns of a
newer list sends it to all its links. So the list spreads even where the DHT fails: a malicious
member can stuff its key, and its records end after a day.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colab_swarm.dht.service import DHT
from colab_swarm.errors import JoinError, PeerError, ProtocolError
from colab_swarm.events import EventLog, PeersRevoked
from colab_swarm.invite import NAME, Access, Invite, role_named
from colab_swarm.net.identity import Identity, id_of
from colab_swarm.net.membership import MembershipAdmission
from colab_swarm.net.node import Node
from colab_swarm.net.peers import Contact, PeerId, Peers, short
from colab_swarm.trust.authority import Allowlist, Authority, AuthorityBook, AuthoritySettings, ShareRevoked
from colab_swarm.trust.contributions import Contributions, TallyRow, guarded
from colab_swarm.trust.member import Credentials, RunMember

logger = logging.getLogger(__name__)
PERIOD_S = 20.0
RECORD_S = 24 * 3600.0
CALL_TIMEOUT_S = 10.0


class RevocationWatch:
    """Keeps a peer's `MembershipAdmission` up to date with the authority's list.

    Args:
        dht: stores the list.
        events: gets `PeersRevoked`, and a `Fault` when looking for revocations fails.
        recheck: called when the list has changed; closes the links of revoked peers, see `Linker.recheck`.
    """

    def __init__(
        self,
        peers: Peers,
        dht: DHT,
        admission: MembershipAdmission,
        events: EventLog,
        rng: random.Random,
        recheck: Callable[[], None],
    ) -> None:
        self._peers, self._dht, self._admission = peers, dht, admission
        self._events, self._rng, self._recheck = events, rng, recheck
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stored_at = float("-inf")
        self.key = f"{admission.run_id}/revoked"
        peers.serve(ShareRevoked, self._on_share)

    def start(self) -> None:
        """Watch until `stop`."""
        self._spawn(self._watch())

    async def _watch(self) -> None:
        while True:
            await guarded(self.poll, self._events, "looking for revocations")
            await asyncio.sleep(PERIOD_S * self._rng.uniform(0.5, 1.0))

    async def stop(self) -> None:
        """End the background work."""
        self._peers.unserve(ShareRevoked)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def spread(self) -> None:
        """Close the links of revoked peers and send the list to all others; call it after `Authority.revoke`."""
        self._recheck()
        self._stored_at = float("-inf")
        self._spawn(self._store())
        self._send_all(but=None)

    async def poll(self) -> None:
        """Look once: in the DHT, and at one linked peer."""
        if self._admission.own == self._admission.authority:
            await self._store()
            return
        found = (await self._dht.get(self.key)).get(id_of(self._admission.authority))
        if found is not None and isinstance(found.value, bytes):
            self._learn(found.value, source=None)
        linked = sorted(self._peers.linked())
        if linked:
            await self._share(self._rng.choice(linked), b"")

    def _learn(self, revocations: bytes, source: PeerId | None) -> None:
        before = set(self._admission.revoked.subjects)
        try:
            if not self._admission.learn(revocations):
                return
        except ProtocolError as error:
            logger.warning("%s shares %s", "the DHT" if source is None else short(source), error)
            return
        count = len(set(self._admission.revoked.subjects) - before)
        self._events.emit(PeersRevoked(self._loop.time(), count))
        self._recheck()
        self._send_all(but=source)

    async def _store(self) -> None:
        """Renew the authority's list in the DHT, where records end after a day."""
        now = self._loop.time()
        due = self._admission.revoked.version and now - self._stored_at > RECORD_S / 24
        if due and await self._dht.publish(self.key, self._admission.revoked.encode(), ttl_s=RECORD_S):
            self._stored_at = now

    def _send_all(self, but: PeerId | None) -> None:
        encoded = self._admission.revoked.encode()
        for peer in self._peers.linked() - {but}:
            self._spawn(self._share(peer, encoded))

    async def _share(self, peer: PeerId, encoded: bytes) -> None:
        """Send our version and list; learn the peer's list if it is newer."""
        message = ShareRevoked(self._admission.revoked.version, encoded)
        try:
            answer = await self._peers.call(peer, message, ShareRevoked, timeout_s=CALL_TIMEOUT_S)
        except PeerError as error:
            logger.debug("%s does not share its revocations: %s", short(peer), error)
            return
        if answer.revocations:
            self._learn(answer.revocations, peer)

    async def _on_share(self, peer: PeerId, message: ShareRevoked) -> ShareRevoked:
        if message.revocations:
            self._learn(message.revocations, peer)
        known = self._admission.revoked
        return ShareRevoked(known.version, known.encode() if known.version > message.version else b"")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@dataclass(frozen=True)
class ClosedRun:
    """A peer's rights in a closed run; only the authority has a ``book``, and no ``credentials``."""

    admission: MembershipAdmission
    credentials: Credentials | None = None
    book: AuthorityBook | None = None
    settings: AuthoritySettings = field(default_factory=AuthoritySettings)


class Trust:
    """A peer's membership, revocations, and contributions; in an open run only the latter.

    ``authority`` is set where this peer is the authority of a closed run.
    """

    def __init__(
        self,
        node: Node,
        dht: DHT,
        events: EventLog,
        rng: random.Random,
        run_id: str,
        closed: ClosedRun | None = None,
    ) -> None:
        linker, admission = node.linker, closed.admission if closed else None
        relayed_bytes = linker.metering.relayed_bytes
        self.contributions = Contributions(node, dht, run_id, admission, relayed_bytes, events)
        self.authority: Authority | None = None
        self._member: RunMember | None = None
        self._watch: RevocationWatch | None = None
        if closed is not None:
            admission, readmit = closed.admission, linker.readmit
            self._member = RunMember(
                node, dht, admission, events, closed.credentials, readmit, lambda: linker.clock.behind_s
            )
            self._watch = RevocationWatch(node, dht, admission, events, rng, linker.recheck)
            if closed.book is not None:
                self.authority = Authority(node, admission, closed.book, closed.settings, readmit)

    async def join(self) -> None:
        """Get a membership, before the DHT is used; raise `JoinError` if this peer is not admitted."""
        if self._member is not None:
            await self._member.join()

    def start(self) -> None:
        """Run all of it until `stop`."""
        self.contributions.start()
        if self._member is not None and self._watch is not None:
            self._member.start()
            self._watch.start()

    async def stop(self) -> None:
        """End the background work; while the DHT still runs."""
        async with contextlib.AsyncExitStack() as ends:  # last first; no failure skips another
            if self._member is not None and self._watch is not None:
                ends.push_async_callback(self._watch.stop)
                ends.push_async_callback(self._member.stop)
            if self.authority is not None:
                ends.callback(self.authority.close)
            await self.contributions.stop()

    def revoke(self, subject: PeerId) -> None:
        """Remove a peer from the run, or an invitation (the id of its key).

        Raises:
            PermissionError, ValueError: this peer is not the authority; it would remove itself.
        """
        if self.authority is None or self._watch is None:
            raise PermissionError("only the peer that created the run, if it is not open, can remove others")
        self.authority.revoke(subject)
        self._watch.spread()


ENTRIES, ADDRESSES = 3, 4
"""Peers that an invitation names, and addresses of each: it must fit in a QR code."""


@dataclass(frozen=True)
class RunAccess:
    """A peer's way into a run.

    Attributes:
        closed: its rights; None in an open run.
        invitation: the one it joined with; None if it created the run.
        known, tally: of an earlier session: peers, and the contributions this peer saw.
    """

    run_id: str
    access: Access
    closed: ClosedRun | None
    invitation: Invite | None = None
    known: tuple[Contact, ...] = ()
    tally: tuple[TallyRow, ...] = ()

    @classmethod
    def found(
        cls,
        name: str,
        identity: Identity,
        *,
        access: Access,
        allow: Allowlist | None,
        key_file: str | Path | None,
    ) -> RunAccess:
        """Create a run, with this peer as its authority; with the key file of an earlier run, continue that run.

        Raises:
            ValueError: the name or the list is not usable, or the key file belongs to another run.
        """
        if not NAME.fullmatch(name):
            rule = "use up to 63 of a-z, 0-9, '.', '_', '-', such as 'my-first-swarm'"
            raise ValueError(f"{name!r} is no run name: {rule}")
        if (access == "allowlist") != (allow is not None):
            both = "access='allowlist' and allow=Allowlist(users=…, organisations=…)"
            raise ValueError(f"{both} need each other: give both")
        run_id = f"{name}-{secrets.token_hex(4) if key_file is None else identity.id.hex()[:8]}"
        if access == "open":
            return cls(run_id, access, None)
        book = AuthorityBook(run_id, key_file)
        known = book.run_id.rpartition("-")[0]
        if known != name:
            raise ValueError(f"{key_file} is the key of the run {known!r}: use another file for {name!r}")
        key = identity.public_key
        admission = MembershipAdmission(book.run_id, authority=key, own=key)
        # short memberships: an account that leaves the list is soon out
        settings = AuthoritySettings() if allow is None else AuthoritySettings(allow, member_s=4 * 3600.0)
        return cls(book.run_id, access, ClosedRun(admission, None, book, settings))

    @classmethod
    def by(
        cls, invitation: Invite, identity: Identity, *, token: str = "", membership: bytes = b""
    ) -> RunAccess:
        """Join a run; ``token`` is of Hugging Face, ``membership`` of an earlier session, if there are any."""
        grant = invitation.grant
        if grant is None:
            return cls(invitation.run_id, invitation.access, None, invitation)
        run_id, own = invitation.run_id, identity.public_key
        admission = MembershipAdmission(run_id, authority=invitation.authority, own=own)
        closed = ClosedRun(admission, Credentials(grant, invitation.key, token, membership))
        return cls(invitation.run_id, invitation.access, closed, invitation)

    @property
    def admission(self) -> MembershipAdmission | None:
        """Decides which peers may link; None in an open run, where all may."""
        return None if self.closed is None else self.closed.admission

    @property
    def entries(self) -> tuple[Contact, ...]:
        """Peers to dial first."""
        found: dict[PeerId, Contact] = {}
        for contact in (*self.known, *(self.invitation.entries if self.invitation else ())):
            before = found.get(contact.id, contact).addresses
            found[contact.id] = Contact(contact.id, tuple(dict.fromkeys((*before, *contact.addresses))))
        return tuple(found.values())

    def invite(
        self,
        peers: Peers,
        authority: Authority | None,
        *,
        role: str | None = None,
        hours: float | None = None,
        uses: int | None = None,
    ) -> Invite:
        """Make an invitation. A peer that is not the authority passes its own on, with itself as one more entry.

        Args:
            authority: set where this peer is it.
            role: worker, reducer or viewer; worker by default.
            hours: how long the invitation can be used; 24 by default.
            uses: how many peers can join with it; unlimited by default.

        Raises:
            JoinError: nobody could use it.
            PermissionError: only the authority can make such an invitation.
            ValueError: the role is unknown, or hours or uses are out of range.
        """
        self._require_right(authority, role, hours, uses)
        entries, life_h = self._ways_in(peers), 24.0 if hours is None else hours
        if self.closed is None:
            return Invite(self.run_id, entries, peers.time() + 3600 * life_h)
        if authority is None:
            assert self.invitation is not None  # only the authority has none
            return self.invitation.with_entries(entries)
        grant, secret = authority.grant(role_named(role or "worker"), hours=life_h, uses=uses or 0)
        if not grant.offline and not (peers.contact.addresses and peers.contact.direct):
            raise JoinError(
                "such an invitation requires that others can dial this peer, and they cannot: "
                "open a tunnel (tunnel='ngrok'), or make an invitation of unlimited use"
            )
        return Invite.issue(grant, secret, entries, access=self.access, authority=peers.public_key)

    def _require_right(
        self, authority: Authority | None, role: str | None, hours: float | None, uses: int | None
    ) -> None:
        limited = role is not None or uses is not None
        if self.closed is None and limited:
            raise PermissionError(
                "an open run has no roles and no counted invitations: create it with access='invite'"
            )
        if self.closed is not None and authority is None and (limited or hours is not None):
            raise PermissionError(
                "only the organizer's peer chooses role, hours and uses; "
                "without arguments, invite() passes your own invitation on"
            )

    def _ways_in(self, peers: Peers) -> tuple[Contact, ...]:
        """Return a few dialable peers, direct ones before relayed ones, the authority and this peer first."""
        found = [peers.contact, *(self.invitation.entries if self.invitation else ())]
        found += map(peers.contact_of, sorted(peers.linked()))
        if self.admission is not None:
            found.insert(0, peers.contact_of(id_of(self.admission.authority)))
        by_id: dict[PeerId, Contact] = {}
        for contact in sorted(found, key=lambda contact: not contact.direct):
            if contact.addresses:
                by_id.setdefault(contact.id, Contact(contact.id, contact.addresses[:ADDRESSES]))
        if not by_id:
            do = "start one on any machine that does: colab-swarm backbone"
            raise JoinError(f"nobody could use this invitation: no known peer accepts connections; {do}")
        return tuple(by_id.values())[:ENTRIES]
