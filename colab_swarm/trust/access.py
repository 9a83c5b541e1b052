"""How a peer gets into a run and invites others: its membership, and how a revocation reaches every peer.

With an invitation that is valid offline, a peer signs its own membership immediately. As soon as the peer reaches the
authority, the authority replaces this membership by a membership that it signs itself. Then the authority can revoke
the invitation without removing the peers that used it. When half of a membership's life is over, the peer tries to
renew it. So the authority may be away for the other half.

The authority signs a list of revocations. A peer that receives a newer list sends it to all linked peers. Every 20 s,
each peer also asks one linked peer for the newest list. So late joiners get the list without the authority.
"""

import asyncio
import contextlib
import logging
import random
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from colab_swarm.dht.service import DHT
from colab_swarm.errors import CallRefused, JoinError, NotAdmitted, PeerError, ProtocolError, require
from colab_swarm.events import EventLog, Notice
from colab_swarm.invite import NAME, ROLES, Access, Invite, Setting, SignedMailbox, creator_suffix
from colab_swarm.net.identity import Identity, id_of
from colab_swarm.net.membership import SLACK_S, Membership, MembershipAdmission, in_words
from colab_swarm.net.node import Node
from colab_swarm.net.patience import LeftOut
from colab_swarm.net.peers import MAX_RUN_ID_BYTES, Ack, Contact, PeerId, Refusal, Role, end_tasks, short
from colab_swarm.runtime import BackgroundTasks, loop_now
from colab_swarm.trust.authority import (
    Allowlist,
    Authority,
    AuthorityBook,
    IssuedMembership,
    RequestMembership,
    ShareRevoked,
)
from colab_swarm.trust.contributions import SHARE_S, Contributions, ShareTally, Tally

logger = logging.getLogger(__name__)
_SET_CLOCK = (
    "set it (Linux: `sudo timedatectl set-ntp true`; Windows, macOS: switch on automatic time in the settings; "
    "Colab, Kaggle: restart the runtime)"
)
REPORT_S = 30.0  # smaller clock differences are not reported
TICK_S = 10.0
PULL_S = 20.0  # time between two requests for the newest revocations
MAX_NAMED = 5  # maximum number of revoked peers in one notice
CALL_TIMEOUT_S = 10.0
RETRY_S = 30.0
MAX_RETRY_S = 600.0


def clock_advice(behind_s: float, mailbox: str = "") -> str:
    """Return a text on a clock that is ``behind_s`` seconds behind the other peers' clocks; empty if this is little.

    A negative ``behind_s`` means that the clock is ahead. With the address of a ``mailbox``, the text compares the
    clock with the store's clock.
    """
    if abs(behind_s) <= REPORT_S:
        return ""
    way = "behind" if behind_s > 0 else "ahead of"
    whose = f"that of {mailbox}" if mailbox else "the other peers'"
    text = f"this machine's clock is {in_words(abs(behind_s))} {way} {whose}"
    if mailbox:
        return f"{text}: compensated in this run, but {_SET_CLOCK}"
    if abs(behind_s) <= SLACK_S:
        return f"{text}: compensated, you need to do nothing"
    return f"{text}: beyond 10 minutes they refuse its signatures; {_SET_CLOCK}"


