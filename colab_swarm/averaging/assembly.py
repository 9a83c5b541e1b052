"""A meeting: the peers that call for it at about the same time become one group.

Each waiting peer publishes in the DHT since when it waits. Of the peers that can be dialled, the peer that has waited
longest organizes. Each other peer opens a stream to it immediately (see `rendezvous`). The meeting closes when all
awaited peers have come, or at a fixed time. After that all peers leave the organizer, so a late peer takes part in the
next meeting.
"""

import asyncio
import hashlib
import logging
import math
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec

from colab_swarm.averaging.forming import FormationSettings
from colab_swarm.averaging.group import Group, RoundRefused, RoundTerms, Strategy, Ticket, equal_shares
from colab_swarm.averaging.rendezvous import Rendezvous
from colab_swarm.averaging.router import PrefixRouter
from colab_swarm.dht.service import DHT
from colab_swarm.errors import PeerError
from colab_swarm.net.peers import Contact, Message, PeerId, short
from colab_swarm.runtime import loop_now

logger = logging.getLogger(__name__)

WINDOW_S = 5.0  # from the first ticket of a meeting until it closes
_TELL_S = 5.0  # between two records of a peer that waits
_TTL_S = 30.0
_READ_S = 0.25  # between two readings of the records
_LATER_S = 1.0  # if a record was written this long after the last meeting, its peer was not in that meeting


class WaitingPeer(Message, frozen=True):
    """DHT record: the peer waits for a meeting."""

    since: float  # swarm time; infinite if it does not wait any more
    addresses: tuple[str, ...]
    terms: str = ""  # what all members must agree on
    told_at: float = 0.0  # swarm time when the peer wrote this record


class Gathering:
    """Finds one group. Within this async context manager, the peer has a stream open to the group's organizer.

    Attributes:
        group: the group, once it has formed. This peer is not in it if its ticket came too late.
    """

    def __init__(
        self,
        router: PrefixRouter,
        settings: FormationSettings,
        organizers: Callable[[], Coroutine[Any, Any, Sequence[Contact]]],
    ) -> None:
        self.terms = settings.terms
        self.organizers = organizers
        self.group: asyncio.Future[Group] = asyncio.get_running_loop().create_future()
        self._rendezvous = Rendezvous(router, settings.terms.prefix, settings, self)
        self._rendezvous.share.step, self._rendezvous.share.lineage = settings.terms.key

    async def __aenter__(self) -> Self:
        self._rendezvous.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._rendezvous.leave()
        self._rendezvous.close()

    def offer(self, ticket: Ticket) -> None:
        """Take part in the group with this ticket."""
        self._rendezvous.share.ticket = ticket
        self._rendezvous.tell()

    # What the rendezvous asks and tells.

    def live(self) -> Collection[PeerId]:
        return ()

    def helpers(self) -> Collection[PeerId]:
        return ()

    def on_group(self, group: Group, *, contributes: bool) -> None:
        if not self.group.done():
            self.group.set_result(group)

    def on_granted(self) -> None:
        pass


