"""How a group comes together: peers that wait tell so in the DHT, agree on who is in, and start from equal parameters.

The first member (by id) gives its parameters and the optimizer's state to all others. Nothing of this goes on while
the group trains: it begins complete, and whoever is lost does not come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable, Sequence

import msgspec

from colab_swarm.averaging.group import (
    GatheringSettings,
    Group,
    Member,
    RoundRefused,
    Ticket,
    equal_shares,
)
from colab_swarm.averaging.matchmaking import Matchmaker
from colab_swarm.dht.search import is_sound
from colab_swarm.elastic.exchange import Exchange, Receiver
from colab_swarm.elastic.peer_exchange import ElasticLink, PeerExchange
from colab_swarm.elastic.settings import ElasticSettings
from colab_swarm.errors import PeerError, StateError
from colab_swarm.net.peers import Contact, Message, PeerId, Role, Stream, short
from colab_swarm.training.replica import Replica
from colab_swarm.training.settings import Services
from colab_swarm.training.state import StateSharing, download_state

logger = logging.getLogger(__name__)
POLL_S = 0.5
RECORD_TTL_S = 15.0
RENEW_S = 5.0
MEETING_S = 20.0
MAX_TERMS = 512
GATHERING = GatheringSettings(window_s=2.0, slack_s=2.0, max_window_s=10.0, call_timeout_s=5.0)


class WaitingRecord(Message, frozen=True):
    """A peer waits for a group; signed, under its own subkey.

    Attributes:
        addresses: where it can be dialled.
        terms: see `ElasticSettings.terms`.
    """

    addresses: tuple[str, ...]
    terms: str


class PeerGroup:
    """A way into a group of peers of a swarm; an `Entrance`."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def enter(
        self, settings: ElasticSettings, terms: str, replica: Replica, receive: Callable[[Exchange], Receiver]
    ) -> PeerExchange:
        """See `Entrance`."""
        forming = _Forming(self._services, settings, terms, replica)
        try:
            members = await forming.meet()
            exchange = forming.connect(members)
            if exchange.me:
                snapshot = await download_state(self._services.peers, settings.prefix, [members[0].id])
                await asyncio.to_thread(replica.load_snapshot, snapshot)
            try:
                await exchange.begin(receive(exchange))
            except BaseException:
                exchange.vanish()
                raise
            return exchange
        finally:
            await forming.close()


