"""The authority of a run: signs invitations and memberships, and takes them back.

It is an ordinary peer whose key the invitations name. While it is away the swarm goes on: members are known by what
it has signed, and invitations of unlimited use admit newcomers without it. Only an invitation that is counted, and
a run that asks for names (`Allowlist`), need it when somebody joins.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from colab_swarm.errors import NotAdmitted, PeerError
from colab_swarm.net.huggingface import Account, whoami
from colab_swarm.net.identity import Identity, id_of
from colab_swarm.net.membership import (
    MAX_MEMBERSHIP_BYTES,
    MAX_NAME_CHARS,
    MAX_USES,
    SLACK_S,
    Grant,
    Membership,
    MembershipAdmission,
    in_words,
)
from colab_swarm.net.peers import Message, PeerId, Peers, Refusal, Role, short

Shown = Annotated[bytes, msgspec.Meta(max_length=MAX_MEMBERSHIP_BYTES)]


class RequestMembership(Message, frozen=True):
    """To the authority: give me a membership, or a fresh one.

    Attributes:
        proof: a membership of mine: under an invitation's grant, or an earlier one by the authority.
        token: of my Hugging Face account, where the run asks for one.
    """

    proof: Shown
    token: Annotated[str, msgspec.Meta(max_length=512)] = ""

    def __repr__(self) -> str:
        return f"RequestMembership({len(self.proof)} bytes, {'a' if self.token else 'no'} token)"


class IssuedMembership(Message, frozen=True):
    """The authority's answer."""

    membership: Shown


class PresentMembership(Message, frozen=True):
    """To a linked peer: this is my membership from now on."""

    membership: Shown


class Presented(Message, frozen=True):
    """The role it gives at this peer."""

    role: Role


class ShareRevoked(Message, frozen=True):
    """Both ways: I know the authority's list of this version; here it is if I think that you do not."""

    version: int
    revocations: Annotated[bytes, msgspec.Meta(max_length=1 << 16)] = b""


class GrantUses(msgspec.Struct):
    """Hex ids of the peers that joined by an invitation, which ends at ``until``."""

    until: float
    peers: list[str]


class _Saved(msgspec.Struct):
    run_id: str
    used: dict[str, GrantUses] = msgspec.field(default_factory=dict)
    revocations: bytes = b""


class AuthorityBook:
    """The authority's memory; in a file if there is a ``path``, else only as long as the process."""

    def __init__(self, run_id: str, path: Path | None = None) -> None:
        self._path = path
        self._saved = _Saved(run_id)

    @classmethod
    def open(cls, key_file: str | Path, run_id: str) -> AuthorityBook:
        """The book beside the key file; a new one, of ``run_id``, if there is none.

        Raises:
            ValueError: the file beside it is no such book.
        """
        path = Path(f"{key_file}.authority")
        book = cls(run_id, path)
        try:
            book._saved = msgspec.json.decode(path.read_bytes(), type=_Saved)
        except FileNotFoundError:
            book._save()
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path} cannot be read ({error}); move it away to begin a new run") from error
        return book

    @property
    def run_id(self) -> str:
        """The run of this authority, the same after a restart."""
        return self._saved.run_id

    @property
    def revocations(self) -> bytes:
        """The encoded list last kept, or nothing."""
        return self._saved.revocations

    def keep_revocations(self, encoded: bytes) -> None:
        """Remember the newest list."""
        self._saved.revocations = encoded
        self._save()

    def use(self, grant: Grant, peer: PeerId, *, now: float) -> bool:
        """Count that a peer joins by a grant; returns False if it is used up. Coming again is free."""
        if not grant.uses:
            return True
        used = self._saved.used.setdefault(grant.key.hex(), GrantUses(grant.join_until, []))
        if peer.hex() not in used.peers:
            if len(used.peers) >= grant.uses:
                return False
            used.peers.append(peer.hex())
            ended = [key for key, one in self._saved.used.items() if one.until + SLACK_S < now]
            for key in ended:
                del self._saved.used[key]
            self._save()
        return True

    def _save(self) -> None:
        if self._path is None:
            return
        # written aside: a crash leaves the old book or the new one
        aside = self._path.with_name(f"{self._path.name}.new")
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(self._saved))
        aside.replace(self._path)


