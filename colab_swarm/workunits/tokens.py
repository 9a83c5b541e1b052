"""Authentication of requests: each carries the peer's membership and a signature over the request.

The header is ``Authorization: Swarm BASE64URL`` of a `SignedRequest`. It holds the method, the path, the digest of the
body, a nonce and the time. The coordinator refuses a request that is over a minute old, or was seen before.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256
from typing import Annotated

import msgspec

from colab_swarm.errors import NotAdmitted
from colab_swarm.net.identity import Identity, id_of
from colab_swarm.net.membership import MAX_MEMBERSHIP_BYTES, Key, MembershipAdmission, Moment, Signed
from colab_swarm.net.peers import UNDECODABLE, PeerId, Peers, Role

SCHEME = "Swarm "
MAX_HEADER_CHARACTERS = 4 * MAX_MEMBERSHIP_BYTES
FRESH_S = 60.0
MAX_NONCES = 200_000
"""Nonces remembered; beyond this many requests in two minutes the rest are refused."""
NO_BODY = sha256(b"").digest()


class SignedRequest(Signed, frozen=True):
    """Content of the header.

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


class Token:
    """Sign a peer's requests. The repr holds no secret.

    Args:
        identity: the peer's key, or the peer.
        membership: of the run, encoded; empty in an open run. A function if it is renewed.
    """

    def __init__(self, identity: Identity | Peers, membership: bytes | Callable[[], bytes] = b"") -> None:
        self.identity, self._membership = identity, membership

    @property
    def membership(self) -> bytes:
        """The current membership."""
        return self._membership if isinstance(self._membership, bytes) else self._membership()

    def header(self, method: str, target: str, body: bytes = b"", *, now: float) -> str:
        """Return the header's value; ``now``: seconds since the epoch, by the coordinator's clock."""
        digest, key = sha256(body).digest(), self.identity.public_key
        unsigned = SignedRequest(key, self.membership, method, target, digest, os.urandom(16), now)
        return SCHEME + base64.urlsafe_b64encode(unsigned.signed(self.identity.sign).encode()).decode()

    def __repr__(self) -> str:
        return f"Token({self.identity.id.hex()[:8]})"


class RequestGate:
    """Admit requests to a run by its ``admission``; None in an open run."""

    def __init__(self, admission: MembershipAdmission | None) -> None:
        self._admission = admission
        self._seen: OrderedDict[bytes, float] = OrderedDict()  # times of nonces, oldest first

    def check(self, header: str, method: str, target: str, *, now: float) -> tuple[PeerId, bytes]:
        """Return the peer that signed a request, and the digest of its body; raise NotAdmitted if it may not pass."""
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
        while self._seen and now - next(iter(self._seen.values())) > 2 * FRESH_S:
            self._seen.popitem(last=False)
        if request.nonce in self._seen:
            raise NotAdmitted("this request was sent before: sign each request")
        if len(self._seen) >= MAX_NONCES:
            raise NotAdmitted("too many requests in a minute: try again later", reason="busy")
        self._seen[request.nonce] = now
        return id_of(request.key), request.digest


def _decoded(header: str) -> SignedRequest:
    if not header.startswith(SCHEME) or len(header) > MAX_HEADER_CHARACTERS:
        raise NotAdmitted(
            "no token: use the link that the coordinator prints, in cs.workunits.volunteer(link)"
        )
    try:
        return _decoder.decode(base64.b64decode(header[len(SCHEME) :], altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, *UNDECODABLE) as error:
        raise NotAdmitted("the token cannot be read: `pip install -U colab-swarm`") from error
