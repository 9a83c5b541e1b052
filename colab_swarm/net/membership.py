"""Memberships: signed statements that a peer's key has a role in a run, which every peer can check offline.

The authority signs memberships. Or it signs a `Grant` for the key of an invitation, and that key signs memberships:
this admits late joiners while the authority is offline. The invitation contains the secret of its own key, so a joining
peer signs its own membership. No other peer can check the time of issue in such a membership. So after ``join_until``
a peer accepts it only from peers that it met before, and the authority renews only memberships of peers that it met.

A grant that is not ``offline`` only allows a peer to request a membership from the authority. The holder of an offline
invitation can come back with a new key until ``join_until``, unless the invitation's key is also revoked. Times are
swarm time, with a tolerance of `SLACK_S`.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Annotated, Self, TypeAlias

import aiohttp
import msgspec

from colab_swarm.errors import NotAdmitted, PeerUnreachable, ProtocolError, require
from colab_swarm.net.identity import Identity, id_of, verify
from colab_swarm.net.peers import MAX_RUN_ID_BYTES, UNDECODABLE, Message, PeerId, Role, decoded, remember
from colab_swarm.project import update

# The clocks of two peers may differ by this time.
SLACK_S = 600.0
MAX_NAME_CHARS = 64
MAX_USES = 10_000
# So many that the whole list of revocations fits in one message.
MAX_REVOKED = 900
MAX_MEMBERSHIP_BYTES = 2048
MAX_GUESTS = 64
# Maximum number of members by invitation that a peer remembers.
_MAX_MET = 10_000
# A peer without a membership has this much time to request one from the authority.
GUEST_S = 60.0
MAX_ANSWER_BYTES = 1 << 20
_ANSWER_TIMEOUT_S = 10.0
_AGAIN = "join again with an invitation"
_TOKEN = re.compile(r"[!-~]{1,512}")
Key: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Moment: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=1e11)]
RunId: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_RUN_ID_BYTES)]
Sign: TypeAlias = Callable[[bytes], bytes]
_require = partial(require, kind=NotAdmitted)


class Signed(Message, frozen=True, kw_only=True):
    """A statement with an Ed25519 signature over its type and all its fields."""

    signature: Annotated[bytes, msgspec.Meta(max_length=64)] = b""

    def signed_bytes(self) -> bytes:
        unsigned = msgspec.structs.replace(self, signature=b"")
        return msgspec.msgpack.encode((f"colab_swarm {type(self).__name__}", unsigned))

    def signed(self, sign: Sign) -> Self:
        return msgspec.structs.replace(self, signature=sign(self.signed_bytes()))

    def is_signed_by(self, public_key: bytes) -> bool:
        return verify(public_key, self.signature, self.signed_bytes())

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)


class Grant(Signed, frozen=True):
    """Rights of an invitation, signed by the authority.

    Attributes:
        role: the highest role that it gives.
        key: the invitation's own public key.
        join_until: latest time at which a membership under it may start.
        member_until: latest time at which a membership under it may end.
        uses: number of peers that may join; 0 for any number.
        offline: True if the invitation's key may sign memberships; only with unlimited uses.
    """

    run_id: RunId
    role: Role
    key: Key
    join_until: Moment
    member_until: Moment
    uses: Annotated[int, msgspec.Meta(ge=0, le=MAX_USES)] = 0
    offline: bool = True


class Membership(Signed, frozen=True):
    """A peer's role in a run, shown in its handshakes.

    Attributes:
        key: the peer's public key.
        name: the peer's name if the authority verified one, else "".
        grant: the grant of the invitation whose key signed the membership; None if the authority signed it.
        invited_by: the invitation's key; empty if it is not known.
    """

    run_id: RunId
    role: Role
    key: Key
    name: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]
    issued_at: Moment
    expires_at: Moment
    grant: Grant | None = None
    invited_by: Annotated[bytes, msgspec.Meta(max_length=32)] = b""

    @classmethod
    def decode(cls, data: bytes) -> "Membership":
        """Decode a membership that a peer showed; raise `NotAdmitted` if it is empty or cannot be read."""
        _require(bool(data), "no membership: join with an invitation")
        _require(len(data) <= MAX_MEMBERSHIP_BYTES, f"the membership is too long: {_AGAIN}")
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except UNDECODABLE as error:
            raise NotAdmitted(f"the membership cannot be read: {update()}") from error

    @classmethod
    def by_invitation(cls, grant: Grant, invitation: Identity, *, key: bytes, now: float) -> "Membership":
        """Return the longest membership that ``grant`` allows, signed by the invitation's key."""
        membership = cls(
            run_id=grant.run_id,
            role=grant.role,
            key=key,
            name="",
            issued_at=now,
            expires_at=grant.member_until,
            grant=grant,
        )
        return membership.signed(invitation.sign)