@dataclass
class RunMember:
    """Gets and renews this peer's membership, and accepts renewed memberships of other peers."""

    node: Node
    dht: DHT
    admission: MembershipAdmission
    events: EventLog
    access: "RunAccess"

    def __post_init__(self) -> None:
        self._reported_s = 0.0  # the clock difference that the last notice reported
        self._absent = LeftOut[str](RETRY_S, MAX_RETRY_S)
        self.node.serve(IssuedMembership, self._on_renewed, role=Role.GUEST)

    async def join(self) -> None:
        """Get the first membership; raise `JoinError` if the peer needs the authority, and it refuses or is away."""
        invitation = self.access.invitation
        saved = self.access.membership
        if invitation is None or invitation.grant is None:
            return
        grant = invitation.grant
        key = self.node.public_key
        now = self.node.time()
        if saved:
            with contextlib.suppress(NotAdmitted):
                self.admission.check(key, saved, now=now)
                self.admission.membership = saved
                return
        proof = Membership.by_invitation(grant, invitation.key, key=key, now=now).encode()
        if saved and now > grant.join_until:
            proof = saved  # the authority renews a membership even some time after its end
        elif grant.offline:
            self.admission.membership = proof
            return
        try:
            await self._request(proof)
        except CallRefused as error:
            raise JoinError(self._reason_of(error)) from error
        except PeerError as error:
            raise JoinError(
                "only the organizer's peer can admit you by this invitation, and it cannot be reached: "
                f"{error}. Is it running? Try again later, or ask for an invitation of unlimited use"
            ) from error

    async def tick(self) -> None:
        """Check the clock, and renew the membership if the renewal is due."""
        self._check_clock()
        if self.access.invitation is not None:
            await self._renew_if_due()

    def _check_clock(self) -> None:
        behind_s = self.node.clock.behind_s
        is_refused = abs(behind_s) > SLACK_S
        was_refused = abs(self._reported_s) > SLACK_S
        if abs(behind_s - self._reported_s) > REPORT_S or is_refused != was_refused:
            self._reported_s = behind_s
            text = clock_advice(behind_s) or "this machine's clock is right again"
            self.events.emit(Notice(loop_now(), text))

    async def _renew_if_due(self) -> None:
        held = Membership.decode(self.admission.membership)
        now = self.node.time()
        due_at = (held.issued_at + held.expires_at) / 2
        if held.grant:
            due_at = held.issued_at
        if now < due_at or self._absent.holds("authority", now):
            return
        try:
            renewed = await self._request(self.admission.membership)
        except PeerError as error:
            self._on_not_renewed(held, error)
            return
        self._absent.forgive("authority")
        left_h = (renewed.expires_at - self.node.time()) / 3600
        self.events.emit(Notice(loop_now(), f"membership renewed for {left_h:.1f} h"))
        # a peer that misses this message gets the membership in the next handshake
        await asyncio.gather(*map(self._show_membership, self.node.linked()))

    def _on_not_renewed(self, held: Membership, error: PeerError) -> None:
        """Plan a retry; tell the user if the authority refuses, or if little time is left."""
        now = self.node.time()
        self._absent.fail("authority", now)
        left_s = held.expires_at - now
        is_refused = isinstance(error, CallRefused) and error.code == "refused"
        if is_refused:
            why = self._reason_of(error)
        elif self.access.mailbox:
            why = "ask the organizer for a new invitation, and join by it with the same state_dir"
        else:
            why = f"the organizer's peer cannot be reached for a new one: {self._reason_of(error)}"
        if is_refused or left_s < (held.expires_at - held.issued_at) / 4:
            text = f"membership ends in {max(0.0, left_s) / 3600:.1f} h: {why}"
            self.events.emit(Notice(loop_now(), text))

    async def _request(self, proof: bytes) -> Membership:
        authority = id_of(self.admission.authority)
        if authority not in self.node.linked():
            contact = await self.dht.find_peer(authority)
            if contact is not None:
                self.node.learn(contact)
        message = RequestMembership(proof, self.access.token)
        answer = await self.node.call(authority, message, IssuedMembership, timeout_s=20.0)
        issued = self.admission.check(self.node.public_key, answer.membership, now=self.node.time())
        self.admission.membership = answer.membership
        return issued

    def _reason_of(self, error: PeerError) -> str:
        # the text of the authority's refusal, without its id in front
        return str(error).removeprefix(f"{short(id_of(self.admission.authority))}: ")

    async def _show_membership(self, peer: PeerId) -> None:
        try:
            message = IssuedMembership(self.admission.membership)
            await self.node.call(peer, message, Ack, timeout_s=CALL_TIMEOUT_S)
        except PeerError as error:
            logger.debug("%s does not take the renewed membership: %s", short(peer), error)

    async def _on_renewed(self, peer: PeerId, message: IssuedMembership) -> Ack:
        try:
            self.node.readmit(peer, message.membership)
        except NotAdmitted as error:
            raise Refusal(str(error)) from error
        return Ack()


