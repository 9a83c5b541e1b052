"""Who sends a request: each carries the peer's membership, and a signature over what is asked for.

The header is ``Authorization: Swarm BASE64URL`` of a `SignedRequest`. It names the method, the path, the digest of
the body, a nonce and the time; the coordinator refuses what is older than a minute, or was seen before.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256
from typing import Annotated, Protocol

import msgspec

from colab_swarm.errors import NotAdmitted
from colab_swarm.net.identity import id_of
from colab_swarm.net.membership import MAX_MEMBERSHIP_BYTES, Key, MembershipAdmission, Moment, Signed
from colab_swarm.net.peers import UNDECODABLE, PeerId, Role

SCHEME = "Swarm "
MAX_HEADER_CHARACTERS = 4 * MAX_MEMBERSHIP_BYTES
FRESH_S = 60.0
MAX_NONCES = 200_000
"""Remembered for a minute; beyond that many requests a minute the rest are refused."""
NO_BODY = sha256(b"").digest()


class SignedRequest(Signed, frozen=True):
    """What the header holds.

    Attributes:
        key, membership: of the peer; no membership in an open run.
        method, target: of the request; the path with its query.
        digest: SHA-256 of the body.
        nonce, at: random, and seconds since the epoch.
    """

    key: Key
    membership: Annotated[bytes, msgspec.Meta(max_length=MAX_MEMBERSHIP_BYTES)]
    method: Annotated[str, msgspec.Meta(max_length=8)]
    target: Annotated[str, msgspec.Meta(max_length=256)]
    digest: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    nonce: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    at: Moment


_decoder = msgspec.msgpack.Decoder(SignedRequest)


class Signs(Protocol):
    """Whoever has a key: an `Identity`, or a peer of a swarm."""

    @property
    def id(self) -> PeerId: ...

    @property
    def public_key(self) -> bytes: ...

    def sign(self, data: bytes) -> bytes: ...


class Token:
    """What a peer signs its requests with. Its repr holds no secret.

    Args:
        identity: the peer's key.
        membership: of the run, encoded; empty where everybody may join. A function where it is renewed.
    """

    def __init__(self, identity: Signs, membership: bytes | Callable[[], bytes] = b"") -> None:
        self.identity, self._membership = identity, membership

    @property
    def membership(self) -> bytes:
        """The one that holds now."""
        return self._membership if isinstance(self._membership, bytes) else self._membership()

    def header(self, method: str, target: str, body: bytes = b"", *, now: float) -> str:
        """The header's value; ``now``: seconds since the epoch, by the coordinator's clock."""
        digest, key = sha256(body).digest(), self.identity.public_key
        unsigned = SignedRequest(key, self.membership, method, target, digest, os.urandom(16), now)
        return SCHEME + base64.urlsafe_b64encode(unsigned.signed(self.identity.sign).encode()).decode()

    def __repr__(self) -> str:
        return f"Token({self.identity.id.hex()[:8]})"


class Crowded(NotAdmitted):
    """Nobody is let in for a while."""


class RequestGate:
    """Lets requests in.

    Args:
        admission: of the run; None where everybody may join.
    """

    def __init__(self, admission: MembershipAdmission | None) -> None:
        self._admission = admission
        self._seen: OrderedDict[bytes, float] = OrderedDict()  # nonces of the last minutes, oldest first

    def check(self, header: str, method: str, target: str, *, now: float) -> tuple[PeerId, bytes]:
        """The peer that sends a request, and the digest that its body must have.

        Raises:
            NotAdmitted: it is nobody's, old, replayed, or of somebody who may not take part.
        """
        request = _decoded(header)
        if not request.is_signed_by(request.key):
            raise NotAdmitted("the request's signature is wrong")
        if (request.method, request.target) != (method, target):
            raise NotAdmitted("the request was signed for another path")
        if abs(now - request.at) > FRESH_S:
            raise NotAdmitted(
                f"the request was signed {now - request.at:+.0f} s ago by this clock, at most {FRESH_S:.0f} "
                "are allowed: set your clock"
            )
        if self._admission is not None:
            role = self._admission.verify(request.key, request.membership, now=now)
            if role < Role.WORKER:
                raise NotAdmitted(f"you joined as a {role.name.lower()}: ask for an invitation as worker")
        self._remember(request.nonce, now)
        return id_of(request.key), request.digest

    def _remember(self, nonce: bytes, now: float) -> None:
        while self._seen and now - next(iter(self._seen.values())) > 2 * FRESH_S:
            self._seen.popitem(last=False)
        if nonce in self._seen:
            raise NotAdmitted("this request was sent before: sign each anew")
        if len(self._seen) >= MAX_NONCES:
            raise Crowded("too many requests in a minute: try again later")
        self._seen[nonce] = now


def _decoded(header: str) -> SignedRequest:
    if not header.startswith(SCHEME) or len(header) > MAX_HEADER_CHARACTERS:
        raise NotAdmitted(
            "no token: use the link that the coordinator prints, in cs.workunits.volunteer(link)"
        )
    try:
        return _decoder.decode(base64.b64decode(header[len(SCHEME) :], altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, *UNDECODABLE) as error:
        raise NotAdmitted("the token cannot be read: `pip install -U colab-swarm`") from error
