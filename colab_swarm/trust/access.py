"""How a peer gets into a run and invites others: its membership, and how a revocation reaches every peer.

An invitation that admits offline lets a peer sign its own membership at once. The authority replaces it
as soon as it is reached, so that the invitation can be revoked without removing the peers that used it.
A membership is renewed from half of its life on, so that the authority may be away for the other half.

The authority publishes its signed list of revocations in the DHT, where no other peer can replace it.
Every peer reads it each 20 s and asks one linked peer for the newest list; a peer that learns of a newer
list sends it to all its links. So the list spreads even where the DHT fails, and after its record's end.
"""

import asyncio
import contextlib
import logging
import random
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colab_swarm.dht.service import DHT
from colab_swarm.errors import CallRefused, JoinError, NotAdmitted, PeerError, ProtocolError, require
from colab_swarm.events import EventLog, Fault, Notice
from colab_swarm.invite import NAME, Access, Invite, Setting, SignedMailbox, creator_suffix, role_named
from colab_swarm.net.identity import Identity, id_of
from colab_swarm.net.membership import SLACK_S, Membership, MembershipAdmission, in_words
from colab_swarm.net.node import Node
from colab_swarm.net.patience import LeftOut
from colab_swarm.net.peers import MAX_RUN_ID_BYTES, Ack, Contact, PeerId, Refusal, Role, end_tasks, short
from colab_swarm.runtime import loop_now
from colab_swarm.trust.authority import (
    Allowlist,
    Authority,
    AuthorityBook,
    IssuedMembership,
    RequestMembership,
    ShareRevoked,
)
from colab_swarm.trust.contributions import PUBLISH_S, Contributions, TallyRow

logger = logging.getLogger(__name__)
_SET_CLOCK = (
    "set it (Linux: `sudo timedatectl set-ntp true`; Windows, macOS: switch on automatic time in the settings; "
    "Colab, Kaggle: restart the runtime)"
)
REPORT_S = 30.0  # smaller clock differences are not reported
TICK_S = 10.0
CALL_TIMEOUT_S = 10.0
RETRY_S = 30.0
MAX_RETRY_S = 600.0