@dataclass
class RevocationGossip:
    """Spreads the authority's newest list of revocations over links, and keeps the ``admission`` up to date."""

    node: Node
    admission: MembershipAdmission
    events: EventLog
    rng: random.Random

    def __post_init__(self) -> None:
        self.node.serve(ShareRevoked, self._on_share)

    def spread(self, but: PeerId | None = None) -> None:
        """Close the links of revoked peers, and send the list to all linked peers except ``but``."""
        self.node.recheck()
        revocations = self.admission.revoked.encode()
        for peer in self.node.linked() - {but}:
            self.node.spawn(self._share(peer, revocations))

    async def pull(self) -> None:
        """Ask one linked peer for a newer list. Call this every `PULL_S` seconds."""
        linked = sorted(self.node.linked())
        if linked:
            await self._share(self.rng.choice(linked), b"")

    async def _share(self, peer: PeerId, revocations: bytes) -> None:
        message = ShareRevoked(self.admission.revoked.version, revocations)
        try:
            answer = await self.node.call(peer, message, ShareRevoked, timeout_s=CALL_TIMEOUT_S)
            self._learn(answer.revocations, peer)
        except PeerError as error:
            logger.debug("%s does not share its revocations: %s", short(peer), error)

    async def _on_share(self, peer: PeerId, message: ShareRevoked) -> ShareRevoked:
        self._learn(message.revocations, peer)
        revoked = self.admission.revoked
        if revoked.version > message.version:
            return ShareRevoked(revoked.version, revoked.encode())
        return ShareRevoked(revoked.version)

    def _learn(self, revocations: bytes, peer: PeerId) -> None:
        before = self.admission.revoked.subjects
        try:
            is_newer = bool(revocations) and self.admission.learn(revocations)
        except ProtocolError as error:
            logger.warning("%s shares %s", short(peer), error)
            return
        if is_newer:
            removed = [
                subject.hex()[:8] for subject in self.admission.revoked.subjects if subject not in before
            ]
            if removed:
                names = ", ".join(removed[:MAX_NAMED])
                text = f"the authority removed {len(removed)} peers or invitations: {names}"
                self.events.emit(Notice(loop_now(), text))
            self.spread(but=peer)


class Trust:
    """A peer's contributions and, in a run that is not open, its membership, the revocations and the ``authority``.

    If this peer is not the authority, ``authority`` is None.
    """

    def __init__(
        self, node: Node, dht: DHT, events: EventLog, rng: random.Random, access: "RunAccess"
    ) -> None:
        self._node = node
        self._tasks = BackgroundTasks("keeping memberships and contributions", events, rng)
        self._mailbox = access.mailbox
        self.contributions = Contributions(node, rng, access.tally)
        self.authority: Authority | None = None
        self._member: RunMember | None = None
        self._gossip: RevocationGossip | None = None
        if access.admission is not None:
            self._member = RunMember(node, dht, access.admission, events, access)
            self._gossip = RevocationGossip(node, access.admission, events, rng)
            if access.book is not None:
                self.authority = Authority(node, access.admission, access.book, access.allow)

    async def join(self) -> None:
        if self._member is not None:
            await self._member.join()

    def start(self) -> None:
        self._tasks.every(SHARE_S, self.contributions.share)
        if self._member is not None:
            self._tasks.every(TICK_S, self._member.tick)
        if self._gossip is not None:
            self._tasks.every(PULL_S, self._gossip.pull)

    async def stop(self) -> None:
        """End the background work, and send all linked peers a last tally."""
        for kind in (ShareRevoked, IssuedMembership, RequestMembership, ShareTally):
            self._node.unserve(kind)
        await end_tasks(*self._tasks.cancel())
        await self.contributions.share_with_all()

    def revoke(self, subject: PeerId) -> None:
        """Remove a peer, or revoke an invitation by the id of its key.

        Raises `PermissionError` if this peer is not the authority, or if the run is in a bucket.
        """
        require(
            not self._mailbox,
            f"nobody can be removed from {self._mailbox}: who has its keys reads and writes it. Change the keys",
            PermissionError,
        )
        if self.authority is None or self._gossip is None:
            raise PermissionError("only the peer that created the run, if it is not open, can remove others")
        self.authority.revoke(subject)
        self._gossip.spread()