# Checking a membership takes up to 340 microseconds, so results are kept.
@lru_cache(10_000)
def _sound_membership(data: bytes, run_id: str, authority: bytes, key: bytes) -> Membership:
    """Return the membership, after checking its run, owner, signatures and limits; it may have ended."""
    membership = Membership.decode(data)
    grant = membership.grant
    signer = authority
    _require(membership.key == key, f"the membership is another peer's: {_AGAIN}")
    same_run = membership.run_id == run_id and (grant is None or grant.run_id == run_id)
    _require(same_run, f"a membership of another run: {_AGAIN}")
    _require(Role.GUEST < membership.role < Role.AUTHORITY, f"its role cannot be granted: {_AGAIN}")
    if grant is not None:
        signer = grant.key
        _require(grant.is_signed_by(authority), "not signed by this run's authority: ask for another")
        in_time = membership.issued_at <= grant.join_until and membership.expires_at <= grant.member_until
        allowed = in_time and membership.role <= grant.role
        _require(allowed, "more than its invitation allows: ask for another")
    _require(membership.is_signed_by(signer), f"the membership's signature is wrong: {_AGAIN}")
    return membership


class Revocations(Signed, frozen=True):
    """Ids of the peers and of the invitations' keys that the authority has revoked. The higher version counts."""

    run_id: RunId
    version: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)] = 0
    subjects: Annotated[tuple[Key, ...], msgspec.Meta(max_length=MAX_REVOKED)] = ()

    def adding(self, subject: PeerId, *, now: float, sign: Sign) -> "Revocations":
        """Return the next version, which also revokes ``subject``; beyond 900 subjects the oldest is dropped."""
        subjects = [other for other in self.subjects if other != subject]
        subjects.append(subject)
        version = max(self.version + 1, int(now))
        revocations = Revocations(self.run_id, version, tuple(subjects[-MAX_REVOKED:]))
        return revocations.signed(sign)


@dataclass(eq=False)
class MembershipAdmission:
    """Admits members. Only the authority also admits peers without a valid membership, as guests for a minute.

    A peer whose id or whose invitation's key was revoked is never admitted.

    Attributes:
        authority, own: the public keys of the authority and of this peer.
        membership: this peer's membership; set it whenever the peer gets a new one.
        revoked: the newest revocations; `learn` replaces them.
    """

    run_id: str
    authority: bytes
    own: bytes
    membership: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        self.revoked = Revocations(self.run_id)
        self._revoked_ids: frozenset[bytes] = frozenset()
        # The times of each guest's first and last visit, by public key.
        self._guests: dict[bytes, tuple[float, float]] = {}
        # Public keys of members that were seen before their invitation ended.
        self._met: dict[bytes, bool] = {}

    def admit(self, public_key: bytes, membership: bytes, *, now: float) -> Role:
        """Return the role that ``membership`` gives at swarm time ``now``, or raise `NotAdmitted`."""
        try:
            role = self.verify(public_key, membership, now=now)
            if role < Role.AUTHORITY:
                self.require_met(self.inspect(public_key, membership), now=now)
        except NotAdmitted as error:
            if self.own != self.authority or error.reason == "revoked":
                raise
            return self._welcome(public_key, now)
        self._guests.pop(public_key, None)
        return role

    def verify(self, public_key: bytes, membership: bytes, *, now: float) -> Role:
        """Return the role that a peer's membership gives at ``now``, or raise `NotAdmitted`."""
        if public_key == self.authority:
            return Role.AUTHORITY
        return self.check(public_key, membership, now=now).role

    def check(self, public_key: bytes, membership: bytes, *, now: float) -> Membership:
        """Return the peer's membership if it is valid without the authority, or raise `NotAdmitted`."""
        sound = self.inspect(public_key, membership)
        grant = sound.grant
        if grant is not None:
            valid_offline = grant.offline and grant.uses == 0
            _require(valid_offline, "this invitation is only good at the authority: ask it for a membership")
        late_s = now - sound.expires_at
        _require(late_s <= SLACK_S, f"membership ended {in_words(late_s)} ago: {_AGAIN}")
        early_s = sound.issued_at - now
        _require(early_s <= SLACK_S, f"membership starts in {in_words(early_s)}: set the clock that is off")
        return sound

    def require_met(self, membership: Membership, *, now: float) -> None:
        """Raise `NotAdmitted` if an ended invitation signed the membership, unless this peer met the member before."""
        if membership.grant is None:
            return
        late_s = now - membership.grant.join_until
        met = membership.key in self._met
        _require(met or late_s <= SLACK_S, f"its invitation ended {in_words(late_s)} ago: ask for another")
        remember(self._met, membership.key, True, _MAX_MET)

    def inspect(self, public_key: bytes, membership: bytes) -> Membership:
        """Return the peer's membership, even if it has ended; raise `NotAdmitted` if it is invalid or revoked."""
        self._require_not_revoked(public_key)
        sound = _sound_membership(membership, self.run_id, self.authority, public_key)
        if sound.grant is not None:
            self._require_not_revoked(sound.grant.key)
        return sound

    def _require_not_revoked(self, key: bytes) -> None:
        if id_of(key) in self._revoked_ids:
            text = "the authority of this run has revoked your membership: ask its organizer"
            raise NotAdmitted(text, reason="revoked")

    def learn(self, revocations: bytes) -> bool:
        """Take an encoded list of revocations; return True if it is newer, or raise `ProtocolError` if it is forged."""
        revoked = decoded(revocations, Revocations, "undecodable revocations", ProtocolError)
        if revoked.version <= self.revoked.version:
            return False
        sound = revoked.run_id == self.run_id and revoked.is_signed_by(self.authority)
        require(sound, "revocations that the authority of this run has not signed", ProtocolError)
        self.revoked = revoked
        self._revoked_ids = frozenset(revoked.subjects)
        return True

    def _welcome(self, public_key: bytes, now: float) -> Role:
        """Admit a guest for a minute; it is called every few seconds while the guest is linked."""
        first_at, last_at = self._guests.pop(public_key, (now, now))
        # The guest left and came back later, so its minute begins again.
        if abs(now - last_at) > GUEST_S:
            first_at = now
        _require(abs(now - first_at) <= GUEST_S, f"no membership was requested in a minute: {_AGAIN}")
        if len(self._guests) >= MAX_GUESTS:
            self._guests = {
                key: (first_at, last_at)
                for key, (first_at, last_at) in self._guests.items()
                if abs(now - last_at) <= GUEST_S
            }
        _require(len(self._guests) < MAX_GUESTS, "too many peers request a membership: try again in a minute")
        self._guests[public_key] = (first_at, now)
        return Role.GUEST


