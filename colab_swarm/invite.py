"""Invitations: one line of text with everything a new peer needs to find the swarm and to be admitted.

    swarm://NAME.PAYLOAD
    https://HOST/join#NAME.PAYLOAD    where a backbone has a page for browsers

A browser never sends the part after ``#`` to a web server. NAME is for people; PAYLOAD is base64url of a
version byte, msgpack and a checksum. Unless the run is open, an invitation has its own key pair. The authority
signs the invitation's public key and rights (`Grant`). The invitation contains its secret key, which signs the
other fields. So an invited peer can pass the invitation on with other entries (the peers to dial), but not with
more rights. The authority also signs the address of a mailbox, because that address can open a folder on the
guest's machine. An open run has no authority. There the run's creator signs the address, and the id of an open run
with a mailbox ends in digits of the creator's id.
"""

import base64
import contextlib
import hashlib
import re
import time
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from colab_swarm.errors import InviteError, require
from colab_swarm.net.addresses import only_local
from colab_swarm.net.identity import Identity, id_of
from colab_swarm.net.membership import MAX_USES, Grant, Moment, RunId, Signed, in_words
from colab_swarm.net.peers import UNDECODABLE, Contact, Role
from colab_swarm.project import update

VERSION = 1
CHECK_BYTES = 6
MAX_ENTRIES = 8
MAX_MAILBOX = 200  # characters of its address
CREATOR_HEX = 20  # digits of the creator's id in the id of an open run with a mailbox
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
ROLES = {"worker": Role.WORKER, "reducer": Role.REDUCER, "viewer": Role.VIEWER}
LOCAL_ONLY = (
    "Only peers in the same local network can use this invitation, because all its addresses are private: to invite "
    "others, open a tunnel (cs.NetworkOptions(tunnel='ngrok')), create the run on a machine with a public address "
    "(colab-swarm create), or start a relay on a machine that has one (colab-swarm relay)."
)
OF_A_NOTEBOOK = (
    "this is a link to a notebook, not an invitation: ask the creator of the run for the line that swarm.invite() "
    "gives"
)
_NOTEBOOK = re.compile(r"colab\.research\.google\.com|kaggle\.com|mybinder\.org|\.ipynb", re.IGNORECASE)
_FOREIGN = re.compile(r"[^A-Za-z0-9._-]")

Access: TypeAlias = Literal["open", "invite", "allowlist"]
Setting: TypeAlias = int | float | Annotated[str, msgspec.Meta(max_length=64)]
Settings: TypeAlias = Annotated[
    dict[Annotated[str, msgspec.Meta(max_length=32)], Setting], msgspec.Meta(max_length=16)
]

Page: TypeAlias = Annotated[str, msgspec.Meta(max_length=128, pattern=r"^(https://[A-Za-z0-9._:\[\]-]+)?\Z")]


class SignedMailbox(Signed, frozen=True):
    """Where the rounds of a run are, signed by its authority or, in an open run, by its creator."""

    run_id: RunId
    address: Annotated[str, msgspec.Meta(max_length=MAX_MAILBOX)]


def creator_suffix(public_key: bytes) -> str:
    """Return the end of the id of an open run with a mailbox, so that only the run's creator can sign its mailbox."""
    return id_of(public_key).hex()[:CREATOR_HEX]


