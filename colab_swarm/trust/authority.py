"""The authority of a run: signs invitations and memberships, and revokes them.

The authority is an ordinary peer whose key the invitations name. The swarm continues while it is
away: its signatures prove memberships, and invitations of unlimited use admit peers without it. It
must be online only for counted invitations, and for runs with an `Allowlist`.
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
from colab_swarm.net.identity import Identity, id_of
from colab_swarm.net.membership import (
    MAX_MEMBERSHIP_BYTES,
    MAX_NAME_CHARS,
    MAX_USES,
    SLACK_S,
    Account,
    Grant,
    Membership,
    MembershipAdmission,
    in_words,
    whoami,
)
from colab_swarm.net.peers import Message, PeerId, Peers, Refusal, Role, short

logger = logging.getLogger(__name__)
TOKENS_AT_ONCE = 8
Readmit = Callable[[PeerId, bytes], Role]
Shown = Annotated[bytes, msgspec.Meta(max_length=MAX_MEMBERSHIP_BYTES)]


class RequestMembership(Message, frozen=True):
    """To the authority: request a membership, or a renewed one.

    ``proof`` is a membership of the sender: under an invitation's grant, or an earlier one by the authority. ``token``
    is of its Hugging Face account, where the run requires one.
    """

    proof: Shown
    token: Annotated[str, msgspec.Meta(max_length=512)] = ""

    def __repr__(self) -> str:
        return f"RequestMembership({len(self.proof)} bytes, {'a' if self.token else 'no'} token)"


class IssuedMembership(Message, frozen=True):
    """The authority's answer."""

    membership: Shown


class PresentMembership(Message, frozen=True):
    """To a linked peer: the sender's renewed membership."""

    membership: Shown


class Presented(Message, frozen=True):
    """The role that the membership gives at the answering peer."""

    role: Role


class ShareRevoked(Message, frozen=True):
    """Both ways: the version of the authority's list that the sender has, and the list if the receiver may lack it."""

    version: int
    revocations: Annotated[bytes, msgspec.Meta(max_length=1 << 16)] = b""


class GrantUses(msgspec.Struct):
    """Hex ids of the peers that joined with an invitation, which ends at ``until``."""

    until: float
    peers: list[str]


