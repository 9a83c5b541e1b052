"""Memberships: signed statements that a peer's key has a role in a run, which every peer can check offline.

The authority signs them, or a `Grant` of an invitation's key, which signs them: this admits late
joiners while the authority is offline. The invitation holds the secret of its own key, so the
joining peer signs its membership itself. Such a membership says when it was issued, and nobody can
check that: after ``join_until`` a peer accepts it only from those that it met before, and the
authority renews no other. A grant that is not ``offline`` only allows to request a membership from
the authority. The holder of an offline invitation can come back under a new key until
``join_until``, unless the invitation's own key is revoked too. Times are swarm time, with a
tolerance of `SLACK_S`.
"""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from typing import Annotated, Self, TypeAlias

import aiohttp
import msgspec

from colab_swarm.errors import NotAdmitted, PeerUnreachable, ProtocolError, require
from colab_swarm.net.identity import Identity, id_of, verify
from colab_swarm.net.peers import MAX_RUN_ID_BYTES, UNDECODABLE, Message, PeerId, Role, decoded, remember
from colab_swarm.project import update

SLACK_S = 600.0  # how far clocks may be apart
MAX_NAME_CHARS = 64
MAX_USES = 10_000
MAX_REVOKED = 900  # as many as fit in one record of the DHT
MAX_MEMBERSHIP_BYTES = 2048
MAX_GUESTS = 64
MAX_MET = 10_000  # members by invitation that are remembered
GUEST_S = 60.0  # for a peer without a membership to request one from the authority
MAX_ANSWER_BYTES = 1 << 20
AGAIN = "join again with an invitation"
_TOKEN = re.compile(r"[!-~]{1,512}")
Key: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Moment: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=1e11)]
RunId: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_RUN_ID_BYTES)]
Sign: TypeAlias = Callable[[bytes], bytes]
_require = partial(require, kind=NotAdmitted)


class Signed(Message, frozen=True, kw_only=True):
    """A statement with an Ed25519 signature over all its fields and its kind."""

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
    """Rights of an invitation, signed by the authority."""

    run_id: RunId  # the run
    role: Role  # the highest role it gives
    key: Key  # the invitation's own public key
    join_until: Moment  # memberships under it start before this time
    member_until: Moment  # memberships under it end before this time
    uses: Annotated[int, msgspec.Meta(ge=0, le=MAX_USES)] = 0  # peers; 0: any number
    offline: bool = True  # whether the invitation's key may sign memberships; only with unlimited uses


class Membership(Signed, frozen=True):
    """A peer's role in a run, shown in its handshakes; ``name`` if the authority verified one."""

    run_id: RunId
    role: Role
    key: Key  # the peer's public key
    name: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]
    issued_at: Moment
    expires_at: Moment
    grant: Grant | None = None  # under which an invitation signed it; None: the authority did
    invited_by: Annotated[bytes, msgspec.Meta(max_length=32)] = b""  # the invitation's key, if known

    @classmethod
    def decode(cls, data: bytes) -> "Membership":
        """Decode what a peer showed; raise `NotAdmitted` if it is empty or garbled."""
        _require(bool(data), "no membership: join with an invitation")
        _require(len(data) <= MAX_MEMBERSHIP_BYTES, f"the membership is too long: {AGAIN}")
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except UNDECODABLE as error:
            raise NotAdmitted(f"the membership cannot be read: {update()}") from error

    @classmethod
    def by_invitation(cls, grant: Grant, invitation: Identity, *, key: bytes, now: float) -> "Membership":
        """Return the longest membership that ``grant`` allows, signed by the invitation's key."""
        return cls(grant.run_id, grant.role, key, "", now, grant.member_until, grant).signed(invitation.sign)


@lru_cache(10_000)  # checking a membership takes up to 340 microseconds
def _sound_membership(data: bytes, run_id: str, authority: bytes, key: bytes) -> Membership:
    """Return a membership whose run, owner, signatures and limits are right, though it may have ended."""
    found, signer = Membership.decode(data), authority
    grant = found.grant
    _require(found.key == key, f"the membership is another peer's: {AGAIN}")
    _require(found.run_id == run_id == (grant or found).run_id, f"a membership of another run: {AGAIN}")
    _require(Role.GUEST < found.role < Role.AUTHORITY, f"its role cannot be granted: {AGAIN}")
    if grant is not None:
        signer = grant.key
        _require(grant.is_signed_by(authority), "not signed by this run's authority: ask for another")
        in_time = found.issued_at <= grant.join_until and found.expires_at <= grant.member_until
        _require(in_time and found.role <= grant.role, "more than its invitation allows: ask for another")
    _require(found.is_signed_by(signer), f"the membership's signature is wrong: {AGAIN}")
    return found


class Revocations(Signed, frozen=True):
    """Ids of peers and of invitations' keys that the authority has revoked. The higher version wins."""

    run_id: RunId
    version: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)] = 0
    subjects: Annotated[tuple[Key, ...], msgspec.Meta(max_length=MAX_REVOKED)] = ()

    def adding(self, subject: PeerId, *, now: float, sign: Sign) -> "Revocations":
        """Return the next version, which revokes ``subject`` too; beyond 900 the oldest is dropped."""
        subjects = (*(other for other in self.subjects if other != subject), subject)[-MAX_REVOKED:]
        return Revocations(self.run_id, max(self.version + 1, int(now)), subjects).signed(sign)