def clock_advice(behind_s: float, mailbox: str = "") -> str:
    """Return what to say of a clock ``behind_s`` behind the others' (negative: ahead); empty if little.

    With the address of a ``mailbox``, it is behind the clock of that store, which `RunAccess` goes by.
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


class RunMember:
    """Gets and renews this peer's membership, and accepts the renewed ones of other peers."""

    def __init__(
        self,
        peers: Node,
        dht: DHT,
        admission: MembershipAdmission,
        events: EventLog,
        access: "RunAccess",
        readmit: Callable[[PeerId, bytes], Role],
        behind_s: Callable[[], float],
    ) -> None:
        self._peers = peers
        self._dht = dht
        self._admission = admission
        self._events = events
        self._access = access
        self._readmit = readmit
        self._behind_s = behind_s
        self._loop = asyncio.get_running_loop()
        # last skew told of
        self._reported_s = 0.0
        self._absent = LeftOut[str](RETRY_S, MAX_RETRY_S)
        self._unaware: set[PeerId] = set()  # linked peers that have not seen the renewed membership
        peers.serve(IssuedMembership, self._on_renewed, role=Role.GUEST)

    async def join(self) -> None:
        """Get the first membership; raise `JoinError` if the authority refuses or is silent."""
        invitation = self._access.invitation
        saved = self._access.membership
        if invitation is None or invitation.grant is None:
            return
        grant = invitation.grant
        key = self._peers.public_key
        now = self._peers.time()
        if saved:
            with contextlib.suppress(NotAdmitted):
                self._admission.check(key, saved, now=now)
                self._admission.membership = saved
                return
        own = Membership.by_invitation(grant, invitation.key, key=key, now=now).encode()
        # an ended membership is renewed for a while
        if now > grant.join_until:
            proof = saved
        else:
            proof = b""
        if grant.offline and not proof:
            self._admission.membership = own
            return
        try:
            await self._request(proof or own)
        except CallRefused as error:
            raise JoinError(self._words_of(error)) from error
        except PeerError as error:
            raise JoinError(
                "only the organizer's peer can admit you by this invitation, and it cannot be reached: "
                f"{error}. Is it running? Try again later, or ask for an invitation of unlimited use"
            ) from error

    async def tick(self) -> None:
        """Renew the membership if due, show it to linked peers that have not seen it, check the clock."""
        behind_s = self._behind_s()
        reported_s = self._reported_s
        refused = abs(behind_s) > SLACK_S, abs(reported_s) > SLACK_S
        if abs(behind_s - reported_s) > REPORT_S or refused[0] != refused[1]:
            self._reported_s = behind_s
            text = clock_advice(behind_s) or "this machine's clock is right again"
            self._events.emit(Notice(self._loop.time(), text))
        if self._access.invitation is not None:
            held = Membership.decode(self._admission.membership)
            now = self._peers.time()
            if held.grant:
                due_at = held.issued_at
            else:
                due_at = (held.issued_at + held.expires_at) / 2
            if now >= due_at and not self._absent.holds("authority", now):
                await self._renew(held)
        self._unaware &= self._peers.linked()
        await asyncio.gather(*(self._present(peer) for peer in self._unaware))

    async def _renew(self, held: Membership) -> None:
        try:
            renewed = await self._request(self._admission.membership)
        except PeerError as error:
            now = self._peers.time()
            self._absent.fail("authority", now)
            left_s = held.expires_at - now
            refused = isinstance(error, CallRefused) and error.code == "refused"
            if refused or left_s < (held.expires_at - held.issued_at) / 4:
                if refused:
                    why = ""
                else:
                    why = "the organizer's peer cannot be reached for a new one: "
                text = f"{max(0.0, left_s) / 3600:.1f} h: {why}{self._words_of(error)}"
                self._events.emit(Notice(self._loop.time(), f"membership ends in {text}"))
            return
        self._absent.forgive("authority")
        self._unaware = set(self._peers.linked())
        left_h = (renewed.expires_at - self._peers.time()) / 3600
        self._events.emit(Notice(self._loop.time(), f"membership renewed for {left_h:.1f} h"))

    async def _request(self, proof: bytes) -> Membership:
        authority = id_of(self._admission.authority)
        linked = authority in self._peers.linked()
        if not linked and (contact := await self._dht.find_peer(authority)) is not None:
            self._peers.learn(contact)
        answer = await self._peers.call(
            authority, RequestMembership(proof, self._access.token), IssuedMembership, timeout_s=20.0
        )
        issued = self._admission.check(self._peers.public_key, answer.membership, now=self._peers.time())
        self._admission.membership = answer.membership
        return issued

    def _words_of(self, error: PeerError) -> str:
        # the authority's refusal without its id in front
        return str(error).removeprefix(f"{short(id_of(self._admission.authority))}: ")

    async def _present(self, peer: PeerId) -> None:
        try:
            await self._peers.call(
                peer, IssuedMembership(self._admission.membership), Ack, timeout_s=CALL_TIMEOUT_S
            )
            self._unaware.discard(peer)
        except PeerError as error:
            logger.debug("%s does not take the renewed membership: %s", short(peer), error)

    async def _on_renewed(self, peer: PeerId, message: IssuedMembership) -> Ack:
        try:
            self._readmit(peer, message.membership)
        except NotAdmitted as error:
            raise Refusal(str(error)) from error
        return Ack()


PERIOD_S = 20.0
_MAX_NAMED = 5  # in one notice
RECORD_S = 24 * 3600.0


class RevocationWatch:
    """Keeps a peer's `MembershipAdmission` up to date with the authority's list in the DHT."""

    def __init__(
        self,
        peers: Node,
        dht: DHT,
        admission: MembershipAdmission,
        events: EventLog,
        rng: random.Random,
        recheck: Callable[[], None],
        spawn: Callable[[Coroutine[Any, Any, Any]], object],
    ) -> None:
        self._peers = peers
        self._dht = dht
        self._admission = admission
        self._events = events
        self._rng = rng
        self._recheck = recheck
        self._spawn = spawn
        self._loop = asyncio.get_running_loop()
        self._stored_at = float("-inf")
        self.key = f"{admission.run_id}/revoked"
        peers.serve(ShareRevoked, self._on_share)

    def spread(self) -> None:
        """Close the links of revoked peers, send the list to all others; call it after `Authority.revoke`."""
        self._stored_at = float("-inf")
        self._spawn(self._store())
        self._pass_on(but=None)

    async def poll(self) -> None:
        """Look once: in the DHT, and at one linked peer."""
        if self._admission.own == self._admission.authority:
            await self._store()
            return
        records = await self._dht.get(self.key)
        record = records.get(id_of(self._admission.authority))
        if record is not None and isinstance(record.value, bytes):
            self._learn(record.value, source=None)
        linked = sorted(self._peers.linked())
        if linked:
            await self._share(self._rng.choice(linked), b"")

    def _learn(self, revocations: bytes, source: PeerId | None) -> None:
        before = set(self._admission.revoked.subjects)
        try:
            if not (revocations and self._admission.learn(revocations)):
                return
        except ProtocolError as error:
            logger.warning("%s shares %s", "the DHT" if source is None else short(source), error)
            return
        removed = [subject.hex()[:8] for subject in self._admission.revoked.subjects if subject not in before]
        names = ", ".join(removed[:_MAX_NAMED])
        text = f"the authority removed {len(removed)} peers or invitations: {names}"
        self._events.emit(Notice(self._loop.time(), text))
        self._pass_on(but=source)

    async def _store(self) -> None:
        """Renew the authority's list in the DHT, where records end after a day."""
        now = self._loop.time()
        due = self._admission.revoked.version and now - self._stored_at > RECORD_S / 24
        if due and await self._dht.publish(self.key, self._admission.revoked.encode(), ttl_s=RECORD_S):
            self._stored_at = now

    def _pass_on(self, but: PeerId | None) -> None:
        self._recheck()
        encoded = self._admission.revoked.encode()
        for peer in self._peers.linked() - {but}:
            self._spawn(self._share(peer, encoded))

    async def _share(self, peer: PeerId, encoded: bytes) -> None:
        message = ShareRevoked(self._admission.revoked.version, encoded)
        try:
            answer = await self._peers.call(peer, message, ShareRevoked, timeout_s=CALL_TIMEOUT_S)
            self._learn(answer.revocations, peer)
        except PeerError as error:
            logger.debug("%s does not share its revocations: %s", short(peer), error)

    async def _on_share(self, peer: PeerId, message: ShareRevoked) -> ShareRevoked:
        self._learn(message.revocations, peer)
        revoked = self._admission.revoked
        is_newer = revoked.version > message.version
        return ShareRevoked(revoked.version, revoked.encode() if is_newer else b"")


