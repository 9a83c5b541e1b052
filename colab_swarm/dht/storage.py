"""The records one peer holds for the swarm. Everything is bounded; what is refused changes nothing."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from colab_swarm.dht.records import Inspector, Record, supersedes


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
