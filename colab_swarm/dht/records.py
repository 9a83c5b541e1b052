"""Records: signed values in the DHT. Under a key, each owner has one record, which expires.

The owner signs ``expires_at`` and ``version``, and holders accept them with a tolerance of `CLOCK_SLACK_S`. So no peer
can store a record again after its end. A holder counts ``ttl_s`` down by its own clock, so wrong clocks do no harm.
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator

import msgspec

from colab_swarm.net.identity import id_of, verify
from colab_swarm.net.membership import MAX_MEMBERSHIP_BYTES
from colab_swarm.net.peers import UNDECODABLE, Contact, Message, PeerId, Role, remember

CLOCK_SLACK_S = 600.0  # allows for two clocks that are each wrong by 5 minutes, in opposite directions
ID_BYTES = 32
VALUE_BYTES = 1 << 15  # limit of one record
KEY_BYTES = 200_000  # limit of all records under one key; they must fit in one message
OWNER_BYTES = 1 << 21  # limit of all records of one owner at one peer
TOTAL_BYTES = 1 << 26  # limit of all records that one peer holds for others
MAX_TTL_S = 24 * 3600.0  # longest life of a record
SHORT_BYTES = 1024  # shorter records count as equally long
VERIFIED_RECORDS = 20_000  # size of the cache of checked signatures; checking one takes 170 microseconds


class Record(Message, frozen=True):
    """One owner's value under a key. Only the owner can replace it."""

    value: bytes  # msgpack
    expires_at: float  # end of its life, in the writer's swarm time
    version: int  # the writer's swarm time when it wrote, in microseconds; the highest version counts
    ttl_s: float  # seconds left when this message was sent; not signed
    owner: bytes  # Ed25519 public key
    membership: bytes = b""  # proves the owner's role; empty in an open run
    signature: bytes = b""

    def signed_bytes(self, key: bytes) -> bytes:
        parts = key, self.value, self.expires_at, self.version, self.owner, self.membership
        return msgspec.msgpack.encode((b"colab_swarm record", *parts))

    @property
    def rank(self) -> tuple[int, bytes]:
        """Sort key of an owner's records. Every peer keeps the highest rank, in whatever order records arrive."""
        return self.version, self.value

    @property
    def size_bytes(self) -> int:
        return len(self.value) + len(self.membership) + 256

    @property
    def written_at(self) -> float:
        """The writer's swarm time, seconds."""
        return self.version / 1e6

    @property
    def writer(self) -> PeerId:
        return id_of(self.owner)


class FindNear(Message, frozen=True):
    """Requests known peers near ``key`` and, if ``records`` is True, the records under ``key``."""

    key: bytes
    asker: Contact
    records: bool = False


class FoundNear(Message, frozen=True):
    """The nearest known peers, nearest first, and all requested records."""

    contacts: tuple[Contact, ...]
    records: tuple[Record, ...] = ()


class Fetch(Message, frozen=True):
    """Requests the records under ``key``. Peers without records forward it, at most ``forwards`` times in a row."""

    key: bytes
    forwards: int


class Fetched(Message, frozen=True):
    """All records of the first peer that holds any. The query was forwarded ``hops`` times to reach this peer."""

    records: tuple[Record, ...]
    hops: int


class StoreRecord(Message, frozen=True):
    key: bytes
    records: tuple[Record, ...]
    asker: Contact


class Stored(Message, frozen=True):
    """For each record, the reason if it was refused, or an empty text. Also the nearest known peers."""

    refusals: tuple[str, ...]
    contacts: tuple[Contact, ...]


