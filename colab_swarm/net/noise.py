"""The handshake Noise_XX_25519_AESGCM_SHA256 (revision 34 of the Noise specification), free of I/O.

    -> e                  e, s send a public key;
    <- e, ee, s, es       ee, es, se mix a Diffie-Hellman result into the keys.
    -> s, se              The payload follows the tokens, encrypted as soon as there is a key.

After three messages both ends have the same ``hash`` and a key for each direction. Names are the
specification's: ``ck`` chaining key, ``h`` handshake hash, ``k`` and ``n`` key and nonce.
"""

import hmac
from hashlib import sha256
from typing import TypeAlias

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from colab_swarm.errors import ProtocolError, require
from colab_swarm.net.peers import Buffer

_KEY_BYTES = 32
TAG_BYTES = 16
MAX_HANDSHAKE_BYTES = 8192
_NAME = b"Noise_XX_25519_AESGCM_SHA256"
_PATTERN = (("e",), ("e", "ee", "s", "es"), ("s", "se"))


class CipherState:
    """One direction's key and counter. Each message uses the next nonce, so no message can be repeated or lost."""

    def __init__(self, key: bytes) -> None:
        self._aead = AESGCM(key)
        self._n = 0

    def _nonce(self) -> bytes:
        self._n += 1
        return (self._n - 1).to_bytes(12, "big")

    def encrypt(self, plaintext: Buffer, associated: bytes | None = None) -> bytes:
        """Return ciphertext and tag (16 bytes longer than ``plaintext``)."""
        return self._aead.encrypt(self._nonce(), plaintext, associated)

    def encrypt_into(self, plaintext: Buffer, out: memoryview) -> None:
        """Write ciphertext and tag to the caller's memory ``out``, like `encrypt` without associated data."""
        self._aead.encrypt_into(self._nonce(), plaintext, None, out)

    def decrypt(self, ciphertext: Buffer, associated: bytes | None = None) -> bytes:
        """Return the plaintext, in new memory; raise `ProtocolError` if the ciphertext is not valid."""
        try:
            return self._aead.decrypt(self._nonce(), ciphertext, associated)
        except InvalidTag:
            raise ProtocolError("a message does not decrypt: garbled, replayed or from another run") from None


# The keys for sending and for receiving.
Keys: TypeAlias = tuple[CipherState, CipherState]


class Handshake:
    """One end of a Noise XX handshake: call `write` and `read` in turn, the initiator writing first.

    ``static`` is this end's long-lived X25519 key. ``ephemeral`` is only given for test vectors. If
    the two ends have different prologues, the second message fails.
    """

    def __init__(
        self,
        *,
        initiator: bool,
        static: X25519PrivateKey,
        prologue: bytes,
        ephemeral: X25519PrivateKey | None = None,
    ) -> None:
        self._initiator = initiator
        self._keys = {"s": static, "e": ephemeral or X25519PrivateKey.generate()}
        self._remote: dict[str, X25519PublicKey] = {}
        self._turn = 0
        self.hash = _NAME.ljust(_KEY_BYTES, b"\0")
        self._ck = self.hash
        self._cipher: CipherState | None = None
        self._mix_hash(prologue)

    @property
    def finished(self) -> bool:
        return self._turn == len(_PATTERN)

    @property
    def remote_static(self) -> bytes:
        """The other end's static public key (32 bytes), once it has been read."""
        return self._remote["s"].public_bytes_raw()

    def write(self, payload: bytes) -> bytes:
        """Return this end's next message, with ``payload`` in it."""
        message = b""
        for token in self._next_tokens(writing=True):
            if token == "e":
                public = self._keys["e"].public_key().public_bytes_raw()
                self._mix_hash(public)
                message += public
            elif token == "s":
                public = self._keys["s"].public_key().public_bytes_raw()
                message += self._encrypt_and_hash(public)
            else:
                self._mix_shared(token)
        return message + self._encrypt_and_hash(payload)

    def read(self, message: bytes) -> bytes:
        """Return the payload of the other end's next message; raise `ProtocolError` if it is not valid."""
        fault = f"a handshake message of {len(message)} bytes is over {MAX_HANDSHAKE_BYTES}"
        require(len(message) <= MAX_HANDSHAKE_BYTES, fault, ProtocolError)
        for token in self._next_tokens(writing=False):
            if token in ("e", "s"):
                size = _KEY_BYTES
                # The key "s" is encrypted as soon as there is a cipher.
                if token == "s" and self._cipher:
                    size += TAG_BYTES
                require(len(message) >= size, "a handshake message is truncated", ProtocolError)
                data = message[:size]
                message = message[size:]
                if token == "s":
                    data = self._decrypt_and_hash(data)
                else:
                    self._mix_hash(data)
                self._remote[token] = X25519PublicKey.from_public_bytes(data)
            else:
                self._mix_shared(token)
        return self._decrypt_and_hash(message)

    def split(self) -> Keys:
        assert self.finished
        to_responder, to_initiator = map(CipherState, _hkdf(self._ck, b""))
        if self._initiator:
            return to_responder, to_initiator
        return to_initiator, to_responder

    def _next_tokens(self, *, writing: bool) -> tuple[str, ...]:
        initiator_writes = self._turn % 2 == 0
        we_write = self._initiator == initiator_writes
        assert writing == we_write and not self.finished, "not this end's turn"
        self._turn += 1
        return _PATTERN[self._turn - 1]

    def _mix_shared(self, token: str) -> None:
        """Mix a Diffie-Hellman result into the keys.

        Token "es" means the initiator's e with the responder's s; "se" means the initiator's s with the responder's e.
        """
        ours = token[0]
        theirs = token[1]
        if not self._initiator:
            ours, theirs = theirs, ours
        try:
            shared = self._keys[ours].exchange(self._remote[theirs])
        except ValueError:
            # The public key is of small order.
            raise ProtocolError("the handshake carries an unusable public key") from None
        self._ck, key = _hkdf(self._ck, shared)
        self._cipher = CipherState(key)

    def _mix_hash(self, data: bytes) -> None:
        self.hash = sha256(self.hash + data).digest()

    def _encrypt_and_hash(self, plaintext: bytes) -> bytes:
        data = plaintext
        if self._cipher:
            data = self._cipher.encrypt(plaintext, self.hash)
        self._mix_hash(data)
        return data

    def _decrypt_and_hash(self, data: bytes) -> bytes:
        plaintext = data
        if self._cipher:
            plaintext = self._cipher.decrypt(data, self.hash)
        self._mix_hash(data)
        return plaintext


def _hkdf(chaining_key: bytes, material: bytes) -> tuple[bytes, bytes]:
    secret = hmac.digest(chaining_key, material, "sha256")
    first = hmac.digest(secret, b"\x01", "sha256")
    second = hmac.digest(secret, first + b"\x02", "sha256")
    return first, second
