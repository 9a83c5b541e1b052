"""How a group comes together: peers that wait tell so in the DHT, agree on who is in, and start from equal parameters.

The first member (by id) gives its parameters and the optimizer's state to all others. Nothing of this goes on while
the group trains: it begins complete, and whoever is lost does not come back.

Buckets over peer links: one stream between any two members, both ways, for as long as the group lives.

So the price of a round trip is paid when the group is formed, and a bucket takes one way. Whoever's stream breaks is
lost, for good: the others go on without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable, Sequence

import msgspec

from colab_swarm.averaging.group import (
    Group,
    GroupFormationSettings,
    GroupMember,
    RoundRefused,
    Ticket,
    equal_shares,
)
from colab_swarm.averaging.matchmaking import Matchmaker
from colab_swarm.dht.service import is_sound
from colab_swarm.elastic.settings import ElasticSettings, Piece, PieceExchange, PieceReceiver
from colab_swarm.errors import PeerError, StateError
from colab_swarm.events import EventLog, PeerLeft
from colab_swarm.net.peers import Buffer, Contact, Message, PeerId, Peers, Refusal, Role, Stream, short
from colab_swarm.training.replica import Replica
from colab_swarm.training.settings import PeerServices
from colab_swarm.training.state import StateSharing, download_state

READY = Piece(-1, 0)

FAREWELL_S = 5.0


class ElasticLink(Message, frozen=True):
    """Opens the stream between two members of a group, whose ids it tells."""

    prefix: str
    members: tuple[PeerId, ...]


class PeerExchange:
    """This peer's streams to the other members; an `PieceExchange`.

    Args:
        members: in the order of their numbers.
        timeout_s: for all to be ready.

    Attributes:
        me: this peer's number.
        lost: who is gone, and why.
    """

    def __init__(
        self,
        peers: Peers,
        events: EventLog,
        *,
        prefix: str,
        members: Sequence[GroupMember],
        timeout_s: float,
    ) -> None:
        self._peers, self._events = peers, events
        self._members, self._timeout_s = members, timeout_s
        self._opening = ElasticLink(prefix, tuple(member.id for member in members))
        self.me = self._opening.members.index(peers.id)
        self.members = len(members)
        self.lost: dict[int, str] = {}
        self._receiver: PieceReceiver | None = None
        self._begun, self._all_ready = asyncio.Event(), asyncio.Event()
        self._unready = {index for index in range(len(members)) if index != self.me}
        self._queues: dict[int, asyncio.Queue[tuple[Piece, Buffer] | None]] = {
            index: asyncio.Queue() for index in self._unready
        }
        self._streams: dict[int, Stream] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(self, receiver: PieceReceiver) -> None:
        """See `PieceExchange`."""
        self._receiver = receiver
        self._begun.set()
        for index in self._queues:
            if self._opens(index):
                self._tasks.add(asyncio.create_task(self._dial(index), name=f"elastic link {index}"))
        self.send(READY, b"")
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._all_ready.wait()
        except TimeoutError:
            names = ", ".join(short(self._members[index].id) for index in self._unready)
            raise StateError(
                f"{names} did not get ready in {self._timeout_s:g} s: begin again, all peers"
            ) from None
        if self.lost:
            told = "; ".join(
                f"{short(self._members[index].id)}: {reason}" for index, reason in self.lost.items()
            )
            raise StateError(f"a member was lost before the first step ({told}): begin again, all peers")

    def _opens(self, index: int) -> bool:
        """Of two members the first dials the second, unless only the first can be dialled."""
        second = self._members[max(index, self.me)]
        return (self.me < index) == bool(second.addresses)

    async def _dial(self, index: int) -> None:
        try:
            peer = self._members[index].id
            stream = await self._peers.stream(peer, self._opening, timeout_s=self._timeout_s)
        except PeerError as error:
            self._lose(index, str(error))
        else:
            await self._converse(index, stream)

    async def serve(self, opening: ElasticLink, stream: Stream) -> None:
        """A member opened its stream to this peer.

        Raises:
            Refusal: it is none of this group, or has one already.
        """
        if opening != self._opening or stream.peer not in opening.members:
            raise Refusal("this peer trains in another group: begin again, all peers")
        await self._begun.wait()
        index = opening.members.index(stream.peer)
        if index == self.me or self._opens(index) or index in self._streams or index in self.lost:
            raise Refusal("there is, or was, such a stream already")
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        await self._converse(index, stream)

    async def _converse(self, index: int, stream: Stream) -> None:
        """Both directions, until one is over."""
        self._streams[index] = stream
        async with stream:
            ways = [
                asyncio.create_task(self._receive(index, stream)),
                asyncio.create_task(self._send(index, stream)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)

    async def _receive(self, index: int, stream: Stream) -> None:
        assert self._receiver is not None
        try:
            while True:
                piece, payload = await stream.receive(Piece)
                if piece == READY:
                    self._on_settled(index)
                else:
                    self._receiver.on_piece(index, piece, payload)
        except PeerError as error:  # a stream that ended included
            self._lose(index, str(error))

    async def _send(self, index: int, stream: Stream) -> None:
        queue = self._queues[index]
        try:
            while (item := await queue.get()) is not None:
                await stream.send(*item)
        except PeerError as error:
            self._lose(index, str(error))

    def send(self, piece: Piece, payload: Buffer) -> None:
        """See `PieceExchange`."""
        for index, queue in self._queues.items():
            if index not in self.lost:
                queue.put_nowait((piece, payload))

    def drop(self, peer: int, reason: str) -> None:
        """See `PieceExchange`."""
        self._lose(peer, reason)
        if peer in self._streams:
            self._streams[peer].reset(reason)

    def _lose(self, index: int, reason: str) -> None:
        if index in self.lost:
            return
        assert self._receiver is not None
        self.lost[index] = reason
        at = asyncio.get_running_loop().time()
        self._events.emit(PeerLeft(at, self._members[index].id.hex(), reason))
        self._receiver.on_lost(index, reason)
        self._on_settled(index)

    def _on_settled(self, index: int) -> None:
        self._unready.discard(index)
        if not self._unready:
            self._all_ready.set()

    async def close(self) -> None:
        """See `PieceExchange`."""
        for queue in self._queues.values():
            queue.put_nowait(None)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=FAREWELL_S)
        self.kill()

    def kill(self) -> None:
        """See `PieceExchange`."""
        for task in self._tasks:
            task.cancel()


logger = logging.getLogger(__name__)

POLL_S = 0.5

RECORD_TTL_S = 15.0

RENEW_S = 5.0

MEETING_S = 20.0

MAX_TERMS = 512

GATHERING = GroupFormationSettings(window_s=2.0, slack_s=2.0, max_window_s=10.0, call_timeout_s=5.0)


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

    def __init__(self, services: PeerServices) -> None:
        self._services = services

    async def enter(
        self,
        settings: ElasticSettings,
        terms: str,
        replica: Replica,
        receive: Callable[[PieceExchange], PieceReceiver],
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
                exchange.kill()
                raise
            return exchange
        finally:
            await forming.close()


class _Forming:
    """The forming of one group, at one peer: serves it until all members are ready."""

    def __init__(
        self, services: PeerServices, settings: ElasticSettings, terms: str, replica: Replica
    ) -> None:
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
        router, prefix = services.router, settings.prefix
        router.reserve(prefix)
        self._matchmaker = Matchmaker(
            router,
            prefix,
            expected=self._expected,
            on_called=self._on_called,
            strategy=equal_shares,
            settings=GATHERING,
        )
        self._states = StateSharing(router, prefix, lambda: asyncio.to_thread(replica.snapshot))
        router.serve_stream(prefix, ElasticLink, self._serve_link, Role.WORKER)

    async def close(self) -> None:
        """Serve no more, and wait no more for others."""
        self._matchmaker.close()
        self._states.close()
        self._services.router.unserve(self._settings.prefix, ElasticLink)
        self._exchange.cancel()
        await self._tell(ttl_s=0.5)

    def connect(self, members: Sequence[GroupMember]) -> PeerExchange:
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

    async def meet(self) -> Sequence[GroupMember]:
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
