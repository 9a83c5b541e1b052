"""A peer's identity: an Ed25519 key pair. The SHA-256 of the public key is the peer's id."""

import hashlib
import os
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from colab_swarm.errors import require
from colab_swarm.net.peers import PeerId


def id_of(public_key: bytes) -> PeerId:
    """Return the id of an Ed25519 public key (32 bytes)."""
    return PeerId(hashlib.sha256(public_key).digest())


def verify(public_key: bytes, signature: bytes, data: bytes) -> bool:
    """Return True if the owner of ``public_key`` (32 bytes) made ``signature`` (64 bytes) over ``data``."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


class Identity:
    """An Ed25519 key pair. A ``seed`` (32 bytes) makes the key reproducible; without a seed, the key is random."""

    def __init__(self, seed: bytes | None = None) -> None:
        if seed:
            self._key = Ed25519PrivateKey.from_private_bytes(seed)
        else:
            self._key = Ed25519PrivateKey.generate()
        self.public_key = self._key.public_key().public_bytes_raw()
        self.id = id_of(self.public_key)

    def sign(self, data: bytes) -> bytes:
        return self._key.sign(data)

    def derive(self, purpose: bytes) -> bytes:
        """Return a secret of 32 bytes for this purpose; it is always the same for this key."""
        return hashlib.sha256(b"colab_swarm " + purpose + self._key.private_bytes_raw()).digest()

    @classmethod
    def load_or_create(cls, path: str | Path) -> "Identity":
        """Read the key saved at ``path``, or save a new key there in a file that only its owner can read.

        Raises `ValueError` if the file exists but is not a saved identity.
        """
        path = Path(path)
        try:
            seed = path.read_bytes()
        except FileNotFoundError:
            identity = cls()
            path.parent.mkdir(parents=True, exist_ok=True)
            # The file is renamed when it is complete, so that no process ever reads half a key.
            aside = path.with_name(f"{path.name}.{identity.id.hex()[:8]}")
            descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(identity._key.private_bytes_raw())
            aside.replace(path)
            return identity
        fault = f"{path} is not a saved identity (32 bytes expected, {len(seed)} found)"
        require(len(seed) == 32, f"{fault}; delete it to make a new one")
        return cls(seed)
