"""How a peer gets into a run, and invites others: what `create` and `join` know before the first link is up."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from colab_swarm.errors import JoinError
from colab_swarm.invite import NAME, Access, Invite, role_named
from colab_swarm.net.identity import Identity, id_of
from colab_swarm.net.membership import MembershipAdmission
from colab_swarm.net.peers import Contact, PeerId, Peers
from colab_swarm.trust.authority import Allowlist, Authority, AuthorityBook, AuthoritySettings
from colab_swarm.trust.contributions import TallyRow
from colab_swarm.trust.member import Credentials
from colab_swarm.trust.service import ClosedRun

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
