"""Memberships: signed statements that a peer's key has a role in a run, which anybody checks offline.

    authority's key ── signs ──> Membership of a peer's key
    authority's key ── signs ──> Grant of an invitation's key ── signs ──> Membership of a peer's key

The second chain lets an invitation admit newcomers while the authority sleeps: the invitation holds the secret of
its own key, so the newcomer signs its membership itself, within the grant's limits. A grant that is not
``offline`` is only good for asking the authority. Whoever holds an offline invitation can thus come back under a
new key until ``member_until``, revoked or not; revoking the invitation's own key closes that door.

Times are swarm time, and believed with `SLACK_S` to spare.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256
from typing import Annotated, Protocol, Self, TypeAlias

import msgspec

from colab_swarm.errors import NotAdmitted, ProtocolError
from colab_swarm.net.hello import MAX_MEMBERSHIP_BYTES
from colab_swarm.net.identity import Identity, id_of, verify
from colab_swarm.net.peers import UNDECODABLE, Message, PeerId, Role
from colab_swarm.net.settings import MAX_RUN_ID_BYTES

SLACK_S = 600.0
"""How far clocks may be apart."""
MAX_NAME_CHARS = 64
MAX_USES = 10_000
MAX_REVOKED = 900
"""They fit in one record of the DHT."""
MAX_VERIFIED = 10_000
"""Memberships remembered: checking one takes up to 340 microseconds."""
MAX_GUESTS = 64
GUEST_S = 60.0
"""How long a peer without a membership may stay at the authority to ask for one."""

Key: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]

Moment: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=1e11)]

RunId: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_RUN_ID_BYTES)]

Sign: TypeAlias = Callable[[bytes], bytes]


class Signed(Message, frozen=True, kw_only=True):
    """A statement with an Ed25519 signature over all its fields and its kind."""

    signature: Annotated[bytes, msgspec.Meta(max_length=64)] = b""

    def signed_bytes(self) -> bytes:
        """What is signed."""
        kind = f"colab_swarm {type(self).__name__}"
        return msgspec.msgpack.encode((kind, msgspec.structs.replace(self, signature=b"")))

    def signed(self, sign: Sign) -> Self:
        """The same, with the signature that ``sign(data)`` makes."""
        return msgspec.structs.replace(self, signature=sign(self.signed_bytes()))

    def is_signed_by(self, public_key: bytes) -> bool:
        """Whether the signature was made by this key."""
        return verify(public_key, self.signature, self.signed_bytes())

    def encode(self) -> bytes:
        """As it travels."""
        return msgspec.msgpack.encode(self)


class Grant(Signed, frozen=True):
    """What an invitation allows, signed by the authority.

    Attributes:
        run_id: the run.
        role: the highest role it gives.
        key: the invitation's own public key.
        join_until: memberships under it begin before.
        member_until: memberships under it end before.
        uses: peers that may join by it, 0 for any number; the authority counts.
        offline: whether the invitation's key may sign memberships; only with unlimited uses.
    """

    run_id: RunId
    role: Role
    key: Key
    join_until: Moment
    member_until: Moment
    uses: Annotated[int, msgspec.Meta(ge=0, le=MAX_USES)] = 0
    offline: bool = True


class Membership(Signed, frozen=True):
    """What a peer shows in its handshakes.

    Attributes:
        run_id, role: what it may be where.
        key: the peer's public key.
        name: whom the authority took it for, such as a Hugging Face user; empty if it did not ask.
        issued_at, expires_at: its life.
        grant: under which the invitation's key signed it; None if the authority did.
    """

    run_id: RunId
    role: Role
    key: Key
    name: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]
    issued_at: Moment
    expires_at: Moment
    grant: Grant | None = None

    @classmethod
    def decode(cls, data: bytes) -> Membership:
        """Read what a peer showed.

        Raises:
            NotAdmitted: it shows nothing, or garbage.
        """
        if not data:
            raise NotAdmitted("no membership: join with an invitation")
        try:
            if len(data) > MAX_MEMBERSHIP_BYTES:
                raise NotAdmitted("the membership is too long: join again with a new invitation")
            return _membership_decoder.decode(data)
        except UNDECODABLE as error:
            raise NotAdmitted("the membership cannot be read: `pip install -U colab-swarm`") from error

    @classmethod
    def by_invitation(cls, grant: Grant, invitation: Identity, *, key: bytes, now: float) -> Membership:
        """The longest that ``grant`` allows, signed by the invitation's key for the peer that has ``key``."""
        unsigned = cls(grant.run_id, grant.role, key, "", now, grant.member_until, grant)
        return unsigned.signed(invitation.sign)

    def require_sound(self, run_id: str, *, authority: bytes, key: bytes) -> None:
        """Check all but the time: the run, the owner, the signatures, and the grant's limits.

        Raises:
            NotAdmitted: it does not hold.
        """
        grant = self.grant
        if self.key != key:
            raise NotAdmitted("the membership is another peer's: join again with an invitation")
        if self.run_id != run_id or (grant is not None and grant.run_id != run_id):
            raise NotAdmitted("the membership is of another run: join with an invitation to this one")
        if not Role.GUEST < self.role < Role.AUTHORITY:
            raise NotAdmitted("nobody can give the role of the membership: join again with an invitation")
        if grant is not None:
            if not grant.is_signed_by(authority):
                raise NotAdmitted("the invitation was not signed by this run's authority: ask for another")
            within = self.role <= grant.role and self.expires_at <= grant.member_until
            if not (within and self.issued_at <= grant.join_until):
                raise NotAdmitted("the membership is more than its invitation allows: ask for another one")
        if not self.is_signed_by(authority if grant is None else grant.key):
            raise NotAdmitted("the membership's signature is wrong: join again with an invitation")

    def require_current(self, now: float) -> None:
        """Check the time.

        Raises:
            NotAdmitted: it has ended, or not begun.
        """
        late_s, early_s = now - self.expires_at, self.issued_at - now
        if not late_s <= SLACK_S:
            raise NotAdmitted(f"membership ended {in_words(late_s)} ago: join again with a new invitation")
        if not early_s <= SLACK_S:
            raise NotAdmitted(f"membership begins in {in_words(early_s)}: one of our clocks is off, set it")


