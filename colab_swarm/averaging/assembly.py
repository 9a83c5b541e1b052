"""Meetings: peers that call at about the same time all get the same group, without a fixed membership.

A ready peer publishes in the DHT the number of the meeting that it waits for: swarm time in milliseconds. All peers
take the lowest published number. The meeting starts when the first peer has waited for the window, or when all peers
of the last meeting are back. Its organizer then calls the others, which ends their waiting too.

A meeting of a fixed size starts as soon as that many peers wait on the same terms, and not before. A peer that waits
longer than the window takes a new number, which also shows that its record is no leftover.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable, Collection, Sequence

import msgspec

from colab_swarm.averaging.group import (
    Group,
    GroupFormationSettings,
    RoundRefused,
    RoundTerms,
    Ticket,
    equal_shares,
)
from colab_swarm.averaging.matchmaking import Matchmaker, PrefixRouter, loop_now
from colab_swarm.dht.service import DHT
from colab_swarm.errors import PeerError
from colab_swarm.net.peers import Message, PeerId, short

logger = logging.getLogger(__name__)

WINDOW_S = 5.0
LOOK_S = 0.25
TTL_S = 30.0
TIMEOUT_S = 60.0
SKEW_MS = 600_000
"""Ignore a number that is further from this peer's own time."""
MAX_TERMS = 512
"""Most characters of another peer's terms in an error."""
QUICK = GroupFormationSettings(window_s=2.0, slack_s=1.0, call_timeout_s=5.0)


class WaitingPeer(Message, frozen=True):
    """DHT record, signed, under the peer's own subkey: the peer waits for the meeting ``number``."""

    number: int
    addresses: tuple[str, ...]
    terms: str = ""  # what all members of a fixed size must agree on
    at: float = 0.0  # its swarm time when it wrote this


