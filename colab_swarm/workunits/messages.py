"""Messages between a volunteer and the coordinator over HTTP; README.md lists them.

Each request has a header ``Authorization: Swarm1 BASE64URL`` with a `SignedRequest`. The 1 is the protocol's version. A
link is the coordinator's address and, after ``#``, the content of an invitation: ``https://example.org/#NAME.PAYLOAD``.
In a browser, the link opens the status page. A browser never sends the part after ``#`` to the server.
"""

import asyncio
import base64
import math
import os
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from hashlib import sha256
from typing import Annotated, TypeAlias

import msgspec

from colab_swarm.errors import InviteError, NotAdmitted, require
from colab_swarm.invite import Invite
from colab_swarm.net.identity import Identity, id_of
from colab_swarm.net.membership import (
    MAX_MEMBERSHIP_BYTES,
    Key,
    Membership,
    MembershipAdmission,
    Moment,
    Signed,
)
from colab_swarm.net.node import Node
from colab_swarm.net.peers import UNDECODABLE, Message, PeerId, Role
from colab_swarm.project import update

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
MAX_CODE_CHARACTERS = 1 << 20
MAX_BODY_BYTES = 64 << 10
"""Most bytes of a request that is not an upload."""
PACKED = "application/zstd"
"""Media type of compressed parameters. The coordinator sends them to a volunteer that accepts this type."""
MAX_UNITS = 64
Digest: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
AssignmentId: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]


class Subset(Message, frozen=True):
    """One file of the job's data: its SHA-256, size in bytes, and number of samples."""

    sha256: Digest
    size_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
    rows: int


class JobCard(Signed, frozen=True):
    """A job as volunteers see it, with its coordinator's key and membership. The coordinator signs the card."""

    run_id: str
    name: Annotated[str, msgspec.Meta(pattern=rf"^{NAME.pattern}\Z")]  # part of a path
    key: bytes
    membership: bytes
    code: Annotated[str, msgspec.Meta(max_length=MAX_CODE_CHARACTERS)]  # of the job's file; empty: none
    local_epochs: Annotated[int, msgspec.Meta(ge=1)]
    batch_size: Annotated[int, msgspec.Meta(ge=1)]
    schema: bytes  # `Schema.head` of the model
    subsets: tuple[Subset, ...]


class Resources(Message, frozen=True):
    """The resources that a machine has or a job needs: CPU cores, memory and GPU memory in GB (1e9 bytes)."""

    cpu_cores: int = 0
    memory_gb: float = 0.0
    gpu_memory_gb: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            amount = getattr(self, name)
            valid = isinstance(amount, int | float) and 0 <= amount < math.inf
            require(valid, f"{name}={amount!r}: it must be a number, 0 at least")

    def lacks(self, needs: "Resources") -> str:
        """Return a text with the ``needs`` that these resources do not fulfil, or an empty text."""
        units = {"cpu_cores": "CPU cores", "memory_gb": "GB of memory", "gpu_memory_gb": "GB of GPU memory"}
        words = []
        for name, unit in units.items():
            least = getattr(needs, name)
            if getattr(self, name) < least:
                words.append(f"{least:g} {unit} (your machine has {getattr(self, name):.4g})")
        return " and ".join(words)


NOTHING = Resources()


class AskForUnit(Message, frozen=True):
    """Request a unit, or return all units untrained and leave."""

    name: Annotated[str, msgspec.Meta(max_length=64)] = ""  # of the volunteer, for people
    # assignments that the volunteer has; if its list lacks one, that answer was lost, and the coordinator repeats it
    in_hand: Annotated[tuple[AssignmentId, ...], msgspec.Meta(max_length=MAX_UNITS)] = ()
    resources: Resources = NOTHING  # of its machine
    leaves: bool = False


class GivenUnit(Message, frozen=True):
    """Train the parameters at ``parameters`` (a path below /api) on the subset ``data`` within ``deadline_s``."""

    assignment: AssignmentId
    epoch: int
    subset: int
    data: Digest
    parameters: str
    deadline_s: float
    seed: int


class UnitAnswer(Message, frozen=True):
    """A unit to train. If there is no unit, ask again after ``wait_s`` seconds, or stop if ``finished``.

    ``epoch`` is the current epoch of the job, and ``accuracy`` the accuracy of the previous epoch. ``unfit`` says why
    this machine never gets units of this job.
    """

    unit: GivenUnit | None = None
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.0
    finished: bool = False
    epoch: int = 0
    accuracy: float | None = None
    unfit: str = ""


class Taken(Message, frozen=True):
    """The result of ``assignment`` is complete, valid and accepted."""

    assignment: AssignmentId


class Problem(Message, frozen=True):
    """Why the coordinator refused a request: a text that says what to do, and a code.

    The code is ``token``, ``banned``, ``unknown``, ``stale``, ``surplus``, ``invalid``, ``size`` or ``busy``.
    ``surplus`` means that enough results of the unit came earlier. This is no fault of the volunteer.
    """

    code: str
    text: str


async def waited(event: Awaitable[object], seconds: float | None) -> None:
    """Wait for ``event`` at most ``seconds``, then cancel it."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event


VERSION = 1
"""Version of the requests."""
SCHEME = f"Swarm{VERSION}"
FRESH_S = 60.0
"""How long a request is valid. The coordinator remembers the request's nonce for twice this time."""
MAX_NONCES = 200_000
"""Most nonces that the coordinator remembers, and so the most requests in two minutes."""