logger = logging.getLogger(__name__)

TOKENS_AT_ONCE = 8

Readmit = Callable[[PeerId, bytes], Role]


@dataclass(frozen=True)
class Allowlist:
    """Whom an authority admits by name: users of Hugging Face, and the members of organisations there."""

    users: tuple[str, ...] = ()
    organisations: tuple[str, ...] = ()

    def admits(self, account: Account) -> bool:
        """Whether this account is on the list; case does not matter."""
        organisations = {name.lower() for name in self.organisations}
        return account.name.lower() in {name.lower() for name in self.users} or any(
            name.lower() in organisations for name in account.organisations
        )


@dataclass(frozen=True)
class AuthoritySettings:
    """How an authority admits.

    Attributes:
        allowlist: whom it admits; None if an invitation suffices.
        member_s: life of a membership. Members renew theirs at half of it, so the authority may be away for the
            other half.
        grace_s: a membership that has ended can be renewed for so long.
        check_token: whose token it is, None if nobody's; raises PeerError if there is no telling now.
    """

    allowlist: Allowlist | None = None
    member_s: float = 7 * 24 * 3600.0
    grace_s: float = 7 * 24 * 3600.0
    check_token: Callable[[str], Awaitable[Account | None]] = whoami

    @classmethod
    def asking_for(cls, allowlist: Allowlist) -> AuthoritySettings:
        """Admit by name, for 4 hours at a time: whoever leaves the list is soon out."""
        return cls(allowlist, member_s=4 * 3600.0)


