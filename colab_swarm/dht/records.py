"""Records: what the DHT holds under a key and a subkey, who may write it, and for how long it lives.

Time is told twice. ``expires_at`` and ``version`` are the writer's swarm time and part of what an owner
signs, so that nobody can replay a record after its end; they are believed with `CLOCK_SLACK_S` to spare.
``ttl_s`` is what is left of the record's life as its sender sees it: holders count it down on their own
clock, so that skewed clocks neither kill a fresh record nor keep an old one.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from colab_swarm.net.identity import id_of, verify
from colab_swarm.net.peers import UNDECODABLE, Contact, Message, PeerId, Peers

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


class FindPeers(Message, frozen=True):
    """Which peers near ``target`` do you know?"""

    target: bytes
    asker: Contact


class FoundPeers(Message, frozen=True):
    """The nearest known, nearest first."""

    contacts: tuple[Contact, ...]


class FindValue(Message, frozen=True):
    """What do you hold under ``key``, and which peers near it do you know?"""

    key: bytes
    asker: Contact


class FoundValue(Message, frozen=True):
    """All records held under the key, and the nearest peers known."""

    records: tuple[Record, ...]
    contacts: tuple[Contact, ...]


class Fetch(Message, frozen=True):
    """What do you hold under ``key``? If nothing, ask on: at peers nearer to it, ``relays`` in a row at most."""

    key: bytes
    relays: int


class Fetched(Message, frozen=True):
    """All records of the first peer found to hold any, and how many queries in a row it took after this one."""

    records: tuple[Record, ...]
    hops: int


class StoreRecord(Message, frozen=True):
    """Hold these records; ``at`` is the sender's swarm time."""

    key: bytes
    records: tuple[Record, ...]
    asker: Contact
    at: float


class Stored(Message, frozen=True):
    """For each record why it was refused, or an empty text; and the nearest peers known."""

    refusals: tuple[str, ...]
    contacts: tuple[Contact, ...]


@dataclass(frozen=True)
class DHTSettings:
    """How a DHT behaves.

    Attributes:
        bucket_size: contacts per bucket and in a reply (Kademlia's k).
        replicas: peers that hold a record.
        read_replicas: peers a reader hears.
        parallel: queries in flight while looking up (Kademlia's alpha).
        timeout_s: of one query; a silent peer costs less, see `Lookup`.
        refresh_s: how often quiet buckets are looked up.
        retry_s: how often one of the peers that were lost is tried again.
        republish_s: how often held records are stored again at who is nearest by then.
        limits: what this peer holds for others.
    """

    bucket_size: int = 20
    replicas: int = 5
    read_replicas: int = 3
    parallel: int = 3
    timeout_s: float = 5.0
    refresh_s: float = 120.0
    retry_s: float = 30.0
    republish_s: float = 600.0
    limits: Limits = field(default_factory=Limits)


@dataclass(slots=True)
class _Held:
    record: Record
    until: float  # on the holder's monotonic clock


class Storage:
    """Keys to subkeys to records. ``now`` is monotonic seconds, ``swarm_time`` what `Peers.time` says."""

    def __init__(self, inspector: Inspector) -> None:
        self._inspector = inspector
        self._limits = inspector.limits
        self._keys: dict[bytes, dict[bytes, _Held]] = {}
        self._key_bytes: dict[bytes, int] = {}
        self._total_bytes = 0
        self._count = 0
        self._ends: list[tuple[float, bytes, bytes]] = []  # heap; entries of replaced records are skipped

    @property
    def total_bytes(self) -> int:
        """Bytes of all records held."""
        return self._total_bytes

    def __iter__(self) -> Iterator[bytes]:
        """The keys."""
        return iter(self._keys)

    def put(self, key: bytes, record: Record, *, now: float, swarm_time: float) -> str | None:
        """Hold ``record`` until its end; returns why it was refused, or None.

        A record that is held already, or superseded by the one held, changes nothing, its life included.
        """
        self._expire(now)
        held = self._keys.get(key, {}).get(record.subkey)
        if held is not None and not supersedes(record, held.record):
            same = record.signed_bytes(key) == held.record.signed_bytes(key)
            return None if same else "a newer record is held"
        fault = self._inspector.fault_of(key, record, swarm_time=swarm_time)
        if fault is not None:
            return fault
        if held is not None and held.record.owner not in (b"", record.owner):
            return "the subkey belongs to another peer"
        return self._hold(key, record, held, now + record.ttl_s)

    def _hold(self, key: bytes, record: Record, replaced: _Held | None, until: float) -> str | None:
        more_bytes = record.size_bytes - (replaced.record.size_bytes if replaced else 0)
        key_bytes = self._key_bytes.get(key, 0) + more_bytes
        if key_bytes > self._limits.key_bytes:
            return f"the key is full: {self._limits.key_bytes} bytes"
        if self._total_bytes + more_bytes > self._limits.total_bytes:
            return f"this peer is full: {self._limits.total_bytes} bytes"
        self._keys.setdefault(key, {})[record.subkey] = _Held(record, until)
        self._key_bytes[key] = key_bytes
        self._total_bytes += more_bytes
        self._count += replaced is None
        heapq.heappush(self._ends, (until, key, record.subkey))
        if len(self._ends) > 2 * self._count + 100:
            self._sweep()
        return None

    def _sweep(self) -> None:
        """Forget the ends of replaced records."""
        self._ends = [
            (one.until, key, subkey) for key, held in self._keys.items() for subkey, one in held.items()
        ]
        heapq.heapify(self._ends)

    def get(self, key: bytes, *, now: float) -> tuple[Record, ...]:
        """The live records under ``key``, each with what is left of its life."""
        self._expire(now)
        held = self._keys.get(key)
        if not held:
            return ()
        return tuple(msgspec.structs.replace(one.record, ttl_s=one.until - now) for one in held.values())

    def _expire(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            until, key, subkey = heapq.heappop(self._ends)
            records = self._keys.get(key, {})
            if subkey in records and records[subkey].until == until:
                self._drop(key, records, subkey)

    def _drop(self, key: bytes, records: dict[bytes, _Held], subkey: bytes) -> None:
        size_bytes = records.pop(subkey).record.size_bytes
        self._key_bytes[key] -= size_bytes
        self._total_bytes -= size_bytes
        self._count -= 1
        if not records:
            del self._keys[key], self._key_bytes[key]

    def check_invariants(self) -> None:
        """Raise AssertionError if the books do not balance."""
        for key, records in self._keys.items():
            assert records and self._key_bytes[key] == sum(h.record.size_bytes for h in records.values())
            assert all((held.until, key, subkey) in self._ends for subkey, held in records.items())
        assert self._keys.keys() == self._key_bytes.keys()
        assert self._total_bytes == sum(self._key_bytes.values()) <= self._limits.total_bytes
        assert self._count == sum(map(len, self._keys.values())) <= len(self._ends)