async def repeat(
    work: Callable[[], Awaitable[None]], period_s: float, events: EventLog, where: str, rng: random.Random
) -> None:
    """Do ``work`` about every ``period_s``, unlike peers that started together; report its faults."""
    while True:
        try:
            await work()
        except Exception as error:
            logger.exception("%s failed", where)
            events.emit(Fault.of(loop_now(), where, error))
        await asyncio.sleep(period_s * rng.uniform(0.6, 1.0))


class Trust:
    """A peer's contributions and, in a closed run, its membership, revocations, ``authority``."""

    def __init__(
        self, node: Node, dht: DHT, events: EventLog, rng: random.Random, access: "RunAccess"
    ) -> None:
        self._node = node
        self._events = events
        self._rng = rng
        self._tasks: list[asyncio.Task[None]] = []
        admission = access.admission
        clock = node.clock
        readmit = node.readmit
        self.contributions = Contributions(node, dht, access.run_id, node.metering.relayed_bytes)
        self._work = [(self.contributions.tick, PUBLISH_S, "counting contributions")]
        self.authority: Authority | None = None
        self._mailbox = access.mailbox
        self._member: RunMember | None = None
        self._watch: RevocationWatch | None = None
        if admission is not None:
            self._member = RunMember(node, dht, admission, events, access, readmit, lambda: clock.behind_s)
            self._watch = RevocationWatch(node, dht, admission, events, rng, node.recheck, node.spawn)
            self._work += [
                (self._member.tick, TICK_S, "renewing the membership"),
                (self._watch.poll, PERIOD_S, "looking for revocations"),
            ]
            if access.book is not None:
                self.authority = Authority(node, admission, access.book, access.allow, node.readmit)

    async def join(self) -> None:
        if self._member is not None:
            await self._member.join()

    def start(self) -> None:
        self._tasks = []
        for work, period_s, where in self._work:
            repeated = repeat(work, period_s, self._events, where, self._rng)
            self._tasks.append(self._node.spawn(repeated))

    async def stop(self) -> None:
        """End the background work, and publish the last contributions; while the DHT still runs."""
        for kind in (ShareRevoked, IssuedMembership, RequestMembership):
            self._node.unserve(kind)
        await end_tasks(*self._tasks)
        await self.contributions.stop()

    def revoke(self, subject: PeerId) -> None:
        """Remove a peer, or an invitation by its key's id.

        Raises `PermissionError` if this peer is not the authority, or the run is in a bucket.
        """
        require(
            not self._mailbox,
            f"nobody can be removed from {self._mailbox}: who has its keys reads and writes it. Change the keys",
            PermissionError,
        )
        if self.authority is None or self._watch is None:
            raise PermissionError("only the peer that created the run, if it is not open, can remove others")
        self.authority.revoke(subject)
        self._watch.spread()


# of an invitation: where nobody is online, nobody makes another one
HOURS = 24.0
MAILBOX_HOURS = 30 * 24.0
# of an invitation, and of each: it must fit in a QR code
ENTRIES = 3
ADDRESSES = 4
ONLY_THE_ORGANIZER = (
    "only the organizer's peer chooses role, hours, uses and settings of an invitation. Call invite() without them to "
    "pass yours on, or ask the organizer for another one: a backbone takes its settings from [settings] in its run.toml"
)


