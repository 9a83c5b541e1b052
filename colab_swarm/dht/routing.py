"""Routing table and lookups of Kademlia over 256-bit ids (Maymounkov & Mazieres 2002). Free of I/O.

Bucket i holds peers whose id shares exactly i leading bits with ours, least recently seen first
(section 2.2). A contact that still answers is never replaced: peers with a long uptime tend to
stay.

A lookup (section 2.3) has no barrier between rounds. A query older than ``patience_s`` is slow:
until it is answered, it frees its place among the ``alpha``, and its peer does not count among the
nearest. The lookup is done when the ``width`` nearest others have answered; if there are fewer,
slow queries get `GRACE` times the patience.
"""

import bisect
import heapq
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from colab_swarm.net.peers import Contact, PeerId

ID_BITS = 256
MAX_LOST = 100
MAX_RETRIES = 20  # failures of a lost peer after which it is dropped for good
MAX_FAILURES = 2  # in a row, then a peer is dropped; one is enough if a replacement waits


def distance(one: bytes, other: bytes) -> int:
    """Return Kademlia's distance of two ids or keys: their XOR as a number."""
    return int.from_bytes(one, "big") ^ int.from_bytes(other, "big")


def common_bits(one: bytes, other: bytes) -> int:
    """Return how many leading bits two ids share."""
    return ID_BITS - distance(one, other).bit_length()


@dataclass(slots=True)
class _Bucket:
    contacts: dict[PeerId, Contact] = field(default_factory=dict)  # in the order of last contact
    replacements: dict[PeerId, Contact] = field(default_factory=dict)
    touched_at: float = 0.0


