"""Routing table and lookups of Kademlia over 256-bit ids (Maymounkov & Mazieres 2002). Free of I/O.

Bucket i holds peers whose id shares exactly i leading bits with this peer's id, least recently seen first (section
2.2). The table never replaces a contact that still answers, because peers with a long uptime tend to stay.

A lookup (section 2.3) has no barrier between rounds. A query is slow if it is older than ``patience_s``. Until a slow
query is answered, another query takes its place among the ``alpha`` queries in flight, and the slow peer does not count
among the nearest peers. The lookup is done when the ``width`` nearest other peers have answered. If there are fewer
peers, slow queries get `GRACE` times the patience.
"""

import bisect
import heapq
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from colab_swarm.net.peers import Contact, PeerId

ID_BITS = 256
BUCKET_SIZE = 20  # contacts per bucket and in a reply (Kademlia's k)
MAX_LOST = 100
MAX_RETRIES = 20  # a lost peer is forgotten after this many failures
MAX_FAILURES = 2  # a peer is dropped from the table after this many failures in a row


def distance(one: bytes, other: bytes) -> int:
    """Return Kademlia's distance between two ids or keys: their XOR as a number."""
    return int.from_bytes(one, "big") ^ int.from_bytes(other, "big")


def common_bits(one: bytes, other: bytes) -> int:
    """Return how many leading bits two ids share."""
    return ID_BITS - distance(one, other).bit_length()


class RoutingTable:
    """The contacts of the peer ``me``, at most ``bucket_size`` (the paper's k) per bucket."""

    def __init__(self, me: PeerId, *, bucket_size: int = BUCKET_SIZE) -> None:
        self._me = me
        self._bucket_size = bucket_size
        self._buckets: dict[int, dict[PeerId, Contact]] = {}  # in the order of last contact
        self._touched_at: dict[int, float] = {}
        self._failures: dict[PeerId, int] = {}
        self.lost: dict[PeerId, Contact] = {}  # dropped last; after a partition, they lead to the rest

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._buckets.get(common_bits(self._me, peer), ())

    def __iter__(self) -> Iterator[Contact]:
        for bucket in self._buckets.values():
            yield from bucket.values()

    def saw(self, contact: Contact, now: float) -> bool:
        """Note a message of a peer; return True if the peer is new. Only peers that can be dialled enter the table."""
        self._failures.pop(contact.id, None)
        self.lost.pop(contact.id, None)
        shared = common_bits(self._me, contact.id)
        bucket = self._buckets.setdefault(shared, {})
        known = bucket.pop(contact.id, None) is not None  # a known peer could be dialled before
        if contact.id == self._me or not contact.direct:
            return False
        self._touched_at[shared] = now
        if len(bucket) == self._bucket_size:
            return False
        bucket[contact.id] = contact
        return not known

    def failed(self, peer: PeerId) -> None:
        """Note that a peer did not answer. After `MAX_FAILURES` in a row, move the peer to ``lost``."""
        bucket = self._buckets.get(common_bits(self._me, peer), {})
        if not (peer in bucket or peer in self.lost):
            return
        self._failures[peer] = self._failures.get(peer, 0) + 1
        if peer in self.lost:
            if self._failures[peer] >= MAX_RETRIES:
                del self._failures[peer], self.lost[peer]
        elif self._failures[peer] >= MAX_FAILURES:
            self._failures[peer] = 0
            self.lost[peer] = bucket.pop(peer)
            if len(self.lost) > MAX_LOST:
                oldest = next(iter(self.lost))
                del self.lost[oldest], self._failures[oldest]

    def nearest(self, target: bytes, count: int) -> list[Contact]:
        """Return the ``count`` known peers nearest to ``target``, nearest first."""
        goal = int.from_bytes(target, "big")
        return heapq.nsmallest(count, self, key=lambda contact: int.from_bytes(contact.id, "big") ^ goal)

    def refresh_targets(self, now: float, *, older_than_s: float, rng: random.Random) -> list[bytes]:
        """Return a random id in the range of each bucket without contact for ``older_than_s``."""
        me = int.from_bytes(self._me, "big")
        targets = list[bytes]()
        for i, touched_at in self._touched_at.items():
            if now - touched_at >= older_than_s:
                free_bits = ID_BITS - i - 1
                id = (me ^ (1 << free_bits)) >> free_bits << free_bits | rng.getrandbits(free_bits)
                targets.append(id.to_bytes(ID_BITS // 8, "big"))
        return targets


GRACE = 4
MIN_PATIENCE_S = 0.2  # a busy notebook cell delays answers by this much


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
    """A search for the ``width`` peers nearest to ``target``. To continue a finished search, raise ``width``."""

    def __init__(
        self, target: bytes, seeds: Iterable[Contact], *, width: int, alpha: int, patience_s: float = 1.0
    ) -> None:
        self.target = target
        self.calls = 0
        self.width = width
        self._alpha = alpha
        self.patience_s = patience_s
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
        """Return the peers to query now. Their queries count as in flight until `on_answer`."""
        window = self._window(now)
        places = self._alpha - sum(candidate.awaited for candidate in window)
        chosen = [candidate for candidate in window if candidate.asked_at == math.inf][: max(0, places)]
        for candidate in chosen:
            candidate.asked_at = now
        self.calls += len(chosen)
        return [candidate.contact for candidate in chosen]

    def on_answer(self, peer: PeerId, closer: Iterable[Contact] | None) -> None:
        """Note that ``peer`` answered and named ``closer`` peers. If it will not answer, ``closer`` is None."""
        candidate = self._candidates[peer]
        candidate.answered = closer is not None
        self._add(closer or (), hops=candidate.hops + 1)

    def done(self, now: float) -> bool:
        window = self._window(now)
        if not all(candidate.answered for candidate in window):
            return False
        if len(window) == self.width:
            return True
        # Too few answers: wait for slow queries; if there is no answer at all, wait as long as it takes.
        return not any(not window or now < at + self.patience_s * GRACE for at in self._in_flight())

    def wake_at(self, now: float) -> float | None:
        """Return when the next query becomes slow or a grace ends; None if only an answer changes the state."""
        limits = [at + self.patience_s * factor for at in self._in_flight() for factor in (1, GRACE)]
        return min((at for at in limits if at > now), default=None)

    def _in_flight(self) -> list[float]:
        return [c.asked_at for c in self._candidates.values() if c.awaited]

    def nearest(self, count: int) -> list[Contact]:
        """Return the peers nearest to the target that answered, nearest first."""
        return [c.contact for _, c in self._by_distance if c.answered][:count]

    def hops(self, peer: PeerId) -> int:
        """Return how many queries in a row led to the answer of ``peer``. For a seed, this is 1."""
        return self._candidates[peer].hops

    def _window(self, now: float) -> list[_Candidate]:
        window: list[_Candidate] = []
        for _, candidate in self._by_distance:
            slow = candidate.answered is None and now >= candidate.asked_at + self.patience_s
            if candidate.answered is not False and not slow:
                window.append(candidate)
                if len(window) == self.width:
                    break
        return window