# The default life of an invitation; longer in a bucket, where no peer may be online that could make another one.
HOURS = 24.0
MAILBOX_HOURS = 30 * 24.0
MAX_HOURS = 1e6
# Maximum number of entries in an invitation, and of addresses in each entry: it must fit in a QR code.
ENTRIES = 3
ADDRESSES = 4
ONLY_THE_ORGANIZER = (
    "only the organizer's peer chooses role, hours, uses and settings of an invitation. Call invite() without them to "
    "pass yours on, or ask the organizer for another one: a backbone takes its settings from [settings] in its run.toml"
)


@dataclass(frozen=True)
class RunAccess:
    """A peer's way into a run, and its rights there.

    ``admission`` is None in an open run. In other runs, the ``invitation`` admits the peer, together with a
    Hugging Face ``token`` if the run has an allowlist. The authority has a ``book`` instead of an invitation. The
    ``membership``, the ``known`` peers and the ``tally`` come from an earlier session.
    """

    run_id: str
    access: Access
    admission: MembershipAdmission | None = None
    token: str = field(default="", repr=False)
    membership: bytes = field(default=b"", repr=False)
    book: AuthorityBook | None = None
    allow: Allowlist | None = None
    invitation: Invite | None = None
    mailbox: str = ""  # address of the bucket in which the run's rounds are; empty if they go over links
    known: tuple[Contact, ...] = ()
    tally: Tally = ()

    @classmethod
    def create(
        cls,
        name: str,
        identity: Identity,
        *,
        access: Access,
        allow: Allowlist | None,
        key_file: str | Path | None,
        mailbox: str = "",
    ) -> "RunAccess":
        """Create a run with this peer as authority, or continue the run of the key file.

        Raises ValueError if an argument or the key file is not usable.
        """
        require(
            NAME.fullmatch(name),
            f"{name!r} is no run name: use up to 63 of a-z, 0-9 and '._-', as in 'my-first-swarm'",
        )
        require(
            (access == "allowlist") == (allow is not None),
            "access='allowlist' and allow=Allowlist(users=…, organisations=…) need each other: give both",
        )
        require(
            allow is None or not mailbox,
            "allow= needs this peer online, to look accounts up: in a bucket, leave it out",
        )
        if key_file is None:
            suffix = secrets.token_hex(4)
        else:
            suffix = identity.id.hex()[:8]
        if access == "open" and mailbox:
            suffix = creator_suffix(identity.public_key)
        run_id = f"{name}-{suffix}"
        require(
            len(run_id) <= MAX_RUN_ID_BYTES,
            f"{name!r} is too long: the name of this run has at most {MAX_RUN_ID_BYTES - len(suffix) - 1} characters",
        )
        if access == "open":
            return cls(run_id, access, mailbox=mailbox)
        book = AuthorityBook.of(run_id, key_file)
        run = book.run_id.rpartition("-")[0]
        require(run == name, f"{key_file} is the key of the run {run!r}: use another file for {name!r}")
        key = identity.public_key
        admission = MembershipAdmission(book.run_id, authority=key, own=key)
        return cls(book.run_id, access, admission, book=book, allow=allow, mailbox=mailbox)

    @classmethod
    def from_invitation(
        cls,
        invitation: Invite,
        identity: Identity,
        *,
        token: str = "",
        membership: bytes = b"",
        mailbox: str = "",
    ) -> "RunAccess":
        """Join a run by an invitation.

        ``token`` is a Hugging Face token, if the run requires a token. ``membership`` is the membership of an earlier
        session, or empty. If the ``mailbox`` is a folder, its path here may differ from its path in the invitation.
        """
        run_id = invitation.run_id
        admission = None
        if invitation.grant is not None:
            admission = MembershipAdmission(run_id, authority=invitation.authority, own=identity.public_key)
        return cls(
            run_id,
            invitation.access,
            admission,
            token=token,
            membership=membership,
            invitation=invitation,
            mailbox=mailbox,
        )

    @property
    def entries(self) -> tuple[Contact, ...]:
        """Peers to dial first: known peers of an earlier session, then the invitation's entries."""
        addresses: dict[PeerId, dict[str, None]] = {}
        invited = () if self.invitation is None else self.invitation.entries
        for contact in (*self.known, *invited):
            addresses.setdefault(contact.id, {}).update(dict.fromkeys(contact.addresses))
        return tuple(Contact(peer, tuple(each)) for peer, each in addresses.items())

    def invite(
        self,
        peers: Node,
        authority: Authority | None,
        *,
        role: str | None = None,
        hours: float | None = None,
        uses: int | None = None,
        settings: Mapping[str, Setting] | None = None,
    ) -> Invite:
        """Make an invitation.

        A peer that is not the authority can only pass on its own invitation, with new entries.

        Args:
            peers: this peer's node.
            authority: this peer's authority, or None.
            role: worker (default), reducer or viewer.
            hours: life of the invitation. By default 24 hours, or 30 days if the run is in a bucket.
            uses: how many peers can use the invitation. By default any number.
            settings: settings for training. By default the settings of this peer's own invitation.

        Raises:
            JoinError: no peer could use the invitation.
            PermissionError: only the authority can make this invitation.
            ValueError: an argument is out of range.
        """
        limited = role is not None or uses is not None
        closed = self.admission is not None
        text = "an open run has no roles and no counted invitations: create it with access='invite'"
        require(closed or not limited, text, PermissionError)
        text = "in a bucket nobody is online to count who joins: call invite() without uses"
        require(not (self.mailbox and uses), text, PermissionError)
        own_settings = {} if self.invitation is None else self.invitation.settings
        if settings is None:
            settings = own_settings
        entries = self._reachable(peers)
        if closed and authority is None:
            assert self.invitation is not None  # only the authority has none
            chosen = limited or hours is not None or dict(settings) != own_settings
            require(not chosen, ONLY_THE_ORGANIZER, PermissionError)
            return self.invitation.replaced(entries=entries)
        usual_h = MAILBOX_HOURS if self.mailbox else HOURS
        life_h = usual_h if hours is None else hours
        is_time = isinstance(life_h, int | float) and 0 < life_h < MAX_HOURS
        require(is_time, f"hours={life_h!r}: an invitation lives for more than 0 hours")
        if authority is None:
            made = Invite(self.run_id, entries, peers.time() + 3600 * life_h)
        else:
            role = role or "worker"
            require(role in ROLES, f"role={role!r} is unknown: choose one of {', '.join(ROLES)}")
            grant, secret = authority.grant(ROLES[role], hours=life_h, uses=uses or 0)
            require(
                grant.offline or (peers.contact.addresses and peers.contact.direct),
                "such an invitation requires that others can dial this peer, and they cannot: "
                "open a tunnel (tunnel='ngrok'), or make an invitation of unlimited use",
                JoinError,
            )
            made = Invite.issue(grant, secret, entries, access=self.access, authority=peers.public_key)
        return self._with_mailbox(made, peers).with_settings(settings)

    def _with_mailbox(self, made: Invite, peers: Node) -> Invite:
        """Add the mailbox's address with the signature of the run's creator.

        If this peer is the creator, it signs the address itself. Else the signature is in its own invitation.
        """
        if not self.mailbox:
            return made
        if self.invitation is not None:
            former = self.invitation
            return made.with_mailbox(former.mailbox, former.authority, former.mailbox_signature)
        signed = SignedMailbox(self.run_id, self.mailbox).signed(peers.sign)
        return made.with_mailbox(self.mailbox, peers.public_key, signed.signature)

    def _reachable(self, peers: Node) -> tuple[Contact, ...]:
        """Return the entries of a new invitation: peers that can be dialled, first the peers that need no relay."""
        contacts: list[Contact] = []
        if self.admission is not None:
            contacts.append(peers.contact_of(id_of(self.admission.authority)))
        contacts.append(peers.contact)
        if self.invitation is not None:
            contacts += self.invitation.entries
        contacts += map(peers.contact_of, sorted(peers.linked()))
        by_id: dict[PeerId, Contact] = {}
        for contact in sorted(contacts, key=lambda contact: not contact.direct):
            if contact.addresses:
                by_id.setdefault(contact.id, Contact(contact.id, contact.addresses[:ADDRESSES]))
        require(
            by_id or self.mailbox,
            "nobody could use this invitation: no known peer accepts connections; "
            "start one on any machine that does: colab-swarm create NAME",
            JoinError,
        )
        return tuple(by_id.values())[:ENTRIES]