class _Forming:
    """The forming of one group, at one peer: serves it until all members are ready."""

    def __init__(self, services: Services, settings: ElasticSettings, terms: str, replica: Replica) -> None:
        self._services, self._settings, self._terms = services, settings, terms
        self._record = WaitingRecord(services.peers.contact.addresses, terms)
        self._ticket = Ticket(
            prefix=settings.prefix,
            step=0,
            lineage=hashlib.sha256(terms.encode()).digest()[:16],
            weight=1.0,
            numel=replica.flat.numel,
            schema=replica.schema,
            reduces=bool(services.peers.contact.addresses),
        )
        self._present: set[PeerId] = set()
        self._callers: set[PeerId] = (
            set()
        )  # since the records were last asked for: theirs may be missing there
        self._others: dict[PeerId, float] = {}  # with other terms: when their records expire
        self._called = asyncio.Event()
        self._exchange: asyncio.Future[PeerExchange] = asyncio.get_running_loop().create_future()
        rooms, prefix = services.rooms, settings.prefix
        rooms.make_room(prefix)
        self._matchmaker = Matchmaker(
            rooms,
            prefix,
            expected=self._expected,
            on_called=self._on_called,
            strategy=equal_shares,
            settings=GATHERING,
        )
        self._states = StateSharing(rooms, prefix, lambda: asyncio.to_thread(replica.snapshot))
        rooms.serve_stream(prefix, ElasticLink, self._serve_link, Role.WORKER)

    async def close(self) -> None:
        """Serve no more, and wait no more for others."""
        self._matchmaker.close()
        self._states.close()
        self._services.rooms.unserve(self._settings.prefix, ElasticLink)
        self._exchange.cancel()
        await self._tell(ttl_s=0.5)

    def connect(self, members: Sequence[Member]) -> PeerExchange:
        """The exchange of the group."""
        services, settings = self._services, self._settings
        exchange = PeerExchange(
            services.peers,
            services.events,
            prefix=settings.prefix,
            members=members,
            timeout_s=settings.wait_s,
        )
        self._exchange.set_result(exchange)
        return exchange

    async def _serve_link(self, opening: ElasticLink, stream: Stream) -> None:
        exchange = await asyncio.shield(self._exchange)
        await exchange.serve(opening, stream)

    # --- meeting --------------------------------------------------------------------------------------------------

    async def meet(self) -> Sequence[Member]:
        """The members, in the order of their numbers.

        Raises:
            StateError: they did not come together in time, or this peer is one too many.
            ValueError: a peer that waits, too, has other terms.
        """
        settings, name = self._settings, self._settings.prefix.rpartition("/")[2]
        logger.info("waiting for %d peers of %r", settings.peers - 1, name)
        renewing = asyncio.create_task(self._keep_telling(), name="elastic waiting")
        try:
            async with asyncio.timeout(settings.wait_s):
                while (group := await self._try_to_meet()) is None:
                    await self._pause()
        except TimeoutError:
            raise StateError(
                f"{settings.peers} peers were to train {name!r}, {1 + len(self._present)} came in "
                f"{settings.wait_s:g} s: start the others with the same name, or raise wait_s"
            ) from None
        finally:
            renewing.cancel()
        members = group.members[: settings.peers]
        if self._services.peers.id not in [member.id for member in members]:
            raise StateError(f"{settings.peers} other peers train {name!r} already: choose another name")
        return members

    async def _try_to_meet(self) -> Group | None:
        await self._look()
        if 1 + len(self._present) < self._settings.peers:
            return None
        self._called.clear()
        try:
            deadline = asyncio.get_running_loop().time() + MEETING_S
            group = await self._matchmaker.join(self._ticket, sorted(self._present), deadline)
        except RoundRefused as error:
            logger.debug("no elastic group yet: %s", error)
            return None
        return group if len(group.members) >= self._settings.peers else None

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(POLL_S):
                await self._called.wait()
        except TimeoutError:
            pass

    async def _expected(self, step: int, lineage: bytes) -> Sequence[PeerId]:
        return sorted(self._present)

    def _on_called(self, terms: Ticket, caller: PeerId) -> float | None:
        """Somebody has seen enough peers and begins: come at once."""
        if terms.lineage != self._ticket.lineage:
            return None
        self._present.add(caller)
        self._callers.add(caller)
        self._called.set()
        return 0.0

    # --- who waits ------------------------------------------------------------------------------------------------

    async def _keep_telling(self) -> None:
        while True:
            await self._tell(RECORD_TTL_S)
            await asyncio.sleep(RENEW_S)

    async def _tell(self, ttl_s: float) -> None:
        with contextlib.suppress(PeerError):
            me = self._services.peers.id
            await self._services.dht.store(self._key, self._record, subkey=me, ttl_s=ttl_s, signed=True)

    async def _look(self) -> None:
        """Read which other peers wait now; until the answer is complete, those known before are expected."""
        self._callers.clear()
        present: set[PeerId] = set()
        for subkey, found in (await self._services.dht.get(self._key)).items():
            peer = PeerId(subkey)
            try:
                record = msgspec.convert(found.value, WaitingRecord, strict=False)
            except ValueError:
                continue
            contact = Contact(peer, record.addresses)
            if peer == self._services.peers.id or not is_sound(contact):
                continue
            if record.terms != self._terms:
                self._on_other_terms(peer, record.terms, found.expires_at)
                continue
            self._services.peers.learn(contact)
            present.add(peer)
        self._present = present | self._callers

    def _on_other_terms(self, peer: PeerId, terms: str, expires_at: float) -> None:
        """A record that is renewed is no leftover."""
        if self._others.setdefault(peer, expires_at) != expires_at:
            raise ValueError(
                f"{short(peer)} wants to train otherwise: {terms[:MAX_TERMS]!r}; this peer: {self._terms!r}. "
                "Give all peers the same settings"
            )

    @property
    def _key(self) -> str:
        return f"{self._settings.prefix}/waiting"
