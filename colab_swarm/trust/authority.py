"""The authority of a run: an ordinary peer that signs invitations and memberships, and revokes them."""

import asyncio
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from colab_swarm.errors import NotAdmitted, PeerError, require
from colab_swarm.files import write_file
from colab_swarm.markup import count
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
    Sign,
    in_words,
    whoami,
)
from colab_swarm.net.node import Node
from colab_swarm.net.peers import Message, PeerId, Refusal, Role, short

logger = logging.getLogger(__name__)
MEMBER_S = 7 * 24 * 3600.0
LISTED_MEMBER_S = 4 * 3600.0
GRACE_S = 7 * 24 * 3600.0  # how long after its end a membership can still be renewed
EncodedMembership = Annotated[bytes, msgspec.Meta(max_length=MAX_MEMBERSHIP_BYTES)]


class RequestMembership(Message, frozen=True):
    """Asks the authority for a membership.

    ``proof`` is a membership that the peer signed with its invitation's key, or an earlier membership. ``token`` is a
    Hugging Face token.
    """

    proof: EncodedMembership
    token: Annotated[str, msgspec.Meta(max_length=512)] = ""

    def __repr__(self) -> str:
        return f"RequestMembership({len(self.proof)} bytes, {'a' if self.token else 'no'} token)"


class IssuedMembership(Message, frozen=True):
    """The authority's answer. A peer also sends its renewed membership to linked peers, and they answer `Ack`."""

    membership: EncodedMembership


class ShareRevoked(Message, frozen=True):
    """Call and answer: the version of the sender's revocation list, and the list if the receiver may lack it."""

    version: int
    revocations: Annotated[bytes, msgspec.Meta(max_length=1 << 16)] = b""


class AuthorityBook(msgspec.Struct):
    """The authority's stored records: the uses of invitations, and the newest encoded list of revocations."""

    run_id: str
    used: dict[str, tuple[float, list[str]]] = {}  # by an invitation's key: its end, and its users
    revocations: bytes = b""
    path: str = ""  # path of the book's file, next to the key file; empty without a key file

    @classmethod
    def of(cls, run_id: str, key_file: str | Path | None = None) -> "AuthorityBook":
        """Return the book next to the key file, or a new book of ``run_id``; raise ValueError if it is damaged."""
        path = "" if key_file is None else f"{key_file}.authority"
        book = cls(run_id, path=path)
        try:
            if path:
                book = msgspec.json.decode(Path(path).read_bytes(), type=cls)
                book.path = path  # the user may have moved the files
        except FileNotFoundError:
            book.save()
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path} cannot be read ({error}); move it away to create a new run") from error
        return book

    def save(self) -> None:
        if self.path:
            write_file(Path(self.path), [msgspec.json.encode(self)], sync=True, private=True)

    def use(self, grant: Grant, peer: PeerId, *, now: float) -> bool:
        """Count a peer that joins with a grant; return False if the grant is used up.

        A peer that joins again does not count again.
        """
        if not grant.uses:
            return True
        _, peers = self.used.setdefault(grant.key.hex(), (grant.join_until, []))
        if peer.hex() not in peers:
            if len(peers) >= grant.uses:
                return False
            peers.append(peer.hex())
            self.used = {key: use for key, use in self.used.items() if use[0] + SLACK_S >= now}
            self.save()
        return True


@dataclass(frozen=True)
class Allowlist:
    """Hugging Face accounts that an authority admits: the named users, and members of the named organisations."""

    users: tuple[str, ...] = ()
    organisations: tuple[str, ...] = ()

    def admits(self, account: Account) -> bool:
        listed = {name.lower() for name in self.organisations}
        theirs = {organisation.name.lower() for organisation in account.orgs}
        return account.name.lower() in map(str.lower, self.users) or not listed.isdisjoint(theirs)


def make_grant(
    run_id: str, role: Role, sign: Sign, *, join_until: float, allow: Allowlist | None, uses: int = 0
) -> tuple[Grant, bytes]:
    secret = os.urandom(32)
    offline = allow is None and not uses
    key = Identity(secret).public_key
    member_until = join_until + member_s(allow)
    return Grant(run_id, role, key, join_until, member_until, uses, offline).signed(sign), secret


def member_s(allow: Allowlist | None) -> float:
    """Return how long a membership lasts, in seconds.

    With an allowlist it is short, so an account that you take off the list soon loses its membership.
    """
    return MEMBER_S if allow is None else LISTED_MEMBER_S