class RoutingTable:
    """The contacts of the peer ``me``, at most ``bucket_size`` (the paper's k) per bucket."""

    def __init__(self, me: PeerId, *, bucket_size: int = 20) -> None:
        self._me, self._bucket_size = me, bucket_size
        self._buckets: dict[int, _Bucket] = {}
        self._failures: dict[PeerId, int] = {}
        self.lost: dict[PeerId, Contact] = {}  # dropped last; after a partition they lead back

    def __len__(self) -> int:
        return sum(len(bucket.contacts) for bucket in self._buckets.values())

    def __contains__(self, peer: PeerId) -> bool:
        bucket = self._buckets.get(common_bits(self._me, peer))
        return bucket is not None and peer in bucket.contacts

    def __iter__(self) -> Iterator[Contact]:
        for bucket in self._buckets.values():
            yield from bucket.contacts.values()

    def saw(self, contact: Contact, now: float) -> bool:
        """Note that a peer was heard from; return True if it is new. Only dialable peers enter."""
        if contact.id == self._me or not contact.direct:
            self._forget(contact.id)  # it could be dialled once
            return False
        bucket = self._buckets.setdefault(common_bits(self._me, contact.id), _Bucket())
        bucket.touched_at = now
        self._failures.pop(contact.id, None)
        self.lost.pop(contact.id, None)
        bucket.replacements.pop(contact.id, None)
        known = bucket.contacts.pop(contact.id, None) is not None
        if known or len(bucket.contacts) < self._bucket_size:
            bucket.contacts[contact.id] = contact
            return not known
        bucket.replacements[contact.id] = contact
        if len(bucket.replacements) > self._bucket_size:
            del bucket.replacements[next(iter(bucket.replacements))]
        return False

    def failed(self, peer: PeerId) -> None:
        """Note that a peer did not answer; repeated failures replace it."""
        bucket = self._buckets.get(common_bits(self._me, peer))
        if bucket is None or not (peer in bucket.contacts or peer in self.lost):
            return
        self._failures[peer] = self._failures.get(peer, 0) + 1
        if peer in self.lost:
            if self._failures[peer] >= MAX_RETRIES:
                del self._failures[peer], self.lost[peer]
        elif bucket.replacements or self._failures[peer] >= MAX_FAILURES:
            self._failures[peer] = 0
            self.lost[peer] = self._replace(bucket, peer)
            if len(self.lost) > MAX_LOST:
                oldest = next(iter(self.lost))
                del self.lost[oldest], self._failures[oldest]

    def _forget(self, peer: PeerId) -> None:
        self._failures.pop(peer, None)
        self.lost.pop(peer, None)
        bucket = self._buckets.get(common_bits(self._me, peer))
        if bucket is not None:
            bucket.replacements.pop(peer, None)
            if peer in bucket.contacts:
                self._replace(bucket, peer)

    def _replace(self, bucket: _Bucket, peer: PeerId) -> Contact:
        removed = bucket.contacts.pop(peer)
        if bucket.replacements:
            newest, contact = bucket.replacements.popitem()
            bucket.contacts[newest] = contact
        return removed

    def nearest(self, target: bytes, count: int) -> list[Contact]:
        """Return the ``count`` known peers nearest to ``target``, nearest first."""
        goal = int.from_bytes(target, "big")
        found: list[Contact] = []
        for group in self._groups_by_distance(target):
            found += group
            if len(found) >= count:
                break
        return heapq.nsmallest(count, found, key=lambda contact: int.from_bytes(contact.id, "big") ^ goal)

    def _groups_by_distance(self, target: bytes) -> Iterator[list[Contact]]:
        """Yield contacts in groups, each nearer to ``target`` than all of the next."""
        # The target shares c bits with us. Bucket c shares more with it, later ones c, an earlier i.
        shared, buckets = common_bits(self._me, target), self._buckets
        if shared in buckets:
            yield list(buckets[shared].contacts.values())
        yield [contact for i in buckets if i > shared for contact in buckets[i].contacts.values()]
        for i in sorted((i for i in buckets if i < shared), reverse=True):
            yield list(buckets[i].contacts.values())

    def refresh_targets(self, now: float, *, older_than_s: float, rng: random.Random) -> list[bytes]:
        """Return a random id in the range of each bucket without contact for ``older_than_s``."""
        targets: list[bytes] = []
        for i, bucket in self._buckets.items():
            if now - bucket.touched_at >= older_than_s:
                free_bits = ID_BITS - i - 1
                flipped = int.from_bytes(self._me, "big") ^ (1 << free_bits)
                id = flipped >> free_bits << free_bits | rng.getrandbits(free_bits)
                targets.append(id.to_bytes(ID_BITS // 8, "big"))
        return targets


GRACE = 4
MIN_PATIENCE_S = 0.2  # A busy notebook cell delays answers by as much


@dataclass(slots=True, eq=False)
class _Candidate:
    contact: Contact
    hops: int
    asked_at: float = math.inf
    answered: bool | None = None  # None: not yet; False: it failed

    @property
    def awaited(self) -> bool:
        return self.asked_at < math.inf and self.answered is None


class Lookup:
    """Search for the ``width`` peers nearest to ``target``; raise ``width`` to continue one that is done."""

    def __init__(
        self, target: bytes, seeds: Iterable[Contact], *, width: int, alpha: int, patience_s: float = 1.0
    ) -> None:
        self.target, self.calls = target, 0
        self.width, self._alpha, self._patience_s = width, alpha, patience_s
        self._candidates: dict[PeerId, _Candidate] = {}
        self._by_distance: list[tuple[int, _Candidate]] = []
        self._add(seeds, hops=1)

    def _add(self, contacts: Iterable[Contact], *, hops: int) -> None:
        for contact in contacts:
            if contact.id not in self._candidates:
                candidate = self._candidates[contact.id] = _Candidate(contact, hops)
                entry = (distance(contact.id, self.target), candidate)
                bisect.insort(self._by_distance, entry, key=lambda entry: entry[0])

    def next_queries(self, now: float) -> list[Contact]:
        """Return the peers to query now; they count as in flight until `on_answer`."""
        window = self._window(now)
        places = self._alpha - sum(candidate.awaited for candidate in window)
        chosen = [candidate for candidate in window if candidate.asked_at == math.inf][: max(0, places)]
        for candidate in chosen:
            candidate.asked_at = now
        self.calls += len(chosen)
        return [candidate.contact for candidate in chosen]

    def on_answer(self, peer: PeerId, closer: Iterable[Contact] | None) -> None:
        """Note that ``peer`` answered and named ``closer`` peers; None if it will not answer."""
        candidate = self._candidates[peer]
        candidate.answered = closer is not None
        self._add(closer or (), hops=candidate.hops + 1)

    def done(self, now: float) -> bool:
        window = self._window(now)
        if not all(candidate.answered for candidate in window):
            return False
        if len(window) == self.width:
            return True
        # too few: wait for slow queries, without any answer as long as it takes
        return not any(not window or now < at + self._patience_s * GRACE for at in self._in_flight())

    def wake_at(self, now: float) -> float | None:
        """Return when the next query gets slow or hopeless; None if only a reply helps."""
        limits = [at + self._patience_s * factor for at in self._in_flight() for factor in (1, GRACE)]
        return min((at for at in limits if at > now), default=None)

    def _in_flight(self) -> list[float]:
        return [c.asked_at for c in self._candidates.values() if c.awaited]

    def nearest(self, count: int) -> list[Contact]:
        """Return the peers nearest to the target that answered, nearest first."""
        return [c.contact for _, c in self._by_distance if c.answered][:count]

    def hops(self, peer: PeerId) -> int:
        """Return how many queries in a row led to the answer of ``peer``; 1 for a seed."""
        return self._candidates[peer].hops

    def known(self, peer: PeerId) -> Contact | None:
        return self._candidates[peer].contact if peer in self._candidates else None

    def _window(self, now: float) -> list[_Candidate]:
        window: list[_Candidate] = []
        for _, candidate in self._by_distance:
            slow = candidate.answered is None and now >= candidate.asked_at + self._patience_s
            if candidate.answered is not False and not slow:
                window.append(candidate)
                if len(window) == self.width:
                    break
        return window


@dataclass
class Patience:
    """How long an answer may take before its query is slow: mean plus four deviations (RFC 6298)."""

    _mean_s: float | None = None
    _deviation_s: float = 0.0

    def learn(self, rtt_s: float) -> None:
        if self._mean_s is None:
            self._mean_s, self._deviation_s = rtt_s, rtt_s / 2
            return
        self._deviation_s += (abs(rtt_s - self._mean_s) - self._deviation_s) / 4
        self._mean_s += (rtt_s - self._mean_s) / 8

    @property
    def seconds(self) -> float:
        return 1.0 if self._mean_s is None else max(MIN_PATIENCE_S, self._mean_s + 4 * self._deviation_s)
