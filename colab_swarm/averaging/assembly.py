"""A meeting: the peers that call for it at about the same time become one group.

A ready peer publishes the number of the meeting that it waits for (swarm time in milliseconds) in the
DHT, and all take the lowest. The meeting starts when the first peer has waited for the window, or all
peers of the last meeting are back; with a fixed size, only once that many wait on the same terms. Its
organizer calls the others, which ends their waiting too. A peer that waits longer takes a new number, so
its record is no leftover.
"""

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from colab_swarm.averaging.group import (
    Group,
    GroupFormationSettings,
    RoundRefused,
    RoundTerms,
    Ticket,
    equal_shares,
)
from colab_swarm.averaging.matchmaking import Matchmaker
from colab_swarm.averaging.memory import SwarmView
from colab_swarm.averaging.router import PrefixRouter
from colab_swarm.dht.service import DHT
from colab_swarm.errors import PeerError
from colab_swarm.net.peers import Message, PeerId, short
from colab_swarm.runtime import loop_now, wait_until

logger = logging.getLogger(__name__)

WINDOW_S = 5.0  # how long the first peer of a meeting waits for others
_LOOK_S = 0.25
_TTL_S = 30.0
_SKEW_MS = 600_000  # ignore a number that is further from this peer's own time
QUICK = GroupFormationSettings(window_s=2.0, slack_s=1.0, call_timeout_s=5.0)


class WaitingPeer(Message, frozen=True):
    """DHT record: the peer waits for the meeting ``number``."""

    number: int
    addresses: tuple[str, ...]
    terms: str = ""  # what all members of a fixed size must agree on
    at: float = 0.0  # its swarm time when it wrote this


class Meeting:
    """Which meeting this peer waits for, and who else does; a pure core. ``now_ms`` is swarm time.

    Attributes:
        number: of the meeting that this peer waits for, or took part in last. `begin` takes a new one,
            `take_lowest` another's lower one, and `on_called` the caller's.
        waiting: the other peers as last read, and the meetings that they wait for (`on_records`).
        called: True from an organizer's call (`on_called`) until this peer begins again.
    """

    def __init__(self, me: PeerId, size: int | None, terms: str) -> None:
        self._me = me
        self._size = size
        self._terms = terms
        self.number = 0
        self.waiting: dict[PeerId, int] = {}
        self.called = False
        self._own = 0  # the number that `begin` took
        self._last = 0  # the last meeting in which this peer looked for its group; set by `end`
        self._waits_for: RoundTerms | None = None  # from `begin` to `end`
        self._joining = False  # from `join` to `end`
        self._before: frozenset[PeerId] = frozenset()  # members of the last group; set by `on_group`
        self._others: dict[PeerId, float] = {}  # peers with other terms: when they wrote first

    def begin(self, terms: RoundTerms, now_ms: float) -> None:
        """Wait for a new meeting on ``terms``, whose step becomes its number."""
        self.number = max(int(now_ms), self.number + 1)
        self._own = self.number
        self._waits_for = msgspec.structs.replace(terms, step=self.number)
        self.called = False

    def on_records(self, records: Mapping[PeerId, WaitingPeer], now_ms: float) -> None:
        """Take the others' records; raises ValueError if a waiting peer has other terms."""
        waiting = {}
        for peer, record in records.items():
            if peer != self._me and self._agrees(peer, record) and self._plausible(record.number, now_ms):
                waiting[peer] = record.number
        self.waiting = waiting

    def _agrees(self, peer: PeerId, record: WaitingPeer) -> bool:
        if self._size is None or record.terms == self._terms:
            return True
        # Its first record may be a leftover.
        if self._others.setdefault(peer, record.at) != record.at:
            raise ValueError(
                f"{short(peer)} has other settings: {record.terms[:512]!r}; this peer: {self._terms!r}. "
                "Give all peers the same settings"
            )
        return False

    def _plausible(self, number: int, now_ms: float) -> bool:
        return number > self._last and abs(number - now_ms) < _SKEW_MS

    def take_lowest(self) -> None:
        """Wait for the lowest meeting of all waiting peers, unless this one was called to another."""
        if not self.called:
            self.number = min([self._own, *self.waiting.values()])

    @property
    def complete(self) -> bool:
        """True if nobody else is awaited."""
        if self._size is not None:
            return 1 + len(self.waiting) >= self._size
        return bool(self._before) and self._before <= {*self.waiting, self._me}

    def on_called(self, terms: RoundTerms, now_ms: float) -> bool:
        """Take an organizer's call to a meeting; returns whether this peer comes."""
        own = self._waits_for
        if own is None or msgspec.structs.replace(own, step=terms.step) != terms:
            return False
        if terms.step != self.number:
            if self._joining or self.called or not self._plausible(terms.step, now_ms):
                return False
            self.number = terms.step
        self.called = True
        return True

    def join(self) -> RoundTerms:
        """Stay with this number; returns the terms of the meeting's group."""
        assert self._waits_for is not None
        self._joining = True
        return msgspec.structs.replace(self._waits_for, step=self.number)

    def end(self) -> None:
        """Wait no more."""
        if self._joining:
            self._last = self.number
        self._waits_for = None
        self._joining = False

    def on_group(self, group: Group) -> None:
        self._before = frozenset(member.id for member in group.members)

    def members_among(self, peers: Iterable[PeerId]) -> frozenset[PeerId]:
        """Return those of ``peers`` that were in the last group."""
        return self._before.intersection(peers)


