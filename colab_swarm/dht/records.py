"""Records: values in the DHT under a key and a subkey, their owners, and their expiration.

``expires_at`` and ``version`` are signed and accepted with a tolerance of `CLOCK_SLACK_S`: a record
cannot be replayed after its end. A holder counts ``ttl_s`` down on its own clock, so clocks that
are wrong do no harm.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from colab_swarm.net.identity import id_of, verify
from colab_swarm.net.peers import UNDECODABLE, Contact, Message, PeerId

CLOCK_SLACK_S = 600.0  # two clocks, each 5 minutes off in opposite directions
ID_BYTES = 32
VERIFIED_RECORDS = 20_000  # size of the cache: checking a signature takes 170 microseconds


class Record(Message, frozen=True):
    """One value under a key and a subkey; only its owner replaces an owned record."""

    subkey: bytes  # holds one record; one of 32 bytes is a peer's id: only that peer may write it
    value: bytes  # msgpack
    expires_at: float  # end of its life, the writer's swarm time
    version: int  # the writer's swarm time when it wrote, microseconds; the highest wins
    ttl_s: float  # seconds left when this message was sent; not signed
    owner: bytes = b""  # Ed25519 public key, or empty
    signature: bytes = b""

    def signed_bytes(self, key: bytes) -> bytes:
        parts = key, self.subkey, self.value, self.expires_at, self.version, self.owner
        return msgspec.msgpack.encode((b"colab_swarm record", *parts))

    @property
    def rank(self) -> tuple[bool, int, bytes]:
        """Of two records the one of higher rank stays, at every peer and in any order of arrival."""
        return bool(self.owner), self.version, self.value

    @property
    def size_bytes(self) -> int:
        return len(self.subkey) + len(self.value) + 256


def owner_of(record: Record) -> PeerId | None:
    return id_of(record.owner) if record.owner else None


class FindNear(Message, frozen=True):
    """Requests known peers near ``key`` and, with ``records``, the records under it."""

    key: bytes
    asker: Contact
    records: bool = False


class FoundNear(Message, frozen=True):
    """The nearest known peers, nearest first, and all requested records."""

    contacts: tuple[Contact, ...]
    records: tuple[Record, ...] = ()


class Fetch(Message, frozen=True):
    """Requests the records under ``key``; forwarded by peers without any, ``relays`` times in a row."""

    key: bytes
    relays: int


class Fetched(Message, frozen=True):
    """All records of the first peer that holds any, and the number of forwards after this query."""

    records: tuple[Record, ...]
    hops: int


class StoreRecord(Message, frozen=True):
    key: bytes
    records: tuple[Record, ...]
    asker: Contact


class Stored(Message, frozen=True):
    """For each record why it was refused, or an empty text; and the nearest known peers."""

    refusals: tuple[str, ...]
    contacts: tuple[Contact, ...]


@dataclass(frozen=True)
class DHTSettings:
    """Settings of the DHT; lengths of time in seconds."""

    bucket_size: int = 20  # contacts per bucket and in a reply (Kademlia's k)
    replicas: int = 5  # peers that hold a record
    read_replicas: int = 3  # peers that a reader hears
    parallel: int = 3  # queries in flight during a lookup (Kademlia's alpha)
    timeout_s: float = 5.0  # of one query; a silent peer costs less, see `Lookup`
    refresh_s: float = 120.0  # between lookups of quiet buckets
    retry_s: float = 30.0  # between retries of one of the lost peers
    republish_s: float = 600.0  # until records are stored again at the peers nearest by then
    value_bytes: int = 1 << 15  # limits of one record
    subkey_bytes: int = 256
    key_bytes: int = 200_000  # limit of all records under one key; they must fit in one message
    total_bytes: int = 1 << 26  # limit of all records that this peer holds for others
    max_ttl_s: float = 24 * 3600.0  # longest life of a record


class Storage:
    """Keys to subkeys to records; ``now`` is monotonic seconds, ``swarm_time`` that of `Peers.time`."""

    def __init__(self, settings: DHTSettings) -> None:
        self._settings = settings
        self._keys: dict[bytes, dict[bytes, tuple[Record, float]]] = {}  # with the end, by `now`
        self.total_bytes = 0
        self._sweep_at = 0.0

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._keys)

    def put(self, key: bytes, record: Record, *, now: float, swarm_time: float) -> str | None:
        """Hold ``record`` until its end; return why it was refused, or None.

        A record that is held already, or superseded, changes nothing, its life included.
        """
        self._sweep(now)
        records = self._keys.get(key, {})
        held, end = records.get(record.subkey, (None, 0.0))
        freed_bytes = held.size_bytes if held else 0
        if end <= now:
            held = None
        if held is not None and record.rank <= held.rank:
            return None if record.signed_bytes(key) == held.signed_bytes(key) else "a newer record is held"
        if fault := self.fault_of(key, record, swarm_time=swarm_time):
            return fault
        if held is not None and held.owner not in (b"", record.owner):
            return "the subkey belongs to another peer"
        more_bytes = record.size_bytes - freed_bytes
        if sum(one.size_bytes for one, _ in records.values()) + more_bytes > self._settings.key_bytes:
            return f"the key is full: {self._settings.key_bytes} bytes"
        if self.total_bytes + more_bytes > self._settings.total_bytes:
            return f"this peer is full: {self._settings.total_bytes} bytes"
        self._keys.setdefault(key, {})[record.subkey] = (record, now + record.ttl_s)
        self.total_bytes += more_bytes
        return None

    def fault_of(self, key: bytes, record: Record, *, swarm_time: float) -> str | None:
        if len(record.value) > self._settings.value_bytes or len(record.subkey) > self._settings.subkey_bytes:
            return f"{len(record.value)} bytes under a subkey of {len(record.subkey)} are too many"
        if fault := self._age_fault(record, swarm_time):
            return fault
        if len(record.subkey) == ID_BYTES and owner_of(record) != record.subkey:
            return "the subkey is a peer's id, and the record is not that peer's"
        if record.owner and not _signed(key, record):
            return "its signature is forged"
        try:
            msgspec.msgpack.decode(record.value)
        except UNDECODABLE:
            return "its value is not msgpack"  # readers decode without a check
        return None

    def _age_fault(self, record: Record, swarm_time: float) -> str | None:
        max_ttl_s = self._settings.max_ttl_s
        left_s = record.expires_at - swarm_time
        if not (0 < record.ttl_s <= max_ttl_s and -CLOCK_SLACK_S < left_s <= max_ttl_s + CLOCK_SLACK_S):
            return f"lives for {record.ttl_s:.0f} s, until {left_s:.0f} s from now; limit {max_ttl_s:.0f} s"
        if record.version > (swarm_time + CLOCK_SLACK_S) * 1e6:
            return "its version is from the future: check the writer's clock"
        return None

    def get(self, key: bytes, *, now: float) -> tuple[Record, ...]:
        """Return the live records under ``key``, with the rest of their lives."""
        self._sweep(now)
        held = self._keys.get(key, {}).values()
        return tuple(msgspec.structs.replace(record, ttl_s=end - now) for record, end in held if end > now)

    def _sweep(self, now: float) -> None:
        if now < self._sweep_at:
            return
        self._sweep_at = now + 5.0
        for key, held in list(self._keys.items()):
            for subkey in [subkey for subkey, (_, end) in held.items() if end <= now]:
                self.total_bytes -= held.pop(subkey)[0].size_bytes
            if not held:
                del self._keys[key]


_verified: OrderedDict[bytes, None] = OrderedDict()  # by all peers of this process: a simulation has many


def _signed(key: bytes, record: Record) -> bool:
    data = record.signed_bytes(key)
    if (digest := hashlib.sha256(data + record.signature).digest()) in _verified:
        return True
    if not verify(record.owner, record.signature, data):
        return False  # not remembered: forgeries must not push out the genuine
    _verified[digest] = None
    if len(_verified) > VERIFIED_RECORDS:
        _verified.popitem(last=False)
    return True
