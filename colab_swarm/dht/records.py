"""Records: what the DHT holds under a key and a subkey, who may write it, and for how long it lives.

Time is told twice. ``expires_at`` and ``version`` are the writer's swarm time and part of what an owner
signs, so that nobody can replay a record after its end; they are believed with `CLOCK_SLACK_S` to spare.
``ttl_s`` is what is left of the record's life as its sender sees it: holders count it down on their own
clock, so that skewed clocks neither kill a fresh record nor keep an old one.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from colab_swarm.net.identity import id_of, verify
from colab_swarm.net.peers import UNDECODABLE, Message, PeerId, Peers

CLOCK_SLACK_S = 600.0
"""Two clocks, each 5 minutes off in opposite directions."""
ID_BYTES = 32
VERIFIED_RECORDS = 20_000
"""Digests remembered: checking a signature takes 170 microseconds."""


class Record(Message, frozen=True):
    """One value under a key and a subkey.

    Attributes:
        subkey: at most one record lives under each; one of 32 bytes is a peer's id, and only that peer may
            write it.
        value: msgpack.
        expires_at: end of its life, the writer's swarm time.
        version: the writer's swarm time when it wrote, microseconds; the highest wins.
        ttl_s: seconds left when this message was sent; not signed.
        owner, signature: Ed25519 public key and signature, or empty; an owned record yields to its owner
            only.
    """

    subkey: bytes
    value: bytes
    expires_at: float
    version: int
    ttl_s: float
    owner: bytes = b""
    signature: bytes = b""

    def signed_bytes(self, key: bytes) -> bytes:
        """What the owner signs."""
        parts = (
            b"colab_swarm record",
            key,
            self.subkey,
            self.value,
            self.expires_at,
            self.version,
            self.owner,
        )
        return msgspec.msgpack.encode(parts)

    @property
    def size_bytes(self) -> int:
        """What the record takes in a store, roughly."""
        return len(self.subkey) + len(self.value) + 256


def write_record(
    peers: Peers, key: bytes, value: bytes, *, subkey: bytes, ttl_s: float, version: int, signed: bool
) -> Record:
    """A record by this peer, signed if asked for."""
    expires_at, owner = peers.time() + ttl_s, peers.public_key if signed else b""
    record = Record(subkey, value, expires_at, version, ttl_s, owner)
    if signed:
        record = msgspec.structs.replace(record, signature=peers.sign(record.signed_bytes(key)))
    return record


def supersedes(new: Record, old: Record) -> bool:
    """Whether ``new`` takes the place of ``old`` at every peer, whatever the order in which they came."""
    if bool(new.owner) != bool(old.owner):
        return bool(new.owner)
    return (new.version, new.value) > (old.version, old.value)


@dataclass(frozen=True)
class Limits:
    """What a peer holds for others.

    Attributes:
        value_bytes, subkey_bytes: of one record.
        key_bytes: all records under one key; they must fit in one message.
        total_bytes: everything.
        max_ttl_s: longest life of a record.
    """

    value_bytes: int = 1 << 15
    subkey_bytes: int = 256
    key_bytes: int = 200_000
    total_bytes: int = 1 << 26
    max_ttl_s: float = 24 * 3600.0


class Inspector:
    """Says what is wrong with a record; remembers the signatures it has checked."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._verified: OrderedDict[bytes, None] = OrderedDict()

    def fault_of(self, key: bytes, record: Record, *, swarm_time: float) -> str | None:
        """Why the record must be refused, or None."""
        if len(record.value) > self.limits.value_bytes or len(record.subkey) > self.limits.subkey_bytes:
            return f"{len(record.value)} bytes under a subkey of {len(record.subkey)} are too many"
        max_ttl_s = self.limits.max_ttl_s
        left_s = record.expires_at - swarm_time
        if not (0 < record.ttl_s <= max_ttl_s and -CLOCK_SLACK_S < left_s <= max_ttl_s + CLOCK_SLACK_S):
            return f"lives for {record.ttl_s:.0f} s, until {left_s:.0f} s from now; limit {max_ttl_s:.0f} s"
        if record.version > (swarm_time + CLOCK_SLACK_S) * 1e6:
            return "its version is from the future: check the writer's clock"
        if len(record.subkey) == ID_BYTES and (not record.owner or id_of(record.owner) != record.subkey):
            return "the subkey is a peer's id, and the record is not that peer's"
        if record.owner and not self._signed(key, record):
            return "its signature is forged"
        try:
            msgspec.msgpack.decode(record.value)
        except UNDECODABLE:
            return "its value is not msgpack"  # readers need not expect it
        return None

    def _signed(self, key: bytes, record: Record) -> bool:
        data = record.signed_bytes(key)
        digest = hashlib.sha256(data + record.signature).digest()
        if digest in self._verified:
            self._verified.move_to_end(digest)
            return True
        if not verify(record.owner, record.signature, data):
            return False
        self._verified[digest] = None
        if len(self._verified) > VERIFIED_RECORDS:
            self._verified.popitem(last=False)
        return True


def owner_of(record: Record) -> PeerId | None:
    """Id of the peer that signed the record."""
    return id_of(record.owner) if record.owner else None