def _one_vote(peers: int) -> int:
    return 1


class Assembly(SwarmView):
    """One peer's part in the meetings of a name; each has exactly ``size`` members, if it is given.

    All members of a fixed size must agree on ``terms``, readable text. ``timeout_s`` bounds finding
    the group, beyond the window.
    """

    def __init__(
        self,
        router: PrefixRouter,
        dht: DHT,
        prefix: str,
        settings: GroupFormationSettings = QUICK,
        *,
        timeout_s: float = 60.0,
        terms: str = "",
    ) -> None:
        self._peers = router.peers
        self._dht = dht
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._size = settings.size
        self._terms = terms
        self._lineage = b""
        if terms:
            self._lineage = hashlib.sha256(terms.encode()).digest()[:16]
        self._matchmaker = Matchmaker(
            router,
            prefix,
            self,
            strategy=equal_shares,  # a meeting averages nothing
            settings=settings,
        )
        self.meeting = Meeting(self._peers.id, settings.size, terms)
        # Wakes this peer where it waits; set and cleared with ``meeting.called``.
        self._called = asyncio.Event()
        self._withdrawing: asyncio.Task[None] | None = None

    def close(self) -> None:
        self._matchmaker.close()
        if self._withdrawing is not None:
            self._withdrawing.cancel()

    async def meet(self, numel: int, schema: bytes, vote: Callable[[int], int] = _one_vote) -> Group:
        """Wait for other peers and return the group, which is the same at all its members.

        All must give the same ``numel`` and ``schema``; ``vote(peers)`` is this peer's weight in
        the group. Raises RoundRefused without a peer to meet or if the others average another
        vector; with a fixed size only as ``late``, and ValueError if a waiting peer has other
        terms.
        """
        deadline = loop_now() + WINDOW_S + self._timeout_s
        terms = RoundTerms(self._prefix, 0, self._lineage, numel, schema)
        try:
            while True:
                try:
                    group = await self._meet_once(terms, vote, deadline)
                except RoundRefused as refusal:
                    if self._is_final(refusal) or loop_now() >= deadline:
                        raise
                    logger.debug("no group in meeting %d: %s", self.meeting.number, refusal)
                else:
                    self.meeting.on_group(group)
                    return group
        finally:
            self._withdrawing = asyncio.create_task(self.publish())

    def _is_final(self, refusal: RoundRefused) -> bool:
        """A full group of a fixed size stays full. Without a size, a late peer comes to the next meeting."""
        late = refusal.reason == "late"
        if self._size is None:
            return not late
        return late

    async def _meet_once(self, terms: RoundTerms, vote: Callable[[int], int], deadline: float) -> Group:
        self.meeting.begin(terms, self._now_ms())
        self._called.clear()
        try:
            others = await self._wait()
            terms = self.meeting.join()
            weight = float(vote(len(others) + 1))
            reduces = bool(self._peers.contact.addresses)
            ticket = Ticket(terms, weight, reduces)
            others |= self._matchmaker.likely(*terms.key)
            return await self._matchmaker.join(ticket, sorted(others), deadline)
        finally:
            self.meeting.end()

    async def _wait(self) -> set[PeerId]:
        """Wait until the meeting starts; returns the other peers that wait."""
        meeting = self.meeting
        begun = loop_now()
        published = 0
        while True:
            if published != meeting.number:
                published = meeting.number
                await self.publish(ttl_s=WINDOW_S + _TTL_S)
            await self._read()
            meeting.take_lowest()
            others = set(meeting.waiting)
            if meeting.complete or meeting.called:
                return others
            if loop_now() - begun >= WINDOW_S:
                if self._size is None:
                    return others
                raise RoundRefused("unreachable", f"{1 + len(others)} of {self._size} peers wait")
            await wait_until(loop_now() + _LOOK_S, self._called)

    def on_called(self, terms: RoundTerms, caller: PeerId) -> float | None:
        if not self.meeting.on_called(terms, self._now_ms()):
            return None
        self._called.set()
        return 0.0

    async def expected(self, step: int, lineage: bytes) -> Sequence[PeerId]:
        known = self.meeting.members_among(self._peers.linked()) | self._matchmaker.likely(step, lineage)
        await self._read()
        return sorted({*self.meeting.waiting, *known})

    def _now_ms(self) -> float:
        return self._peers.time() * 1000

    async def publish(self, *, ttl_s: float = 0.5) -> None:
        """Publish that this peer waits, for ``ttl_s``; by default, that it no longer does."""
        peers = self._peers
        record = WaitingPeer(self.meeting.number, peers.contact.addresses, self._terms, peers.time())
        try:
            await self._dht.publish(self._prefix, record, ttl_s=ttl_s)
        except PeerError as error:
            logger.info("could not publish that this peer waits: %s", error)

    async def _read(self) -> None:
        with contextlib.suppress(PeerError):  # it is soon read again
            records = await self._dht.published(self._prefix, WaitingPeer)
            self.meeting.on_records(records, self._now_ms())
