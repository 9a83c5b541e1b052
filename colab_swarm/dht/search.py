"""The one conversation every lookup has: ask whom the `Lookup` names, learn from who answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from colab_swarm.dht.lookup import Lookup, Patience
from colab_swarm.dht.messages import FindPeers, FoundPeers
from colab_swarm.dht.records import ID_BYTES
from colab_swarm.dht.routing import RoutingTable
from colab_swarm.dht.settings import DHTSettings
from colab_swarm.errors import CallRefused, PeerError
from colab_swarm.net.peers import Contact, Message, PeerId, Peers, R, short

logger = logging.getLogger(__name__)
T = TypeVar("T")
MAX_ADDRESSES = 16
MAX_ADDRESS_CHARS = 800
"""Of all addresses in one contact: a reply carries 20 contacts."""


def is_sound(contact: Contact) -> bool:
    """Whether a stranger's contact may be kept and passed on: an id, and not too many addresses."""
    chars = sum(map(len, contact.addresses))
    return (
        len(contact.id) == ID_BYTES and len(contact.addresses) <= MAX_ADDRESSES and chars <= MAX_ADDRESS_CHARS
    )


class Searcher:
    """Carries out lookups for one peer and keeps its routing table.

    Attributes:
        table: the peers that spoke to us or answered.
        on_new: called with each peer that is new in the table.
    """

    def __init__(self, peers: Peers, settings: DHTSettings) -> None:
        self.table = RoutingTable(peers.id, bucket_size=settings.bucket_size)
        self.on_new: Callable[[Contact], object] | None = None
        self._peers, self._settings = peers, settings
        self._loop = asyncio.get_running_loop()
        self._patience = Patience()
        self._tasks: dict[asyncio.Task[Any], None] = {}

    def lookup(self, target: bytes, *, width: int, seeds: Iterable[Contact] | None = None) -> Lookup:
        """A lookup that begins at ``seeds``, or at whom we know; all replicas of a key are asked at once."""
        if seeds is None:
            seeds = [*self.table.nearest(target, self._settings.bucket_size), *self.myself()]
        others = (contact for contact in seeds if contact.direct)
        parallel = max(self._settings.parallel, width if width <= self._settings.replicas else 0)
        return Lookup(target, others, width=width, alpha=parallel, patience_s=self._patience.seconds)

    def myself(self) -> tuple[Contact, ...]:
        """This peer as a candidate, if others can dial it."""
        contact = self._peers.contact
        return (contact,) if contact.direct else ()

    async def search(self, lookup: Lookup, ask: Callable[[Contact], Awaitable[Iterable[Contact]]]) -> None:
        """Carry out what ``lookup`` decides; ``ask`` returns the contacts that a peer named.

        Slow queries run on in the background: their answer, or their timeout, still teaches the routing table.
        """
        asked: dict[asyncio.Task[Iterable[Contact] | None], PeerId] = {}
        now = self._loop.time
        try:
            while not lookup.done(now()):
                for contact in lookup.next_queries(now()):
                    asked[self.spawn(_answer_of(ask, contact))] = contact.id
                wake_at = lookup.wake_at(now())
                timeout_s = None if wake_at is None else wake_at - now() + 0.001
                await asyncio.wait(asked, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                for query in [query for query in asked if query.done()]:
                    closer = None if query.cancelled() else query.result()
                    lookup.on_answer(asked.pop(query), closer and self._some_of(closer))
        except asyncio.CancelledError:
            for query in asked:
                query.cancel()
            raise
        for peer in asked.values():
            lookup.on_answer(peer, None)  # a wider search with this lookup must not wait for it

    def _some_of(self, closer: Iterable[Contact]) -> list[Contact]:
        """What an honest answer holds: the sound ones of the first ``bucket_size``."""
        return [contact for contact in islice(closer, self._settings.bucket_size) if is_sound(contact)]

    async def call(self, contact: Contact, message: Message, reply: type[R]) -> R:
        """Call a peer by its contact; how it goes teaches the routing table and our patience."""
        self._peers.learn(contact)
        asked_at = self._loop.time()
        try:
            answer = await self._peers.call(contact.id, message, reply, timeout_s=self._settings.timeout_s)
        except PeerError as error:
            # whoever refuses what our role may not do is alive
            if not (isinstance(error, CallRefused) and error.code == "refused"):
                self.table.failed(contact.id)
            raise
        self._patience.learn(self._loop.time() - asked_at)
        self.saw(contact)
        return answer

    async def find_near(self, target: bytes, *, width: int, seeds: Iterable[Contact] | None = None) -> Lookup:
        """Find the ``width`` peers nearest to ``target``, beginning at ``seeds`` or at those we know."""
        lookup = self.lookup(target, width=width, seeds=seeds)
        await self.search(lookup, partial(self._ask_peers, target))
        return lookup

    async def _ask_peers(self, target: bytes, contact: Contact) -> Iterable[Contact]:
        if contact.id == self._peers.id:
            return ()
        return (await self.call(contact, FindPeers(target, self._peers.contact), FoundPeers)).contacts

    def saw(self, contact: Contact) -> None:
        """A peer was heard from."""
        if self.table.saw(contact, self._loop.time()) and self.on_new is not None:
            self.on_new(contact)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run ``work`` in the background until `cancel`."""
        task = self._loop.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    def cancel(self) -> list[asyncio.Task[Any]]:
        """Cancel all background work; returns what there was."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        return tasks


async def _answer_of(
    ask: Callable[[Contact], Awaitable[Iterable[Contact]]], contact: Contact
) -> Iterable[Contact] | None:
    """The contacts a peer named, None if it did not answer."""
    try:
        return await ask(contact)
    except PeerError as error:
        logger.debug("%s does not answer: %s", short(contact.id), error)
        return None