class Assembly:
    """One peer's part in the meetings of a name.

    Args:
        settings: of the group's formation; with a ``size``, the group has exactly so many members.
        window_s: how long the first peer waits for others.
        timeout_s: bound on finding the group, beyond the window.
        terms: readable text that all members of a fixed size must agree on.

    Attributes:
        number: the meeting that this peer waits for, or took part in last.
        waiting: the other waiting peers as last read, and the meeting that each waits for.
    """

    def __init__(
        self,
        router: PrefixRouter,
        dht: DHT,
        prefix: str,
        settings: GroupFormationSettings = QUICK,
        *,
        window_s: float = WINDOW_S,
        timeout_s: float = TIMEOUT_S,
        terms: str = "",
    ) -> None:
        self._peers, self._dht = router.peers, dht
        self._prefix, self._window_s, self._timeout_s = prefix, window_s, timeout_s
        self._size, self._terms = settings.size, terms
        self._lineage = hashlib.sha256(terms.encode()).digest()[:16] if terms else b""
        self._matchmaker = Matchmaker(
            router,
            prefix,
            expected=self._expected,
            on_called=self._on_called,
            strategy=equal_shares,  # a meeting averages nothing
            settings=settings,
        )
        self.number = self._last = 0
        self.waiting: dict[PeerId, int] = {}
        self._others: dict[PeerId, float] = {}  # peers with other terms: when they wrote first
        self._waits_for: RoundTerms | None = None  # while this peer waits
        self._called = asyncio.Event()
        self._joining = False
        self._before: frozenset[PeerId] = frozenset()
        self._withdrawing: asyncio.Task[None] | None = None

    def close(self) -> None:
        """Take part in no more meetings."""
        self._matchmaker.close()
        if self._withdrawing is not None:
            self._withdrawing.cancel()

    async def meet(self, numel: int, schema: bytes, vote: Callable[[int], int] = lambda peers: 1) -> Group:
        """Wait for other peers and return the group, which is the same at all its members.

        Args:
            numel, schema: description of the vector to average; it must be the same for all.
            vote: ``vote(peers)`` returns a number for all members to see: this peer's weight in the group.

        Raises:
            RoundRefused: no peer to meet, or the others average another vector; with a fixed size only
                ``late``, when the group was formed without this peer.
            ValueError: with a fixed size, another waiting peer has other terms.
        """
        deadline = loop_now() + self._window_s + self._timeout_s
        try:
            while True:
                try:
                    group = await self._meet_once(numel, schema, vote, deadline)
                except RoundRefused as refusal:
                    if (refusal.reason == "late") is bool(self._size) or loop_now() >= deadline:
                        raise
                    logger.debug("no group in meeting %d: %s", self.number, refusal)
                else:
                    self._before = frozenset(member.id for member in group.members)
                    return group
        finally:
            self._withdrawing = asyncio.create_task(self.publish())

    async def _meet_once(
        self, numel: int, schema: bytes, vote: Callable[[int], int], deadline: float
    ) -> Group:
        self.number = own = max(int(self._peers.time() * 1000), self.number + 1)
        self._waits_for = RoundTerms(self._prefix, own, self._lineage, numel, schema)
        self._called.clear()
        try:
            others = await self._wait(own)
            self._joining = True
            terms = msgspec.structs.replace(self._waits_for, step=self.number)
            weight, reduces = float(vote(len(others) + 1)), bool(self._peers.contact.addresses)
            ticket = Ticket(terms, weight, reduces)
            others |= self._matchmaker.likely(*terms.key)
            return await self._matchmaker.join(ticket, sorted(others), deadline)
        finally:
            self._last = self.number if self._joining else self._last
            self._waits_for, self._joining = None, False

    async def _wait(self, own: int) -> set[PeerId]:
        """Return the other waiting peers when the meeting starts."""
        begun, published = loop_now(), 0
        while True:
            if published != self.number:
                published = self.number
                await self.publish(ttl_s=self._window_s + TTL_S)
            waiting = await self._read()
            if not self._called.is_set():
                self.number = min([own, *waiting.values()])
            if self._called.is_set() or self._complete(waiting.keys()):
                return set(waiting)
            if loop_now() - begun >= self._window_s:
                if self._size is None:
                    return set(waiting)
                raise RoundRefused("unreachable", f"{1 + len(waiting)} of {self._size} peers wait")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._called.wait()

    def _complete(self, waiting: Collection[PeerId]) -> bool:
        """Return True if no other peer is waited for."""
        if self._size is not None:
            return 1 + len(waiting) >= self._size
        return bool(self._before) and self._before <= {*waiting, self._peers.id}

    def _on_called(self, terms: RoundTerms, caller: PeerId) -> float | None:
        own = self._waits_for
        if own is None or msgspec.structs.replace(own, step=terms.step) != terms:
            return None
        if terms.step != self.number:
            if self._joining or self._called.is_set() or not self._plausible(terms.step):
                return None
            self.number = terms.step
        self._called.set()
        return 0.0

    async def _expected(self, step: int, lineage: bytes) -> Sequence[PeerId]:
        """Return the waiting peers, those that called, and those of the last meeting: a record may be late."""
        known = self._before & self._peers.linked() | self._matchmaker.likely(step, lineage)
        return sorted({*await self._read(), *known})

    def _plausible(self, number: int) -> bool:
        return number > self._last and abs(number - self._peers.time() * 1000) < SKEW_MS

    async def publish(self, *, ttl_s: float = 0.5) -> None:
        """Publish that this peer waits, for ``ttl_s``; by default, that it no longer does."""
        peers = self._peers
        record = WaitingPeer(self.number, peers.contact.addresses, self._terms, peers.time())
        try:
            await self._dht.publish(self._prefix, record, ttl_s=ttl_s)
        except PeerError as error:
            logger.info("could not publish that this peer waits: %s", error)

    async def _read(self) -> dict[PeerId, int]:
        """Return the other peers that wait on the same terms, and the meeting that each waits for."""
        try:
            records = await self._dht.published(self._prefix, WaitingPeer)
        except PeerError as error:
            logger.info("could not read the waiting peers: %s", error)
            return self.waiting
        records.pop(self._peers.id, None)
        self.waiting = {
            peer: record.number
            for peer, record in records.items()
            if self._agrees(peer, record) and self._plausible(record.number)
        }
        return self.waiting

    def _agrees(self, peer: PeerId, record: WaitingPeer) -> bool:
        """Return True for equal terms; raises ValueError for other ones that are no leftover."""
        if self._size is None or record.terms == self._terms:
            return True
        if self._others.setdefault(peer, record.at) != record.at:
            raise ValueError(
                f"{short(peer)} has other settings: {record.terms[:MAX_TERMS]!r}; this peer: {self._terms!r}. "
                "Give all peers the same settings"
            )
        return False