class Revocations(Signed, frozen=True):
    """All that the authority has revoked: ids of peers, and of invitations' keys. The higher version wins."""

    run_id: RunId
    version: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)] = 0
    subjects: Annotated[tuple[Key, ...], msgspec.Meta(max_length=MAX_REVOKED)] = ()

    def adding(self, subject: PeerId, *, now: float, sign: Sign) -> Revocations:
        """The next version, which revokes ``subject`` too; beyond 900 the oldest is forgotten."""
        subjects = (*(other for other in self.subjects if other != subject), subject)[-MAX_REVOKED:]
        return Revocations(self.run_id, max(self.version + 1, int(now)), subjects).signed(sign)


_membership_decoder = msgspec.msgpack.Decoder(Membership)

_revocations_decoder = msgspec.msgpack.Decoder(Revocations)


class _Revoked(NotAdmitted):
    """Nothing to ask the authority for."""


class MembershipAdmission:
    """Admits peers with a membership; an `Admission`. The authority itself shows nothing but its key.

    At the authority, and only there, a peer without a valid membership is a guest, for a minute.

    Attributes:
        membership: what this peer shows; to be set whenever it gets a new one.
        revoked: what is known of revocations; `learn` brings newer ones.

    Args:
        run_id: the run.
        authority: the authority's Ed25519 public key.
        own: this peer's.
    """

    def __init__(self, run_id: str, *, authority: bytes, own: bytes) -> None:
        self.run_id, self.authority, self.own = run_id, authority, own
        self.membership = b""
        self.revoked = Revocations(run_id)
        self._out: frozenset[bytes] = frozenset()  # what is revoked
        self._verified: OrderedDict[bytes, Membership] = OrderedDict()
        self._guests: dict[bytes, tuple[float, float]] = {}  # since when, and last seen when, by public key

    def admit(self, public_key: bytes, membership: bytes, *, now: float) -> Role:
        """See `Admission.admit`."""
        try:
            role = self.verify(public_key, membership, now=now)
        except NotAdmitted as error:
            if self.own != self.authority or isinstance(error, _Revoked):
                raise
            return self._welcome(public_key, now)
        self._guests.pop(public_key, None)
        return role

    def verify(self, public_key: bytes, membership: bytes, *, now: float) -> Role:
        """The role that a peer shows at ``now``; nobody is a guest.

        Raises:
            NotAdmitted: it shows none.
        """
        if public_key == self.authority:
            return Role.AUTHORITY
        if id_of(public_key) in self._out:
            raise _Revoked("the authority of this run has revoked your membership: ask its organizer")
        return self.check(public_key, membership, now=now).role

    def check(self, public_key: bytes, membership: bytes, *, now: float) -> Membership:
        """The membership that lets a peer in without asking anybody.

        Raises:
            NotAdmitted: there is none.
        """
        found = self.inspect(public_key, membership)
        if found.grant is not None and (found.grant.uses or not found.grant.offline):
            raise NotAdmitted("this invitation is only good at the authority: ask it for a membership")
        found.require_current(now)
        return found

    def inspect(self, public_key: bytes, membership: bytes) -> Membership:
        """What a peer shows, if it is sound and not revoked, whatever the time.

        Raises:
            NotAdmitted: it is not.
        """
        digest = sha256(public_key + membership).digest()
        found = self._verified.get(digest)
        if found is None:
            found = Membership.decode(membership)
            found.require_sound(self.run_id, authority=self.authority, key=public_key)
            self._verified[digest] = found
            if len(self._verified) > MAX_VERIFIED:
                self._verified.popitem(last=False)
        else:
            self._verified.move_to_end(digest)
        keys = (public_key,) if found.grant is None else (public_key, found.grant.key)
        if any(id_of(key) in self._out for key in keys):
            raise _Revoked("the authority of this run has revoked this: ask its organizer")
        return found

    def learn(self, revocations: bytes) -> bool:
        """Take a list of revocations, encoded; returns whether it is newer than the one known.

        Raises:
            ProtocolError: it is garbage, or not by the authority of this run.
        """
        try:
            found = _revocations_decoder.decode(revocations)
        except UNDECODABLE as error:
            raise ProtocolError(f"undecodable revocations: {error}") from error
        if found.version <= self.revoked.version:
            return False
        if found.run_id != self.run_id or not found.is_signed_by(self.authority):
            raise ProtocolError("revocations that the authority of this run has not signed")
        self.revoked, self._out = found, frozenset(found.subjects)
        return True

    def _welcome(self, public_key: bytes, now: float) -> Role:
        """Let a guest in, or out again after a minute; its link is asked about every few seconds while it stands."""
        since, seen = self._guests.get(public_key, (now, now))
        if abs(now - seen) > GUEST_S:
            since = now  # it went away, and comes again
        if abs(now - since) > GUEST_S:
            del self._guests[public_key]
            raise NotAdmitted("no membership was asked for in a minute: join again with an invitation")
        if public_key not in self._guests and len(self._guests) >= MAX_GUESTS:
            left = [guest for guest, (_, at) in self._guests.items() if abs(now - at) > GUEST_S]
            if not left:
                raise NotAdmitted("too many newcomers ask for a membership: try again in a minute")
            for guest in left:
                del self._guests[guest]
        self._guests[public_key] = since, now
        return Role.GUEST


def in_words(seconds: float) -> str:
    """A length of time in its largest unit: ``3 hours``."""
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"


__all__ = ["Admission", "NotAdmitted", "OpenAdmission"]


class Admission(Protocol):
    """What this peer shows of itself, and what it asks of others."""

    @property
    def membership(self) -> bytes:
        """What this peer shows in its handshakes; empty if it has nothing to show."""

    def admit(self, public_key: bytes, membership: bytes, *, now: float) -> Role:
        """The role of a peer with this Ed25519 key that shows ``membership``; ``now`` is swarm time.

        Asked at each handshake and every few seconds for each link, so it remembers what it has verified.

        Raises:
            NotAdmitted: it may not link, or no longer.
        """


class OpenAdmission:
    """Everybody who knows the run is a worker."""

    membership = b""

    def admit(self, public_key: bytes, membership: bytes, *, now: float) -> Role:
        """A worker."""
        return Role.WORKER