def in_words(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"


@lru_cache(4096)
def voucher_of(public_key: bytes, membership: bytes) -> bytes:
    """Return a peer's voucher: its invitation's key, its account, or its own key.

    All peers with the same voucher may belong to one person.
    """
    try:
        proof = Membership.decode(membership)
    except NotAdmitted:
        return public_key
    if proof.grant:
        return proof.grant.key
    return proof.name.encode() or proof.invited_by or public_key


class OpenAdmission:
    membership = b""

    def verify(self, public_key: bytes, membership: bytes, *, now: float) -> Role:
        return Role.WORKER

    def admit(self, public_key: bytes, membership: bytes, *, now: float) -> Role:
        return Role.WORKER


Admission: TypeAlias = OpenAdmission | MembershipAdmission
"""This peer's ``membership``, and its rule for admitting others, in handshakes and every few seconds for links."""


class Account(msgspec.Struct, frozen=True):
    """A Hugging Face account: a user with its organisations, or an organisation."""

    name: str
    type: str = "user"
    orgs: "tuple[Account, ...]" = ()


async def whoami(token: str) -> Account | None:
    """Return the user that a token belongs to, by the Hub's ``whoami-v2``; None if it is not the token of a user.

    The environment variable ``HF_ENDPOINT`` replaces huggingface.co. A token with read access is enough;
    it is not logged. Raises `PeerUnreachable` if there is no readable answer within 10 s.
    """
    if not _TOKEN.fullmatch(token):
        return None
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    url = endpoint.rstrip("/") + "/api/whoami-v2"
    timeout = aiohttp.ClientTimeout(total=_ANSWER_TIMEOUT_S)
    headers = {"Authorization": f"Bearer {token}"}
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(url, headers=headers, allow_redirects=False) as response,
        ):
            if response.status in (401, 403):
                return None
            answer = f"{url} answers {response.status} {response.reason}: try again later"
            require(response.status == 200, answer, PeerUnreachable)
            data = b""
            async for piece in response.content.iter_any():
                data += piece
                require(len(data) <= MAX_ANSWER_BYTES, "the answer is too long")
            account = msgspec.json.decode(data, type=Account)
    except (aiohttp.ClientError, ValueError, TimeoutError, *UNDECODABLE) as error:
        raise PeerUnreachable(f"{url} does not answer ({type(error).__name__}): try again later") from error
    return account if account.type == "user" else None