@dataclass
class Authority:
    """Issues memberships, and signs the list of revocations. With ``allow``, only listed accounts get a membership."""

    peers: Node
    admission: MembershipAdmission
    book: AuthorityBook
    allow: Allowlist | None

    def __post_init__(self) -> None:
        self._tokens = asyncio.Semaphore(8)
        self._asking: set[PeerId] = set()
        if self.book.revocations:
            self.admission.learn(self.book.revocations)
        self.peers.serve(RequestMembership, self._on_request, role=Role.GUEST)

    def grant(self, role: Role, *, hours: float, uses: int = 0) -> tuple[Grant, bytes]:
        """Return the grant of a new invitation and the seed of the invitation's key.

        ``uses`` is how many peers may join, or 0 for any number. Raises `ValueError` if ``uses`` is out of range.
        """
        require(0 <= uses <= MAX_USES, f"uses={uses}: it is 1 to {MAX_USES:,}, or 0 for any number")
        until = self.peers.time() + 3600 * hours
        run_id = self.admission.run_id
        return make_grant(run_id, role, self.peers.sign, join_until=until, allow=self.allow, uses=uses)

    def revoke(self, subject: PeerId) -> None:
        """Revoke a peer, or an invitation's key together with all peers that only this key admits.

        Raises `ValueError` if ``subject`` is this peer itself.
        """
        require(subject != self.peers.id, "this is the authority itself; to end the run, leave it")
        revocations = self.admission.revoked.adding(subject, now=self.peers.time(), sign=self.peers.sign)
        self.book.revocations = revocations.encode()
        self.admission.learn(self.book.revocations)
        self.book.save()

    async def _on_request(self, peer: PeerId, message: RequestMembership) -> IssuedMembership:
        require(peer not in self._asking, "your last request is still being answered: wait for it", Refusal)
        self._asking.add(peer)
        try:
            proof = self._proof_of(peer, message.proof)
            if self.allow is None:
                name = proof.name
            else:
                name = await self._name_of(message.token, self.allow)
        finally:
            self._asking.discard(peer)
        now = self.peers.time()
        if proof.grant is not None and not self.book.use(proof.grant, peer, now=now):
            why = f"this invitation was for {count(proof.grant.uses, 'peer')}, and all have joined"
            raise self._refusal(f"peer {short(peer)}", why, "ask for an invitation of your own")
        end = now + member_s(self.allow)
        membership = Membership(
            proof.run_id,
            proof.role,
            proof.key,
            name[:MAX_NAME_CHARS],
            issued_at=now,
            expires_at=end,
            invited_by=proof.invited_by if proof.grant is None else proof.grant.key,
        )
        encoded = membership.signed(self.peers.sign).encode()
        self.peers.readmit(peer, encoded)
        logger.info("%s %s is a %s until %.0f", short(peer), name, proof.role.name.lower(), end)
        return IssuedMembership(encoded)

    def _proof_of(self, peer: PeerId, encoded: bytes) -> Membership:
        try:
            proof = Membership.decode(encoded)
            require(id_of(proof.key) == peer, "it shows the membership of another peer", NotAdmitted)
            self.admission.inspect(proof.key, encoded)
            now = self.peers.time()
            self.admission.require_met(proof, now=now)
            late_s = now - proof.expires_at - (GRACE_S if proof.grant is None else 0.0)
            require(late_s <= SLACK_S, f"the membership it shows ended {in_words(late_s)} ago", NotAdmitted)
        except NotAdmitted as error:
            raise self._refusal(f"peer {short(peer)}", str(error), "ask for a new invitation") from None
        return proof

    async def _name_of(self, token: str, allowlist: Allowlist) -> str:
        tokens = "https://huggingface.co/settings/tokens"
        if not token:
            why = "it requires a Hugging Face account, and you gave no token"
            do = f"make one at {tokens}"
            raise self._refusal(
                "a peer without a name",
                why,
                f"{do} that may only read, set HF_TOKEN, and add send_hf_token=True",
            )
        try:
            async with self._tokens:
                account = await whoami(token)
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
        run = self.admission.run_id.rpartition("-")[0]
        me = f"the organizer (peer {short(self.peers.id)})"
        return Refusal(f"{run} does not admit {who}\nwhy: {why}\nwhat to do: {do}\nwhom to ask: {me}")