class _Saved(msgspec.Struct):
    run_id: str
    used: dict[str, GrantUses] = msgspec.field(default_factory=dict)
    revocations: bytes = b""


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, completely or not at all."""
    aside = path.with_name(f"{path.name}.new")
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


class AuthorityBook:
    """The authority's memory, saved in a file beside the key file; lost with the process without one.

    Raises:
        ValueError: the file exists and cannot be read.
    """

    def __init__(self, run_id: str, key_file: str | Path | None = None) -> None:
        self._path = None if key_file is None else Path(f"{key_file}.authority")
        self._saved = _Saved(run_id)
        if self._path is not None:
            try:
                self._saved = msgspec.json.decode(self._path.read_bytes(), type=_Saved)
            except FileNotFoundError:
                self._save()
            except msgspec.MsgspecError as error:
                text = f"{self._path} cannot be read ({error}); move it away to create a new run"
                raise ValueError(text) from error
        self.run_id = self._saved.run_id  # the same after a restart

    @property
    def revocations(self) -> bytes:
        """The newest encoded list, or nothing."""
        return self._saved.revocations

    @revocations.setter
    def revocations(self, encoded: bytes) -> None:
        self._saved.revocations = encoded
        self._save()

    def use(self, grant: Grant, peer: PeerId, *, now: float) -> bool:
        """Count that a peer joins with a grant; return False if it is used up. A peer may join again for free."""
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
        if self._path is not None:
            write_private(self._path, msgspec.json.encode(self._saved))


@dataclass(frozen=True)
class Allowlist:
    """Accounts of Hugging Face that an authority admits: users, and members of organisations."""

    users: tuple[str, ...] = ()
    organisations: tuple[str, ...] = ()

    def admits(self, account: Account) -> bool:
        """Return True if the account is on the list; case does not matter."""
        organisations = {name.lower() for name in self.organisations}
        return account.name.lower() in {name.lower() for name in self.users} or any(
            one.name.lower() in organisations for one in account.orgs
        )


@dataclass(frozen=True)
class AuthoritySettings:
    """How an authority admits.

    Attributes:
        allowlist: accounts that it admits; None if an invitation suffices.
        member_s: life of a membership, 4 hours with an allowlist. Members renew theirs at half of
            it, so the authority may be away for the other half.
        grace_s: how long an ended membership can be renewed.
        check_token: returns the account of a token, None if it has none; raises PeerError if that is unknown now.
    """

    allowlist: Allowlist | None = None
    member_s: float = 7 * 24 * 3600.0
    grace_s: float = 7 * 24 * 3600.0
    check_token: Callable[[str], Awaitable[Account | None]] = whoami


class Authority:
    """Issues memberships. Its peer's key is the run's authority key.

    Args:
        peers: the network; its key must be the admission's ``authority``.
        readmit: gives a linked peer the role of a membership, see `Linker.readmit`.

    Attributes:
        allowlist: accounts that it admits; None if an invitation suffices.
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
        """Stop answering requests."""
        self._peers.unserve(RequestMembership)

    def grant(self, role: Role, *, hours: float, uses: int = 0) -> tuple[Grant, bytes]:
        """Return the grant of a new invitation, for ``hours`` and so many ``uses`` (0: any), and its key's secret seed.

        Raises:
            ValueError: hours or uses are out of range.
        """
        if not (0 < hours < 1e6 and 0 <= uses <= MAX_USES):
            rule = f"hours must be above 0, uses 1 to {MAX_USES:,} or 0 for any number"
            raise ValueError(f"hours={hours}, uses={uses}: {rule}")
        secret, join_until = os.urandom(32), self._peers.time() + 3600 * hours
        offline = self.allowlist is None and not uses
        member_until = join_until + self._settings.member_s
        key = Identity(secret).public_key
        grant = Grant(self._admission.run_id, role, key, join_until, member_until, uses, offline)
        return grant.signed(self._peers.sign), secret

    def revoke(self, subject: PeerId) -> None:
        """Revoke a peer, or the key of an invitation with all peers that only the invitation admits.

        `RevocationWatch.spread` sends the list to the others. Raises `ValueError` for the authority itself.
        """
        if subject == self._peers.id:
            raise ValueError("this is the authority itself; to end the run, leave it")
        revocations = self._admission.revoked.adding(subject, now=self._peers.time(), sign=self._peers.sign)
        self._admission.learn(revocations.encode())
        self._book.revocations = revocations.encode()

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
            count = f"{proof.grant.uses} {'peer' if proof.grant.uses == 1 else 'peers'}"
            why = f"this invitation was for {count}, and all have joined"
            raise self._refusal(f"peer {short(peer)}", why, "ask for an invitation of your own")
        end = now + self._settings.member_s
        unsigned = Membership(proof.run_id, proof.role, proof.key, name[:MAX_NAME_CHARS], now, end)
        membership = unsigned.signed(self._peers.sign).encode()
        self._readmit(peer, membership)
        logger.info("%s %s is a %s until %.0f", short(peer), name, proof.role.name.lower(), end)
        return IssuedMembership(membership)

    def _proof_of(self, peer: PeerId, shown: bytes) -> Membership:
        """Return what entitles the peer to a membership: one under an invitation's grant, or an earlier one."""
        try:
            proof = Membership.decode(shown)
            if id_of(proof.key) != peer:
                raise NotAdmitted("it shows the membership of another peer")
            self._admission.inspect(proof.key, shown)
            grant = proof.grant
            if grant is None:
                until = proof.expires_at + self._settings.grace_s
            else:
                until = proof.expires_at if grant.offline else grant.join_until
            late_s = self._peers.time() - until
            if late_s > SLACK_S:
                raise NotAdmitted(f"the membership it shows ended {in_words(late_s)} ago")
        except NotAdmitted as error:
            do = "join again with a new invitation"
            raise self._refusal(f"peer {short(peer)}", str(error), do) from None
        return proof

    async def _name_of(self, token: str, allowlist: Allowlist) -> str:
        """Return the token's user, if the list admits it; raise `Refusal` otherwise."""
        tokens = "https://huggingface.co/settings/tokens"
        if not token:
            why, do = "it requires a Hugging Face account, and you gave no token", f"make one at {tokens}"
            raise self._refusal("a peer without a name", why, f"{do} that may only read, and set HF_TOKEN")
        try:
            async with self._tokens:
                account = await self._settings.check_token(token)
        except PeerError as error:
            raise self._refusal("your token", str(error), "try again in a minute") from None
        if account is None:
            why = "Hugging Face does not know this token, or it belongs to no person"
            raise self._refusal("your token", why, f"copy it again, or make a new one at {tokens}")
        if not allowlist.admits(account):
            do = "join as a user who is on it"
            if allowlist.organisations:
                do += f", or join {' or '.join(allowlist.organisations)} at https://huggingface.co"
            raise self._refusal(f"{account.name} of Hugging Face", "not on the list of this run", do)
        return account.name

    def _refusal(self, who: str, why: str, do: str) -> Refusal:
        """Four lines for the person who wants to join."""
        run, me = self._admission.run_id.rpartition("-")[0], short(self._peers.id)
        return Refusal(
            f"{run} does not admit {who}\nwhy: {why}\nwhat to do: {do}\nwhom to ask: the organizer (peer {me})"
        )