class Assembly:
    """One peer's part in the meetings of one ``prefix``; ``size`` is the exact number of members, None for any.

    Attributes:
        waiting: the records, as last read, of the peers that wait for a meeting with equal terms,
            including this peer.
    """

    def __init__(
        self,
        router: PrefixRouter,
        dht: DHT,
        prefix: str,
        strategy: Strategy = equal_shares,
        *,
        size: int | None = None,
    ) -> None:
        self._router = router
        self._peers = router.peers
        self._dht = dht
        self._prefix = prefix
        self._strategy = strategy
        self._size = size
        self._own = WaitingPeer(math.inf, ())
        self.waiting: dict[PeerId, WaitingPeer] = {}
        self._others: dict[PeerId, float] = {}  # peers with other terms: time of the first record
        self._known = asyncio.Event()  # the records have been read
        self._awaited: set[PeerId] = set()  # members of the last meeting, and peers that came too late for it
        self._ended_at = -math.inf  # when the last meeting ended, in swarm time
        self._telling: asyncio.Task[None] | None = None  # publishes that this peer does not wait any more

    def close(self) -> None:
        if self._telling is not None:
            self._telling.cancel()

    async def meet(self, terms: str = "", weight: float = 0.0) -> Group:
        """Wait for other peers and return the group, which is the same at all its members.

        Peers with the same ``terms``, a readable text, meet. ``weight`` is this peer's weight in the group. Without a
        size, a peer that no other peer joins is alone in its group. With a size, this call waits without a time limit,
        raises ValueError if a waiting peer has other terms, and raises RoundRefused if the group is full.
        """
        self.close()
        self._own = WaitingPeer(self._peers.time(), self._peers.contact.addresses, terms)
        self._others = {}
        self._known.clear()
        awaited = frozenset(self._awaited)
        self._awaited = set()
        watching = asyncio.create_task(self._watch())
        try:
            while True:
                group = await self._gather(weight, awaited, watching)
                if group.index_of(self._peers.id) is not None:
                    self._awaited.update(member.id for member in group.members)
                    self._ended_at = self._peers.time()
                    return group
                if self._size is not None:
                    raise RoundRefused("late", f"{self._size} other peers have met")
        finally:
            watching.cancel()
            self._own = msgspec.structs.replace(self._own, since=math.inf)
            self._telling = asyncio.create_task(self._tell(_TTL_S))

    async def _gather(self, weight: float, awaited: frozenset[PeerId], watching: asyncio.Task[None]) -> Group:
        """Return the next group that forms; it may not include this peer."""
        schema = hashlib.sha256(self._own.terms.encode()).digest()[:16]
        terms = RoundTerms(self._prefix, 0, b"", 1, schema)
        window_s = math.inf
        if self._size is None:
            window_s = WINDOW_S
        settings = FormationSettings(
            terms, 0.0, self._strategy, window_s=window_s, size=self._size, awaited=awaited
        )
        async with Gathering(self._router, settings, self.organizers) as gathering:
            gathering.offer(Ticket(terms, weight, bool(self._own.addresses)))
            first: set[asyncio.Future[Any]] = {gathering.group, watching}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()
            return gathering.group.result()

    async def organizers(self) -> Sequence[Contact]:
        """Return the waiting peers that can be dialled, longest wait first; this peer alone if there are none."""
        await self._known.wait()
        waiting = sorted(self.waiting, key=lambda peer: (self.waiting[peer].since, peer))
        contacts = [Contact(peer, self.waiting[peer].addresses) for peer in waiting]
        return [contact for contact in contacts if contact.addresses] or [self._peers.contact]

    # The records.

    async def _watch(self) -> None:
        tell_at = loop_now()
        while True:
            if loop_now() >= tell_at:
                await self._tell(_TTL_S)
                tell_at = loop_now() + _TELL_S
            await self._read()
            self._known.set()
            await asyncio.sleep(_READ_S)

    async def _tell(self, ttl_s: float) -> None:
        self._own = msgspec.structs.replace(self._own, told_at=self._peers.time())
        try:
            await self._dht.publish(self._prefix, self._own, ttl_s=ttl_s)
        except PeerError as error:
            logger.info("could not publish that this peer waits: %s", error)

    async def _read(self) -> None:
        try:
            records = await self._dht.published(self._prefix, WaitingPeer)
        except PeerError as error:
            logger.debug("the records are soon read again: %s", error)
            return
        self._on_records({**records, self._peers.id: self._own})

    def _on_records(self, records: Mapping[PeerId, WaitingPeer]) -> None:
        """Take the records that were read; with a size, raises ValueError if a waiting peer has other terms."""
        self.waiting = {}
        for peer, record in records.items():
            if record.terms == self._own.terms:
                if record.told_at > self._ended_at + _LATER_S:
                    self._awaited.add(peer)
                if math.isfinite(record.since):
                    self.waiting[peer] = record
            # The first record of a peer may be left from an earlier session; a second one shows that the peer waits.
            elif self._size is not None and self._others.setdefault(peer, record.told_at) != record.told_at:
                raise ValueError(
                    f"{short(peer)} has other settings: {record.terms[:512]!r}; this peer: {self._own.terms!r}. "
                    "Give all peers the same settings"
                )
