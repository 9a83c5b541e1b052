"""Whom a peer knows: Kademlia's k-buckets over 256-bit ids (Maymounkov & Mazieres 2002, section 2.2).

Bucket i holds peers whose id shares exactly i leading bits with ours, least recently seen first. Old contacts
that still answer are never pushed out by new ones, since who has been up long tends to stay; a newcomer to a
full bucket waits as a replacement until somebody in it fails.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from colab_swarm.net.peers import Contact, PeerId

ID_BITS = 256
MAX_LOST = 100
MAX_RETRIES = 20
"""Failures of a lost peer after which it is forgotten."""
MAX_FAILURES = 2
"""Failures in a row after which a peer is dropped; one is enough if a replacement waits."""


def distance(one: bytes, other: bytes) -> int:
    """Kademlia's distance of two ids or keys: their XOR as a number."""
    return int.from_bytes(one, "big") ^ int.from_bytes(other, "big")


def common_bits(one: bytes, other: bytes) -> int:
    """How many leading bits two ids share."""
    return ID_BITS - distance(one, other).bit_length()


@dataclass(slots=True)
class _Bucket:
    """Insertion order is order of last contact."""

    contacts: dict[PeerId, Contact] = field(default_factory=dict)
    replacements: dict[PeerId, Contact] = field(default_factory=dict)
    touched_at: float = 0.0


class RoutingTable:
    """The contacts of the peer ``me``, at most ``bucket_size`` (the paper's k) per bucket.

    Attributes:
        lost: the peers dropped last; after a partition they are the way back.
    """

    def __init__(self, me: PeerId, *, bucket_size: int = 20) -> None:
        self._me = me
        self._bucket_size = bucket_size
        self._buckets: dict[int, _Bucket] = {}
        self._failures: dict[PeerId, int] = {}
        self.lost: dict[PeerId, Contact] = {}

    def __len__(self) -> int:
        return sum(len(bucket.contacts) for bucket in self._buckets.values())

    def __contains__(self, peer: PeerId) -> bool:
        bucket = self._buckets.get(common_bits(self._me, peer))
        return bucket is not None and peer in bucket.contacts

    def __iter__(self) -> Iterator[Contact]:
        for bucket in self._buckets.values():
            yield from bucket.contacts.values()

    def saw(self, contact: Contact, now: float) -> bool:
        """Note that a peer which can be dialled was heard from; returns whether it is new in the table."""
        if contact.id == self._me or not contact.direct:
            self._forget(contact.id)  # it could be dialled once
            return False
        bucket = self._buckets.setdefault(common_bits(self._me, contact.id), _Bucket())
        bucket.touched_at = now
        self._failures.pop(contact.id, None)
        self.lost.pop(contact.id, None)
        known = bucket.contacts.pop(contact.id, None) is not None
        if known or len(bucket.contacts) < self._bucket_size:
            bucket.contacts[contact.id] = contact
            bucket.replacements.pop(contact.id, None)
            return not known
        self._queue(bucket, contact)
        return False

    def _queue(self, bucket: _Bucket, contact: Contact) -> None:
        """Keep the most recently seen as replacements."""
        bucket.replacements.pop(contact.id, None)
        bucket.replacements[contact.id] = contact
        if len(bucket.replacements) > self._bucket_size:
            del bucket.replacements[next(iter(bucket.replacements))]

    def failed(self, peer: PeerId) -> None:
        """Note that a peer did not answer; who fails again and again gives its place to a replacement."""
        bucket = self._buckets.get(common_bits(self._me, peer))
        if bucket is None or not (peer in bucket.contacts or peer in self.lost):
            return
        self._failures[peer] = self._failures.get(peer, 0) + 1
        if peer in self.lost:
            if self._failures[peer] >= MAX_RETRIES:
                del self._failures[peer], self.lost[peer]
        elif bucket.replacements or self._failures[peer] >= MAX_FAILURES:
            self._lose(bucket, peer)

    def _forget(self, peer: PeerId) -> None:
        self._failures.pop(peer, None)
        self.lost.pop(peer, None)
        bucket = self._buckets.get(common_bits(self._me, peer)) if peer != self._me else None
        if bucket is not None:
            bucket.replacements.pop(peer, None)
            if bucket.contacts.pop(peer, None) is not None and bucket.replacements:
                newest, contact = bucket.replacements.popitem()
                bucket.contacts[newest] = contact

    def _lose(self, bucket: _Bucket, peer: PeerId) -> None:
        """Put the latest replacement in the place of ``peer``."""
        self._failures[peer] = 0
        self.lost[peer] = bucket.contacts.pop(peer)
        if len(self.lost) > MAX_LOST:
            oldest = next(iter(self.lost))
            del self.lost[oldest], self._failures[oldest]
        if bucket.replacements:
            newest, contact = bucket.replacements.popitem()
            bucket.contacts[newest] = contact

    def nearest(self, target: bytes, count: int) -> list[Contact]:
        """The ``count`` known peers nearest to ``target``, nearest first."""
        goal = int.from_bytes(target, "big")
        found: list[Contact] = []
        for group in self._groups_by_distance(target):
            found += group
            if len(found) >= count:
                break
        return heapq.nsmallest(count, found, key=lambda contact: int.from_bytes(contact.id, "big") ^ goal)

    def _groups_by_distance(self, target: bytes) -> Iterator[list[Contact]]:
        """Contacts in groups, every member of a group nearer to ``target`` than any of the next.

        With c the bits that ``target`` shares with us: bucket c shares more than c bits with ``target``, all
        later buckets share exactly c, and each earlier bucket i shares i.
        """
        shared = common_bits(self._me, target)
        buckets = self._buckets
        if shared in buckets:
            yield list(buckets[shared].contacts.values())
        yield [contact for i in buckets if i > shared for contact in buckets[i].contacts.values()]
        for i in sorted((i for i in buckets if i < shared), reverse=True):
            yield list(buckets[i].contacts.values())

    def refresh_targets(self, now: float, *, older_than_s: float, rng: random.Random) -> list[bytes]:
        """A random id in the range of each bucket that nobody was heard from for ``older_than_s``."""
        stale = [i for i, bucket in self._buckets.items() if now - bucket.touched_at >= older_than_s]
        return [self._random_id(i, rng) for i in stale]

    def _random_id(self, bucket: int, rng: random.Random) -> bytes:
        free_bits = ID_BITS - bucket - 1
        flipped = int.from_bytes(self._me, "big") ^ (1 << free_bits)
        return (flipped >> free_bits << free_bits | rng.getrandbits(free_bits)).to_bytes(ID_BITS // 8, "big")

    def check_invariants(self) -> None:
        """Raise AssertionError if a contact is in the wrong bucket or a bucket is over its size."""
        for i, bucket in self._buckets.items():
            assert len(bucket.contacts) <= self._bucket_size and len(bucket.replacements) <= self._bucket_size
            for peer in [*bucket.contacts, *bucket.replacements]:
                assert common_bits(self._me, peer) == i
            assert not bucket.contacts.keys() & (bucket.replacements.keys() | self.lost.keys())
        assert self.lost.keys() <= self._failures.keys() and len(self.lost) <= MAX_LOST
