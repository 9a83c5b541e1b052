"""Meetings: peers that call at about the same time all get the same group, without a fixed membership.

A ready peer publishes in the DHT the number of the meeting that it waits for: swarm time in milliseconds. All peers
take the lowest published number. The meeting starts when the first peer has waited for the window, or when all peers
of the last meeting are back. Its organizer then calls the others, which ends their waiting too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

import msgspec

from colab_swarm.averaging.group import Group, GroupFormationSettings, RoundRefused, Ticket, equal_shares
from colab_swarm.averaging.matchmaking import Matchmaker, PrefixRouter
from colab_swarm.dht.service import DHT
from colab_swarm.errors import PeerError
from colab_swarm.net.peers import Message, PeerId

logger = logging.getLogger(__name__)

LOOK_S = 0.25
TTL_S = 30.0
TIMEOUT_S = 60.0
SKEW_MS = 600_000
"""Ignore a number that is further from this peer's own time."""


class WaitingPeer(Message, frozen=True):
    """DHT record, signed, under the peer's own subkey: the peer waits for the meeting ``number``."""

    number: int
    addresses: tuple[str, ...]


class Assembly:
    """One peer's part in the meetings of a name.

    Args:
        window_s: how long the first peer waits for others.

    Attributes:
        number: the meeting that this peer waits for, or took part in last.
    """

    def __init__(self, router: PrefixRouter, dht: DHT, prefix: str, *, window_s: float) -> None:
        self._peers, self._dht = router.peers, dht
        self._prefix, self._window_s = prefix, window_s
        self._matchmaker = Matchmaker(
            router,
            prefix,
            expected=self._expected,
            on_called=self._on_called,
            strategy=equal_shares,  # a meeting averages nothing
            settings=GroupFormationSettings(window_s=2.0, slack_s=1.0, call_timeout_s=5.0),
        )
        self.number = self._last = 0
        self._terms: Ticket | None = None  # while this peer waits
        self._called = asyncio.Event()
        self._joining = False
        self._before: frozenset[PeerId] = frozenset()
        self._withdrawing: asyncio.Task[None] | None = None

    def close(self) -> None:
        """Take part in no more meetings."""
        self._matchmaker.close()
        if self._withdrawing is not None:
            self._withdrawing.cancel()

    async def meet(self, numel: int, schema: bytes, vote: Callable[[int], int]) -> Group:
        """Wait for other peers and return the group, which is the same at all its members.

        Args:
            numel, schema: description of the vector to average; it must be the same for all.
            vote: ``vote(peers)`` returns a number for all members to see: this peer's weight in the group.

        Raises:
            RoundRefused: no peer to meet, or the others average another vector.
        """
        deadline = _now() + self._window_s + TIMEOUT_S
        try:
            while True:
                try:
                    group = await self._meet_once(numel, schema, vote, deadline)
                except RoundRefused as refusal:
                    if refusal.reason != "late" or _now() >= deadline:
                        raise
                    logger.info("too late for meeting %d: %s", self.number, refusal)
                else:
                    self._before = frozenset(member.id for member in group.members)
                    return group
        finally:
            self._withdrawing = asyncio.create_task(self._publish(ttl_s=0.5))

    async def _meet_once(
        self, numel: int, schema: bytes, vote: Callable[[int], int], deadline: float
    ) -> Group:
        self._last, own = self.number, max(int(self._peers.time() * 1000), self.number + 1)
        self.number, reduces = own, bool(self._peers.contact.addresses)
        self._terms = Ticket(self._prefix, own, b"", 1.0, numel, schema, reduces)
        self._called.clear()
        try:
            others = await self._wait(own)
            self._joining = True
            weight = float(vote(len(others) + 1))
            ticket = msgspec.structs.replace(self._terms, step=self.number, weight=weight)
            return await self._matchmaker.join(ticket, others, deadline)
        finally:
            self._terms, self._joining = None, False

    async def _wait(self, own: int) -> list[PeerId]:
        """Return the other waiting peers when the meeting starts."""
        begun, published = _now(), 0
        while True:
            if published != self.number:
                published = self.number
                await self._publish(ttl_s=self._window_s + TTL_S)
            waiting = await self._read()
            if not self._called.is_set():
                self.number = min([own, *waiting.values()])
            back = self._before and self._before <= {*waiting, self._peers.id}
            if self._called.is_set() or back or _now() - begun >= self._window_s:
                return sorted(waiting)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._called.wait()

    def _on_called(self, terms: Ticket, caller: PeerId) -> float | None:
        own = self._terms
        if own is None or (own.numel, own.schema) != (terms.numel, terms.schema):
            return None
        if terms.step != self.number:
            if self._joining or self._called.is_set() or not self._plausible(terms.step):
                return None
            self.number = terms.step
        self._called.set()
        return 0.0

    async def _expected(self, step: int, lineage: bytes) -> Sequence[PeerId]:
        """Return the waiting peers and those of the last meeting, whose records may be late."""
        return sorted({*await self._read(), *self._before & self._peers.linked()})

    def _plausible(self, number: int) -> bool:
        return number > self._last and abs(number - self._peers.time() * 1000) < SKEW_MS

    async def _publish(self, *, ttl_s: float) -> None:
        record = WaitingPeer(self.number, self._peers.contact.addresses)
        try:
            await self._dht.publish(self._prefix, record, ttl_s=ttl_s)
        except PeerError as error:
            logger.info("could not publish that this peer waits: %s", error)

    async def _read(self) -> dict[PeerId, int]:
        """Return the other waiting peers, and the meeting that each waits for."""
        try:
            records = await self._dht.published(self._prefix, WaitingPeer)
        except PeerError as error:
            logger.info("could not read the waiting peers: %s", error)
            return {}
        records.pop(self._peers.id, None)
        return {peer: other.number for peer, other in records.items() if self._plausible(other.number)}


def _now() -> float:
    return asyncio.get_running_loop().time()
