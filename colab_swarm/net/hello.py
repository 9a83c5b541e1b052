"""Who is at the other end: the Noise handshake bound to the peers' identities. Free of I/O.

    1  initiator  Noise "e"            payload: digest of the prologue, in clear
    2  responder  Noise "e ee s es"    payload: Hello
    3  initiator  Noise "s se"         payload: Hello

The prologue holds the protocol's version and the run's name, so peers of another run or version cannot link;
the digest lets the responder say so in words instead of failing to decrypt. A Hello carries the peer's
Ed25519 key and its signature over the peer's Noise key and the handshake's hash so far, which contains the
other end's fresh key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated

import msgspec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from colab_swarm.errors import NotAdmitted, ProtocolError, WrongPeer
from colab_swarm.net.identity import Identity, id_of, verify
from colab_swarm.net.noise import Handshake, Keys
from colab_swarm.net.peers import UNDECODABLE, Contact, Message, PeerId, Role, short

VERSION = 1
MAX_ADDRESSES = 16
MAX_MEMBERSHIP_BYTES = 2048
_DOMAIN = b"colab_swarm hello"
Address = Annotated[str, msgspec.Meta(max_length=256)]


class Hello(Message, frozen=True):
    """What each end says about itself.

    Attributes:
        public_key: Ed25519, 32 bytes.
        signature: by that key, 64 bytes.
        addresses: where this peer can be dialled; none in client mode.
        time: its wall clock, seconds since the epoch.
        membership: what `Admission.admit` checks; empty if it has none.
    """

    public_key: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    signature: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]
    addresses: Annotated[tuple[Address, ...], msgspec.Meta(max_length=MAX_ADDRESSES)]
    time: Annotated[float, msgspec.Meta(ge=0.0, le=1e11)]
    membership: Annotated[bytes, msgspec.Meta(max_length=MAX_MEMBERSHIP_BYTES)] = b""


def describe_run(run_id: str) -> str:
    """The run and the protocol's version, for error texts (99 bytes at most)."""
    return f"run '{run_id}', protocol {VERSION}"


_decoder = msgspec.msgpack.Decoder(Hello)
_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True)
class Introduced:
    """A finished handshake: who the peer is, where it listens, what it may do, and the keys.

    ``time`` is its clock when it spoke.
    """

    contact: Contact
    public_key: bytes
    membership: bytes
    role: Role
    time: float
    keys: Keys


class Introduction:
    """One end of the handshake.

    Args:
        identity: who this end is.
        addresses: where this end can be dialled.
        run_id: the run both ends must be of.
        expected: the id the dialled peer must have; None if this end was dialled.
        membership: what this end shows.
        admit: the role of a peer by its public key and membership; raises `NotAdmitted`.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        addresses: tuple[str, ...],
        run_id: str,
        expected: PeerId | None,
        membership: bytes = b"",
        admit: Callable[[bytes, bytes], Role] = lambda public_key, membership: Role.WORKER,
    ) -> None:
        self._identity, self._addresses, self._run_id = identity, addresses, run_id
        self._expected, self._membership, self._admit = expected, membership, admit
        self._static = X25519PrivateKey.generate()
        prologue = f"colab_swarm {VERSION} {run_id}".encode()
        self._digest = sha256(prologue).digest()
        self._noise = Handshake(initiator=expected is not None, static=self._static, prologue=prologue)
        self._greeted = expected is not None
        self.result: Introduced | None = None

    def start(self) -> bytes:
        """The initiator's first message."""
        return self._noise.write(self._digest)

    def on_message(self, message: bytes, *, wall_time: float) -> bytes | None:
        """Take the other end's next message; returns the answer to send, if there is one.

        Raises:
            ProtocolError: another run or version, or garbled.
            WrongPeer: not the expected peer.
            NotAdmitted: it may not link.
        """
        before = self._noise.hash
        payload = self._noise.read(message)
        if not self._greeted:
            self._check_run(payload)
            self._greeted = True
            return self._write_hello(wall_time)
        hello = self._check_hello(payload, before)
        try:
            role = self._admit(hello.public_key, hello.membership)
        except NotAdmitted as error:
            raise NotAdmitted(f"not admitted: {error}") from error
        answer = None if self._noise.finished else self._write_hello(wall_time)
        self.result = Introduced(
            Contact(id_of(hello.public_key), hello.addresses),
            hello.public_key,
            hello.membership,
            role,
            hello.time,
            self._noise.split(),
        )
        return answer

    def _check_run(self, digest: bytes) -> None:
        if digest != self._digest:
            raise ProtocolError(f"this peer is of {describe_run(self._run_id)}")

    def _write_hello(self, wall_time: float) -> bytes:
        public = self._static.public_key().public_bytes_raw()
        signature = self._identity.sign(_DOMAIN + public + self._noise.hash)
        hello = Hello(self._identity.public_key, signature, self._addresses, wall_time, self._membership)
        return self._noise.write(_encoder.encode(hello))

    def _check_hello(self, payload: bytes, hash_before: bytes) -> Hello:
        try:
            hello = _decoder.decode(payload)
        except UNDECODABLE as error:
            raise ProtocolError(f"an undecodable hello: {error}") from error
        if not verify(hello.public_key, hello.signature, _DOMAIN + self._noise.remote_static + hash_before):
            raise ProtocolError("a hello with a wrong signature")
        peer = id_of(hello.public_key)
        if peer == self._identity.id:
            raise WrongPeer(f"both ends are peer {short(peer)}: is its key file in use twice?")
        if self._expected is not None and peer != self._expected:
            raise WrongPeer(f"peer {short(peer)} answered, {short(self._expected)} was expected")
        return hello