class Storage:
    """The records that a peer holds, by key and owner. ``now`` is monotonic seconds, ``swarm_time`` is `Node.time`.

    If a limit is reached, a new record takes the place of other records. If its key is full, it replaces the longest
    records; if the peer is full, it replaces the oldest records. A renewed record counts as new. ``role_by`` is
    `Node.role_by`.
    """

    def __init__(self, role_by: Callable[[bytes, bytes, float], Role]) -> None:
        self._role_by = role_by
        self._keys: dict[bytes, dict[bytes, tuple[Record, float]]] = {}  # with its end, as `now`
        self._owned = Counter[bytes]()  # bytes by owner
        self._places: dict[tuple[bytes, bytes], None] = {}  # keys and owners, the oldest first
        self.total_bytes = 0
        self._sweep_at = 0.0

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._keys)

    def put(self, key: bytes, record: Record, *, now: float, swarm_time: float) -> str | None:
        """Hold ``record`` until its end; return None, or the reason if the record is refused.

        If the peer already holds this record or a newer record, nothing changes. The record's life does not grow.
        """
        self._sweep(now)
        held, end = self._keys.get(key, {}).get(record.owner, (None, 0.0))
        if held is not None and end > now and record.rank <= held.rank:
            if record.signed_bytes(key) == held.signed_bytes(key):
                return None
            return "a newer record is held"
        if self.role_of(record) < Role.REDUCER:
            return "its owner is no member of the run, or may only watch"
        fault = self.fault_of(key, record, swarm_time=swarm_time) or self._crowded(key, record, held)
        if fault:
            return fault
        if held is not None:
            self._drop(key, record.owner)
        self._keys.setdefault(key, {})[record.owner] = record, now + record.ttl_s
        self._owned[record.owner] += record.size_bytes
        self._places[key, record.owner] = None
        self.total_bytes += record.size_bytes
        return None

    def _crowded(self, key: bytes, record: Record, held: Record | None) -> str | None:
        """Make room for a record that replaces ``held``; return None, or the reason if there is no room."""
        more_bytes = record.size_bytes - (held.size_bytes if held else 0)
        if self._owned[record.owner] + more_bytes > OWNER_BYTES:
            return f"its owner has {OWNER_BYTES} bytes here"
        others = {
            owner: other for owner, (other, _) in self._keys.get(key, {}).items() if owner != record.owner
        }
        while sum(other.size_bytes for other in others.values()) + record.size_bytes > KEY_BYTES:
            longest = max(others, key=lambda owner: max(others[owner].size_bytes, SHORT_BYTES), default=None)
            if longest is None or record.size_bytes > max(others[longest].size_bytes, SHORT_BYTES):
                return f"the key is full: {KEY_BYTES} bytes"
            self._drop(key, longest)
            del others[longest]
        while self.total_bytes + more_bytes > TOTAL_BYTES:
            oldest = next((place for place in self._places if place != (key, record.owner)), None)
            if oldest is None:
                return f"this peer is full: {TOTAL_BYTES} bytes"
            self._drop(*oldest)
        return None

    def _drop(self, key: bytes, owner: bytes) -> None:
        record = self._keys[key].pop(owner)[0]
        self.total_bytes -= record.size_bytes
        self._owned[owner] -= record.size_bytes
        del self._places[key, owner]
        for counts, entry in ((self._keys, key), (self._owned, owner)):
            if not counts[entry]:
                del counts[entry]

    def fault_of(self, key: bytes, record: Record, *, swarm_time: float) -> str | None:
        if len(record.value) > VALUE_BYTES or len(record.membership) > MAX_MEMBERSHIP_BYTES:
            return f"a value of {len(record.value)} bytes, or its membership, is too long"
        left_s = record.expires_at - swarm_time
        if not (0 < record.ttl_s <= MAX_TTL_S and -CLOCK_SLACK_S < left_s <= MAX_TTL_S + CLOCK_SLACK_S):
            return f"lives for {record.ttl_s:.0f} s, until {left_s:.0f} s from now; limit {MAX_TTL_S:.0f} s"
        if record.expires_at - record.written_at > MAX_TTL_S + CLOCK_SLACK_S:
            return "it was written too long before its end"
        if record.version > (swarm_time + CLOCK_SLACK_S) * 1e6:
            return "its version is from the future: check the writer's clock"
        if not _signed(key, record):
            return "its signature is forged"
        try:
            msgspec.msgpack.decode(record.value)
        except UNDECODABLE:
            return "its value is not msgpack"  # checked here, because readers decode without a check
        return None

    def role_of(self, record: Record) -> Role:
        return self._role_by(record.owner, record.membership, record.written_at)

    def get(self, key: bytes, *, now: float) -> tuple[Record, ...]:
        """Return the records under ``key`` that have not expired, each with its remaining ``ttl_s``."""
        self._sweep(now)
        held = self._keys.get(key, {}).values()
        return tuple(msgspec.structs.replace(record, ttl_s=end - now) for record, end in held if end > now)

    def _sweep(self, now: float) -> None:
        if now < self._sweep_at:
            return
        self._sweep_at = now + 5.0
        for key, held in list(self._keys.items()):
            for owner in [owner for owner, (_, end) in held.items() if end <= now]:
                self._drop(key, owner)


_verified: OrderedDict[bytes, None] = OrderedDict()  # shared by all peers of this process (many if simulated)


def _signed(key: bytes, record: Record) -> bool:
    data = record.signed_bytes(key)
    digest = hashlib.sha256(data + record.signature).digest()
    if digest in _verified:
        return True
    if not verify(record.owner, record.signature, data):
        return False  # not remembered, so that forged records cannot push out genuine ones
    remember(_verified, digest, None, VERIFIED_RECORDS)
    return True