class Authority:
    """Answers those who ask for a membership. Its peer's key is the run's authority key.

    Attributes:
        allowlist: whom it admits; None if an invitation suffices.

    Args:
        peers: the network; its key must be the admission's ``authority``.
        admission: of this peer.
        book: its memory.
        settings: how it admits.
        readmit: gives a linked peer the role of a membership, see `Linker.readmit`.
    """

    def __init__(
        self,
        peers: Peers,
        admission: MembershipAdmission,
        book: AuthorityBook,
        settings: AuthoritySettings,
        readmit: Readmit,
    ) -> None:
        self._peers, self._admission, self._book = peers, admission, book
        self._settings, self._readmit = settings, readmit
        self.allowlist = settings.allowlist
        self._tokens = asyncio.Semaphore(TOKENS_AT_ONCE)
        self._asking: set[PeerId] = set()
        if book.revocations:
            admission.learn(book.revocations)
        peers.serve(RequestMembership, self._on_request, role=Role.GUEST)

    def close(self) -> None:
        """Answer nobody any more."""
        self._peers.unserve(RequestMembership)

    def grant(self, role: Role, *, hours: float, uses: int = 0) -> tuple[Grant, bytes]:
        """What an invitation needs: the grant, and the secret seed of its key.

        Args:
            role: of those who join by it.
            hours: for how long one may join by it.
            uses: how many may, 0 for any number.

        Raises:
            ValueError: the figures make no sense.
        """
        if not (0 < hours < 1e6 and 0 <= uses <= MAX_USES):
            raise ValueError(
                f"hours={hours}, uses={uses}: give some hours, and 1 to {MAX_USES:,} uses or 0 for any"
            )
        secret, join_until = os.urandom(32), self._peers.time() + 3600 * hours
        offline = self.allowlist is None and not uses
        member_until = join_until + self._settings.member_s
        key = Identity(secret).public_key
        grant = Grant(self._admission.run_id, role, key, join_until, member_until, uses, offline)
        return grant.signed(self._peers.sign), secret

    def revoke(self, subject: PeerId) -> None:
        """Put out a peer, or the key of an invitation with all who are in by it alone.

        `RevocationWatch.spread` tells the others.

        Raises:
            ValueError: this is the authority itself.
        """
        if subject == self._peers.id:
            raise ValueError("this is the authority itself; to end the run, leave it")
        revocations = self._admission.revoked.adding(subject, now=self._peers.time(), sign=self._peers.sign)
        self._admission.learn(revocations.encode())
        self._book.keep_revocations(revocations.encode())

    # --- admitting --------------------------------------------------------------------------------------------

    async def _on_request(self, peer: PeerId, message: RequestMembership) -> IssuedMembership:
        if peer in self._asking:
            raise Refusal("your last request is still being answered: wait for it")
        self._asking.add(peer)
        try:
            return await self._answer(peer, message)
        finally:
            self._asking.discard(peer)

    async def _answer(self, peer: PeerId, message: RequestMembership) -> IssuedMembership:
        proof = self._proof_of(peer, message.proof)
        name = proof.name if self.allowlist is None else await self._name_of(message.token, self.allowlist)
        now = self._peers.time()
        if proof.grant is not None and not self._book.use(proof.grant, peer, now=now):
            count = proof.grant.uses
            raise self._refusal(
                f"peer {short(peer)}",
                f"this invitation was for {count} {'peer' if count == 1 else 'peers'}, who have come",
                "ask for an invitation of your own",
            )
        end = now + self._settings.member_s
        unsigned = Membership(proof.run_id, proof.role, proof.key, name[:MAX_NAME_CHARS], now, end)
        membership = unsigned.signed(self._peers.sign).encode()
        self._readmit(peer, membership)
        logger.info("%s %s is a %s until %.0f", short(peer), name, proof.role.name.lower(), end)
        return IssuedMembership(membership)

    def _proof_of(self, peer: PeerId, shown: bytes) -> Membership:
        """What lets the peer have a membership: an invitation, or an earlier membership.

        Raises:
            Refusal: it has neither.
        """
        try:
            proof = Membership.decode(shown)
            if id_of(proof.key) != peer:
                raise NotAdmitted("what it shows is another peer's")
            self._admission.inspect(proof.key, shown)
            grant = proof.grant
            if grant is None:
                until = proof.expires_at + self._settings.grace_s
            else:
                until = proof.expires_at if grant.offline else grant.join_until
            late_s = self._peers.time() - until
            if late_s > SLACK_S:
                raise NotAdmitted(f"what it shows ended {in_words(late_s)} ago")
        except NotAdmitted as error:
            raise self._refusal(
                f"peer {short(peer)}", str(error), "join again with a new invitation"
            ) from None
        return proof

    async def _name_of(self, token: str, allowlist: Allowlist) -> str:
        """The user whose token it is, if the list admits it.

        Raises:
            Refusal: it does not, or the token is nobody's, or there is no telling now.
        """
        tokens = "https://huggingface.co/settings/tokens"
        if not token:
            why, do = "it asks for a Hugging Face account, and you gave no token", f"make one at {tokens}"
            raise self._refusal("a peer without a name", why, f"{do} that may only read, and set HF_TOKEN")
        try:
            async with self._tokens:
                account = await self._settings.check_token(token)
        except PeerError as error:
            raise self._refusal("your token", str(error), "try again in a minute") from None
        if account is None:
            why = "Hugging Face does not know this token, or it is no person's"
            raise self._refusal("your token", why, f"copy it again, or make a new one at {tokens}")
        if not allowlist.admits(account):
            do = "join as a user who is on it"
            if allowlist.organisations:
                do += f", or join {' or '.join(allowlist.organisations)} at https://huggingface.co"
            raise self._refusal(f"{account.name} of Hugging Face", "not on the list of this run", do)
        return account.name

    def _refusal(self, who: str, why: str, do: str) -> Refusal:
        """Four lines for the person who wants in."""
        run, me = self._admission.run_id.rpartition("-")[0], short(self._peers.id)
        return Refusal(
            f"{run} does not admit {who}\nwhy: {why}\nwhat to do: {do}\nwhom to ask: the organizer (peer {me})"
        )