class Invite(Signed, frozen=True):
    """The contents of an invitation. The text of an invitation holds a secret; its ``repr`` does not."""

    run_id: RunId  # the run's unique name; the part before the last ``-`` is its name for people
    entries: Annotated[tuple[Contact, ...], msgspec.Meta(max_length=MAX_ENTRIES)]  # peers to dial
    expires_at: Moment  # when joining ends, seconds since the epoch
    access: Access = "open"  # who may join
    # public key of the authority; in an open run with a mailbox, that of the run's creator
    authority: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    secret: Annotated[bytes, msgspec.Meta(max_length=32)] = b""  # of this invitation's own key
    role: Role = Role.WORKER  # of the peers that join with it
    member_until: Moment = 0.0  # when the memberships of these peers end, unless the authority renews them
    uses: Annotated[int, msgspec.Meta(ge=0, le=MAX_USES)] = 0  # how many peers may join; 0: any number
    grant_signature: Annotated[bytes, msgspec.Meta(max_length=64)] = b""  # by the authority
    settings: Settings = msgspec.field(default_factory=dict)  # for training
    # address of the bucket with the run's rounds; `mailbox_signature` is the signature of its `SignedMailbox`
    mailbox: Annotated[str, msgspec.Meta(max_length=MAX_MAILBOX)] = ""
    mailbox_signature: Annotated[bytes, msgspec.Meta(max_length=64)] = b""
    page: Page = ""  # ``https://HOST`` of a backbone whose ``/join`` shows a browser how to join; else empty

    @classmethod
    def issue(
        cls, grant: Grant, secret: bytes, entries: Iterable[Contact], *, access: Access, authority: bytes
    ) -> "Invite":
        """Make an invitation from ``grant``; the grant's key has the seed ``secret``, see `Authority.grant`."""
        rights = grant.role, grant.member_until, grant.uses, grant.signature
        unsigned = cls(grant.run_id, tuple(entries), grant.join_until, access, authority, secret, *rights)
        return unsigned.signed(unsigned.key.sign)

    @property
    def name(self) -> str:
        return self.run_id.rpartition("-")[0]

    @property
    def warning(self) -> str:
        """What to do if only peers in the local network can use the invitation; otherwise empty."""
        if only_local(self.entries) and not self.mailbox:
            return LOCAL_ONLY
        return ""

    @property
    def key(self) -> Identity:
        """The invitation's own key pair; none in an open run."""
        return Identity(self.secret)

    @property
    def grant(self) -> Grant | None:
        """What the authority allows with this invitation; None in an open run."""
        if self.access == "open":
            return None
        offline = self.access == "invite" and not self.uses
        key = self.key.public_key
        rights = self.expires_at, self.member_until, self.uses, offline
        return Grant(self.run_id, self.role, key, *rights, signature=self.grant_signature)

    def with_settings(self, settings: Mapping[str, Setting]) -> "Invite":
        """Return the invitation with these settings for training; raises ValueError if they do not fit."""
        try:
            checked = msgspec.convert(dict(settings), Settings)
        except msgspec.ValidationError as error:
            limits = "16 settings, names of up to 32 characters, and numbers or texts of up to 64"
            raise ValueError(f"an invitation carries at most {limits}: {error}") from None
        return self.replaced(settings=checked)

    def replaced(self, **fields: Any) -> "Invite":
        """Return the invitation with other ``entries`` or another ``page``; each peer that has it can do so."""
        changed = msgspec.structs.replace(self, **fields)
        if self.access == "open":
            return changed
        return changed.signed(self.key.sign)

    @property
    def code(self) -> str:
        """``NAME.PAYLOAD``: the invitation without ``swarm://`` or ``https://HOST/join#``."""
        body = bytes([VERSION]) + self.encode()
        payload = base64.urlsafe_b64encode(body + _check(body)).decode().rstrip("=")
        return f"{self.name}.{payload}"

    def __str__(self) -> str:
        return f"{self.page}/join#{self.code}" if self.page else f"swarm://{self.code}"

    def __repr__(self) -> str:
        return f"Invite({self.run_id}, {self.access}, {self.role.name.lower()}, {len(self.entries)} entries)"

    @classmethod
    def parse(cls, text: str, *, now: float | None = None) -> "Invite":
        """Read an invitation; quotes, spaces and line breaks from a chat program do not matter.

        Raises InviteError if it is mistyped, tampered with, expired or of another version.
        """
        body = _body_of(text)
        text = (
            f"this invitation is of version {body[0]}, this colab_swarm reads version {VERSION}: {update()}"
        )
        require(body[0] == VERSION, text, InviteError)
        try:
            invite = msgspec.msgpack.decode(body[1:], type=cls)
        except UNDECODABLE as error:
            raise InviteError("this invitation cannot be read: ask for a new one") from error
        require(invite._is_genuine(), "this invitation was tampered with: ask for a new one", InviteError)
        if now is None:
            now = time.time()
        late_s = now - invite.expires_at
        late = in_words(late_s)
        clock_time = time.strftime("%d %B %Y %H:%M UTC", time.gmtime(now))
        require(
            late_s <= 0,
            f"this invitation expired {late} ago, by the clock of this machine: ask for a new one. If it is new, the "
            f"clock here or the one of its creator is off by more than {late}: here it is {clock_time}",
            InviteError,
        )
        return invite

    def with_mailbox(self, address: str, authority: bytes, signature: bytes) -> "Invite":
        """Return the invitation with the mailbox that ``authority``, a public key, signed as a `SignedMailbox`."""
        return self.replaced(mailbox=address, authority=authority, mailbox_signature=signature)

    def _is_genuine(self) -> bool:
        if self.mailbox and not self._is_mailbox_signed():
            return False
        if self.access == "open":
            return self.secret == b"" and (self.authority == b"" or bool(self.mailbox))
        grant = self.grant if len(self.secret) == 32 else None
        signed = grant is not None and grant.is_signed_by(self.authority)
        return signed and self.is_signed_by(self.key.public_key)

    def _is_mailbox_signed(self) -> bool:
        if self.access == "open" and self.run_id.rpartition("-")[2] != creator_suffix(self.authority):
            return False
        signed = SignedMailbox(self.run_id, self.mailbox, signature=self.mailbox_signature)
        return signed.is_signed_by(self.authority)


def _body_of(text: str) -> bytes:
    """Return the version byte and the contents of an invitation, without a check of the signatures."""
    long = (
        f"this is not an invitation: {len(text):,} characters; paste only the line that swarm.invite() gives"
    )
    require(len(text) <= 8192, long, InviteError)
    payload = _FOREIGN.sub("", text.rpartition("#")[2]).rstrip(".").rpartition(".")[2]
    data = b""
    with contextlib.suppress(ValueError):
        data = base64.b64decode(payload + "=" * (-len(payload) % 4), altchars=b"-_", validate=True)
    body = data[:-CHECK_BYTES]
    check = data[-CHECK_BYTES:]
    cut_off = "this invitation is mistyped or cut off: copy the whole line again"
    if NAME.fullmatch(text.strip()):
        cut_off = (
            f"{text.strip()!r} is no invitation: pass the whole line that swarm.invite() gives, swarm://…"
        )
    wrong = OF_A_NOTEBOOK if _NOTEBOOK.search(text.partition("#")[0]) else cut_off
    require(body and check == _check(body), wrong, InviteError)
    return body


def _check(body: bytes) -> bytes:
    return hashlib.sha256(b"colab-swarm invite" + body).digest()[:CHECK_BYTES]