class SignedRequest(Signed, frozen=True):
    """Content of the header: the peer's key, its membership (empty in an open run), and the request's data.

    ``target`` is the path with its query, ``digest`` is the SHA-256 of the body, and ``at`` is the time in seconds
    since the epoch (1970).
    """

    key: Key
    membership: Annotated[bytes, msgspec.Meta(max_length=MAX_MEMBERSHIP_BYTES)]
    method: Annotated[str, msgspec.Meta(max_length=8)]
    target: Annotated[str, msgspec.Meta(max_length=256)]
    digest: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    nonce: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    at: Moment


class Token:
    """Signs a peer's requests with its key. ``membership`` returns the newest membership, empty in an open run."""

    def __init__(self, identity: Identity | Node, membership: Callable[[], bytes] = bytes) -> None:
        self.identity = identity
        self.membership = membership

    def header(self, method: str, target: str, body: bytes = b"", *, now: float) -> str:
        """Return the header's value. ``now`` is the coordinator's clock, in seconds since the epoch (1970)."""
        request = SignedRequest(
            self.identity.public_key,
            self.membership(),
            method,
            target,
            sha256(body).digest(),
            os.urandom(16),
            now,
        )
        data = request.signed(self.identity.sign).encode()
        return f"{SCHEME} {base64.urlsafe_b64encode(data).decode()}"


class RequestGate:
    """Admits requests according to the run's ``admission``, which is None in an open run."""

    def __init__(self, admission: MembershipAdmission | None) -> None:
        self._admission = admission
        self._seen: dict[bytes, float] = {}  # when each nonce came, the oldest first

    def check(self, header: str, method: str, target: str, *, now: float) -> tuple[PeerId, bytes]:
        """Return the peer that signed a request, and the signed digest of its body; raise NotAdmitted if refused."""
        request = _decoded(header)
        require(request.is_signed_by(request.key), "the request's signature is wrong", NotAdmitted)
        text = "the request was signed for another path or method"
        require((request.method, request.target) == (method, target), text, NotAdmitted)
        off_s = abs(now - request.at)
        if off_s > FRESH_S:
            raise NotAdmitted(f"your clock is {off_s:.0f} s off: set your clock")
        if self._admission is not None:
            role = self._admission.verify(request.key, request.membership, now=now)
            if role < Role.AUTHORITY:
                self._admission.require_met(self._admission.inspect(request.key, request.membership), now=now)
            if role < Role.WORKER:
                raise NotAdmitted(f"you joined as a {role.name.lower()}: ask for an invitation as worker")
        self._remember(request.nonce, now)
        return id_of(request.key), request.digest

    def _remember(self, nonce: bytes, now: float) -> None:
        """Remember a nonce; raise NotAdmitted if it was used before, or if too many requests are valid now."""
        while self._seen and now - next(iter(self._seen.values())) > 2 * FRESH_S:
            del self._seen[next(iter(self._seen))]
        require(nonce not in self._seen, "this request was sent before", NotAdmitted)
        if len(self._seen) >= MAX_NONCES:
            raise NotAdmitted("too many requests in a minute: try again later", reason="busy")
        self._seen[nonce] = now


def _decoded(header: str) -> SignedRequest:
    scheme, _, token = header.partition(" ")
    version = re.fullmatch("Swarm([0-9]{1,3})", scheme)
    if version is not None and int(version[1]) < VERSION:
        raise NotAdmitted(f"your colab-swarm is older than the coordinator's: {update()}, and restart")
    if version is not None and int(version[1]) > VERSION:
        raise NotAdmitted("the coordinator's colab-swarm is older than yours: ask its organizer to update it")
    text = "no token: use the link that the coordinator prints, in cs.workunits.volunteer(link)"
    require(scheme == SCHEME and len(header) <= 4 * MAX_MEMBERSHIP_BYTES, text, NotAdmitted)
    try:
        encoded = base64.b64decode(token, altchars=b"-_", validate=True)
        return msgspec.msgpack.decode(encoded, type=SignedRequest)
    except (ValueError, *UNDECODABLE) as error:
        raise NotAdmitted(f"the token cannot be read: {update()}") from error


def parse_link(text: str) -> tuple[str, Invite]:
    """Return the address and the invitation of a link.

    Raises InviteError if the text is no link, or the link is mistyped, tampered with or expired.
    """
    url = text.strip().strip("'\"").partition("#")[0]
    problem = "this invites to a swarm: swarm = cs.join(link), then swarm.work.volunteer()"
    require(not url.startswith("swarm://") and not url.endswith("/join"), problem, InviteError)
    if not url.startswith(("http://", "https://")) or "#" not in text:
        raise InviteError("this is no link to a coordinator: it looks like https://HOST/#NAME.PAYLOAD")
    return url, Invite.parse(text)


def token_by(invite: Invite, identity: Identity) -> Token:
    """Return a token that signs with ``identity``; raise InviteError if the organizer must admit each peer."""
    grant = invite.grant
    if grant is None:
        return Token(identity)
    text = "the organizer admits each peer: cs.join(invitation), then swarm.work.volunteer()"
    require(grant.offline, text, InviteError)
    membership = Membership.by_invitation(grant, invite.key, key=identity.public_key, now=time.time())
    return Token(identity, membership.encode)