@dataclass(frozen=True)
class RunAccess:
    """A peer's way into a run, and its rights there.

    ``admission`` is None in an open run. The ``invitation`` admits it to a closed one, with a
    Hugging Face ``token`` if required; the authority has a ``book`` instead. ``membership``,
    ``known`` peers and the ``tally`` are of an earlier session.
    """

    run_id: str
    access: Access
    admission: MembershipAdmission | None = None
    token: str = field(default="", repr=False)
    membership: bytes = field(default=b"", repr=False)
    book: AuthorityBook | None = None
    allow: Allowlist | None = None
    invitation: Invite | None = None
    mailbox: str = ""  # address of the bucket that has the run's rounds, if any
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
        mailbox: str = "",
    ) -> "RunAccess":
        """Create a run with this peer as authority, or continue the key file's; ValueError if unusable."""
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
            "access='allowlist' needs this peer online, to look accounts up: in a bucket, use access='invite'",
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
    def by(
        cls,
        invitation: Invite,
        identity: Identity,
        *,
        token: str = "",
        membership: bytes = b"",
        mailbox: str = "",
    ) -> "RunAccess":
        """Join a run.

        Args:
            invitation: admits this peer.
            identity: of this peer.
            token: of Hugging Face, if the run asks for one.
            membership: of an earlier session, if any.
            mailbox: the address that this peer opens; its folder may have another path here than in the invitation.
        """
        run_id = invitation.run_id
        admission = None
        if invitation.grant is not None:
            admission = MembershipAdmission(run_id, authority=invitation.authority, own=identity.public_key)
        own: dict[str, Any] = {"invitation": invitation, "mailbox": mailbox}
        return cls(run_id, invitation.access, admission, token, membership, **own)

    @property
    def entries(self) -> tuple[Contact, ...]:
        found: dict[PeerId, Contact] = {}
        for contact in (*self.known, *(self.invitation.entries if self.invitation else ())):
            before = found.get(contact.id, contact).addresses
            found[contact.id] = Contact(contact.id, tuple(dict.fromkeys((*before, *contact.addresses))))
        return tuple(found.values())

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
        """Make an invitation; a peer that is not the authority passes its own on, with itself as an entry.

        The ``role`` is worker (default), reducer or viewer. It can be used for ``hours``, by default 24, or 30 days
        where the run is in a bucket, by ``uses`` peers, by default any number. ``settings`` are for training, by
        default those of this peer's own invitation. Raises `JoinError` if nobody could use it, `PermissionError` if
        only the authority can make it, `ValueError` if an argument is out of range.
        """
        limited = role is not None or uses is not None
        closed = self.admission is not None
        text = "an open run has no roles and no counted invitations: create it with access='invite'"
        require(closed or not limited, text, PermissionError)
        own_settings = {} if self.invitation is None else self.invitation.settings
        if settings is None:
            settings = own_settings
        entries = self._ways_in(peers)
        if closed and authority is None:
            assert self.invitation is not None  # only the authority has none
            chosen = limited or hours is not None or dict(settings) != own_settings
            require(not chosen, ONLY_THE_ORGANIZER, PermissionError)
            return self.invitation.replaced(entries=entries)
        usual_h = MAILBOX_HOURS if self.mailbox else HOURS
        life_h = usual_h if hours is None else hours
        if authority is None:
            made = Invite(self.run_id, entries, peers.time() + 3600 * life_h)
        else:
            grant, secret = authority.grant(role_named(role or "worker"), hours=life_h, uses=uses or 0)
            require(
                grant.offline or (peers.contact.addresses and peers.contact.direct),
                "such an invitation requires that others can dial this peer, and they cannot: "
                "open a tunnel (tunnel='ngrok'), or make an invitation of unlimited use",
                JoinError,
            )
            made = Invite.issue(grant, secret, entries, access=self.access, authority=peers.public_key)
        return self._with_mailbox(made, peers).with_settings(settings)

    def _with_mailbox(self, made: Invite, peers: Node) -> Invite:
        """Add the address that the creator of the run signed: this peer, or the one whose invitation it has."""
        if not self.mailbox:
            return made
        if self.invitation is not None:
            former = self.invitation
            return made.with_mailbox(former.mailbox, former.authority, former.mailbox_signature)
        signed = SignedMailbox(self.run_id, self.mailbox).signed(peers.sign)
        return made.with_mailbox(self.mailbox, peers.public_key, signed.signature)

    def _ways_in(self, peers: Node) -> tuple[Contact, ...]:
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