class MembershipAdmission:
    """Admits members; at the authority, and only there, all others are guests, for a minute."""

    def __init__(self, run_id: str, *, authority: bytes, own: bytes) -> None:
        self.run_id, self.authority, self.own = run_id, authority, own
        self.membership = b""  # this peer's own; set it whenever it gets a new one
        self.revoked = Revocations(run_id)  # the newest; `learn` replaces them
        self._revoked_ids: frozenset[bytes] = frozenset()
        self._guests: dict[bytes, tuple[float, float]] = {}  # first and last seen, by public key
        self._met: dict[bytes, bool] = {}  # public keys seen while their invitation was good

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
        own = public_key == self.authority
        return Role.AUTHORITY if own else self.check(public_key, membership, now=now).role

    def check(self, public_key: bytes, membership: bytes, *, now: float) -> Membership:
        """Return the peer's membership if it is valid without the authority, or raise `NotAdmitted`."""
        found = self.inspect(public_key, membership)
        only_there = found.grant is not None and (found.grant.uses > 0 or not found.grant.offline)
        _require(not only_there, "this invitation is only good at the authority: ask it for a membership")
        late_s, early_s = now - found.expires_at, found.issued_at - now
        _require(late_s <= SLACK_S, f"membership ended {in_words(late_s)} ago: {AGAIN}")
        _require(early_s <= SLACK_S, f"membership starts in {in_words(early_s)}: set the clock that is off")
        return found

    def require_met(self, shown: Membership, *, now: float) -> None:
        """Raise `NotAdmitted` if an invitation signed it, has ended, and was not shown here before."""
        if shown.grant is None:
            return
        late_s, met = now - shown.grant.join_until, shown.key in self._met
        _require(met or late_s <= SLACK_S, f"its invitation ended {in_words(late_s)} ago: ask for another")
        remember(self._met, shown.key, True, MAX_MET)

    def inspect(self, public_key: bytes, membership: bytes) -> Membership:
        """Return the peer's membership, ended or not; raise `NotAdmitted` if it is unsound or revoked."""
        self._require_not_revoked(public_key)
        found = _sound_membership(membership, self.run_id, self.authority, public_key)
        if found.grant is not None:
            self._require_not_revoked(found.grant.key)
        return found

    def _require_not_revoked(self, key: bytes) -> None:
        if id_of(key) in self._revoked_ids:
            text = "the authority of this run has revoked your membership: ask its organizer"
            raise NotAdmitted(text, reason="revoked")

    def learn(self, revocations: bytes) -> bool:
        """Take an encoded list; return whether it is newer, or raise `ProtocolError` if it is forged."""
        found = decoded(revocations, Revocations, "undecodable revocations", ProtocolError)
        if found.version <= self.revoked.version:
            return False
        sound = found.run_id == self.run_id and found.is_signed_by(self.authority)
        require(sound, "revocations that the authority of this run has not signed", ProtocolError)
        self.revoked, self._revoked_ids = found, frozenset(found.subjects)
        return True

    def _welcome(self, public_key: bytes, now: float) -> Role:
        """Admit a guest for a minute, by calls every few seconds; a visit long ago is forgotten."""
        since, seen = self._guests.pop(public_key, (now, now))
        if abs(now - seen) > GUEST_S:
            since = now  # it left and came back
        _require(abs(now - since) <= GUEST_S, f"no membership was requested in a minute: {AGAIN}")
        if len(self._guests) >= MAX_GUESTS:
            self._guests = {key: at for key, at in self._guests.items() if abs(now - at[1]) <= GUEST_S}
        _require(len(self._guests) < MAX_GUESTS, "too many peers request a membership: try again in a minute")
        self._guests[public_key] = since, now
        return Role.GUEST


def in_words(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"


@lru_cache(4096)
def voucher_of(public_key: bytes, membership: bytes) -> bytes:
    """Return who vouches for a peer: an invitation's key, its account, or its own key. Peers of one may be one."""
    with suppress(NotAdmitted):
        shown = Membership.decode(membership)
        return shown.grant.key if shown.grant else shown.name.encode() or shown.invited_by or public_key
    return public_key


class OpenAdmission:
    membership = b""

    def verify(self, public_key: bytes, membership: bytes, *, now: float) -> Role:
        return Role.WORKER

    def admit(self, public_key: bytes, membership: bytes, *, now: float) -> Role:
        return Role.WORKER


Admission: TypeAlias = OpenAdmission | MembershipAdmission
"""This peer's ``membership``, and its rule at handshakes and, every few seconds, for links."""


class Account(msgspec.Struct, frozen=True):
    """An account of Hugging Face: a user and its organisations, or an organisation."""

    name: str
    type: str = "user"
    orgs: "tuple[Account, ...]" = ()


async def whoami(token: str) -> Account | None:
    """Return the user of a token, by the Hub's ``whoami-v2``; None if it is not known as a person's.

    The environment's ``HF_ENDPOINT`` replaces huggingface.co. A token that may only read is enough;
    it is not logged. Raises `PeerUnreachable` if no answer that can be decoded comes in 10 s.
    """
    if not _TOKEN.fullmatch(token):
        return None
    url = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/") + "/api/whoami-v2"
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10.0)) as session,
            session.get(url, headers={"Authorization": f"Bearer {token}"}, allow_redirects=False) as response,
        ):
            if response.status in (401, 403):
                return None
            require(
                response.status == 200,
                f"{url} answers {response.status} {response.reason}: try again later",
                PeerUnreachable,
            )
            data = b""
            async for piece in response.content.iter_any():
                data += piece
                require(len(data) <= MAX_ANSWER_BYTES, "the answer is too long")
            account = msgspec.json.decode(data, type=Account)
    except (aiohttp.ClientError, ValueError, TimeoutError, *UNDECODABLE) as error:
        raise PeerUnreachable(f"{url} does not answer ({type(error).__name__}): try again later") from error
    return account if account.type == "user" else None
