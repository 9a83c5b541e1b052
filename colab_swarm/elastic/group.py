"""Form an elastic group, and exchange buckets over peer links.

Waiting peers publish a record in the DHT, agree on the members, and start from equal parameters. The first member (by
id) sends its parameters and optimizer state to all others. A group starts complete: a lost member cannot rejoin.

Any two members share one stream, in both directions, as long as the group lives. So the round trip is paid once, and a
bucket travels one way. If a stream breaks, each of the two members counts the other as lost and continues without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import AsyncIterator, Sequence

from colab_swarm.averaging.group import (
    Group,
    GroupFormationSettings,
    GroupMember,
    RoundRefused,
    Ticket,
    equal_shares,
)
from colab_swarm.averaging.matchmaking import Matchmaker
from colab_swarm.elastic.steps import ElasticSettings, ElasticSteps, Piece
from colab_swarm.errors import PeerError, StateError
from colab_swarm.events import EventLog, PeerLeft
from colab_swarm.net.peers import Buffer, Message, PeerId, Peers, Refusal, Role, Stream, short
from colab_swarm.training.replica import Replica
from colab_swarm.training.settings import PeerServices
from colab_swarm.training.state import StateSharing, download_state

logger = logging.getLogger(__name__)

READY = Piece(-1, 0)
GOODBYE_S = 5.0
POLL_S = 0.5
RECORD_TTL_S = 15.0
RENEW_S = 5.0
MEETING_S = 20.0
MAX_TERMS = 512
GATHERING = GroupFormationSettings(window_s=2.0, slack_s=2.0, max_window_s=10.0, call_timeout_s=5.0)


class ElasticLink(Message, frozen=True):
    """Opens the stream between two members of a group; ``members`` are the ids of all."""

    prefix: str
    members: tuple[PeerId, ...]


class PeerExchange:
    """This peer's streams to the other members; a `PieceExchange`.

    Args:
        members: in the order of their numbers.
        timeout_s: until all members must be ready.

    Attributes:
        opening: names the group on the wire.
        me: this peer's number.
        members: size of the group.
        lost: lost members, with reasons.
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
        self.opening = ElasticLink(prefix, tuple(member.id for member in members))
        self.me = self.opening.members.index(peers.id)
        self.members = len(members)
        self.lost: dict[int, str] = {}
        self._steps: ElasticSteps | None = None
        self._begun, self._all_ready = asyncio.Event(), asyncio.Event()
        self._unready = {index for index in range(len(members)) if index != self.me}
        self._queues: dict[int, asyncio.Queue[tuple[Piece, Buffer] | None]] = {
            index: asyncio.Queue() for index in self._unready
        }
        self._streams: dict[int, Stream] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(self, steps: ElasticSteps) -> None:
        self._steps = steps
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
            text = f"{names} did not get ready in {self._timeout_s:g} s: restart all peers"
            raise StateError(text) from None
        if self.lost:
            reasons = "; ".join(
                f"{short(self._members[index].id)}: {reason}" for index, reason in self.lost.items()
            )
            raise StateError(f"a member was lost before the first step ({reasons}): restart all peers")

    def _opens(self, index: int) -> bool:
        """Whether this peer dials: of two members the first does, unless only the first can be dialled."""
        second = self._members[max(index, self.me)]
        return (self.me < index) == bool(second.addresses)

    async def _dial(self, index: int) -> None:
        try:
            peer = self._members[index].id
            stream = await self._peers.stream(peer, self.opening, timeout_s=self._timeout_s)
        except PeerError as error:
            self._lose(index, str(error))
        else:
            await self._converse(index, stream)

    async def serve(self, opening: ElasticLink, stream: Stream) -> None:
        """Use the stream that a member opened to this peer.

        Raises:
            Refusal: the peer is not in this group, or has a stream already.
        """
        if opening != self.opening or stream.peer not in opening.members:
            raise Refusal("this peer trains in another group: restart all peers")
        await self._begun.wait()
        index = opening.members.index(stream.peer)
        if index == self.me or self._opens(index) or index in self._streams or index in self.lost:
            raise Refusal("there is, or was, a stream already")
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        await self._converse(index, stream)

    async def _converse(self, index: int, stream: Stream) -> None:
        """Send and receive until one direction ends."""
        self._streams[index] = stream
        async with stream:
            tasks = [asyncio.create_task(job(index, stream)) for job in (self._receive, self._send)]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _receive(self, index: int, stream: Stream) -> None:
        assert self._steps is not None
        try:
            while True:
                piece, payload = await stream.receive(Piece)
                if piece == READY:
                    self._on_settled(index)
                else:
                    self._steps.on_piece(index, piece, payload)
        except PeerError as error:  # or the stream ended
            self._lose(index, str(error))

    async def _send(self, index: int, stream: Stream) -> None:
        queue = self._queues[index]
        try:
            while (item := await queue.get()) is not None:
                await stream.send(*item)
        except PeerError as error:
            self._lose(index, str(error))

    def send(self, piece: Piece, payload: Buffer) -> None:
        for index, queue in self._queues.items():
            if index not in self.lost:
                queue.put_nowait((piece, payload))

    def drop(self, peer: int, reason: str) -> None:
        self._lose(peer, reason)
        if peer in self._streams:
            self._streams[peer].reset(reason)

    def _lose(self, index: int, reason: str) -> None:
        if index in self.lost:
            return
        assert self._steps is not None
        self.lost[index] = reason
        at = asyncio.get_running_loop().time()
        self._events.emit(PeerLeft(at, self._members[index].id.hex(), reason))
        self._steps.on_lost(index, reason)
        self._on_settled(index)

    def _on_settled(self, index: int) -> None:
        self._unready.discard(index)
        if not self._unready:
            self._all_ready.set()

    async def close(self) -> None:
        for queue in self._queues.values():
            queue.put_nowait(None)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=GOODBYE_S)
        self.kill()

    def kill(self) -> None:
        for task in self._tasks:
            task.cancel()


class WaitingRecord(Message, frozen=True):
    """Published by a peer that waits for a group; signed, under its own subkey."""

    addresses: tuple[str, ...]  # at which it can be dialled
    terms: str  # see `ElasticSettings.terms`
    at: float  # its swarm time; an older record may be a leftover


@contextlib.asynccontextmanager
async def enter_group(
    services: PeerServices, settings: ElasticSettings, terms: str, replica: Replica
) -> AsyncIterator[PeerExchange]:
    """Enter a group of peers of a swarm; with ``services`` bound, an `EnterGroup`."""
    forming = _Forming(services, settings, terms, replica)
    try:
        exchange = await forming.connect()
        if exchange.me:
            first = exchange.opening.members[0]
            snapshot = await download_state(services.peers, settings.prefix, [first])
            await asyncio.to_thread(replica.load_snapshot, snapshot)
        yield exchange
    finally:
        await forming.close()


class _Forming:
    """Forms one group at one peer; its services run until all members are ready."""

    def __init__(
        self, services: PeerServices, settings: ElasticSettings, terms: str, replica: Replica
    ) -> None:
        self._services, self._settings, self._terms = services, settings, terms
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
        self._callers: set[PeerId] = set()  # since the records were last read, which may lack theirs
        self._others: dict[PeerId, float] = {}  # peers with other terms: when they published first
        self._key = f"{settings.prefix}/waiting"
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
        """Stop serving and waiting."""
        self._matchmaker.close()
        self._states.close()
        self._services.router.unserve(self._settings.prefix, ElasticLink)
        self._exchange.cancel()
        await self._publish(ttl_s=0.5)

    async def connect(self) -> PeerExchange:
        """Find the members and return the exchange with them.

        Raises:
            StateError: they did not come together in time, or this peer is one too many.
            ValueError: another waiting peer has other terms.
        """
        services, settings = self._services, self._settings
        exchange = PeerExchange(
            services.peers,
            services.events,
            prefix=settings.prefix,
            members=await self._meet(),
            timeout_s=settings.wait_s,
        )
        self._exchange.set_result(exchange)
        return exchange

    async def _serve_link(self, opening: ElasticLink, stream: Stream) -> None:
        exchange = await asyncio.shield(self._exchange)
        await exchange.serve(opening, stream)

    async def _meet(self) -> Sequence[GroupMember]:
        """The members, in the order of their numbers."""
        settings, name = self._settings, self._settings.prefix.rpartition("/")[2]
        logger.info("waiting for %d peers of %r", settings.peers - 1, name)
        renewing = asyncio.create_task(self._renew_record(), name="elastic waiting")
        try:
            async with asyncio.timeout(settings.wait_s):
                while (group := await self._try_to_meet()) is None:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(POLL_S):
                            await self._called.wait()
        except TimeoutError:
            raise StateError(
                f"training {name!r} needs {settings.peers} peers, {1 + len(self._present)} came in "
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

    async def _expected(self, step: int, lineage: bytes) -> Sequence[PeerId]:
        return sorted(self._present)

    def _on_called(self, terms: Ticket, caller: PeerId) -> float | None:
        """A peer that has seen enough others starts the group: join at once."""
        if terms.lineage != self._ticket.lineage:
            return None
        self._present.add(caller)
        self._callers.add(caller)
        self._called.set()
        return 0.0

    async def _renew_record(self) -> None:
        while True:
            await self._publish(RECORD_TTL_S)
            await asyncio.sleep(RENEW_S)

    async def _publish(self, ttl_s: float) -> None:
        peers = self._services.peers
        with contextlib.suppress(PeerError):
            record = WaitingRecord(peers.contact.addresses, self._terms, peers.time())
            await self._services.dht.publish(self._key, record, ttl_s=ttl_s)

    async def _look(self) -> None:
        """Read the records of waiting peers; until the answer is complete, the earlier ones are expected."""
        self._callers.clear()
        present: set[PeerId] = set()
        records = await self._services.dht.published(self._key, WaitingRecord)
        records.pop(self._services.peers.id, None)
        for peer, record in records.items():
            if record.terms == self._terms:
                present.add(peer)
            elif self._others.setdefault(peer, record.at) != record.at:  # renewed: no leftover
                raise ValueError(
                    f"{short(peer)} has other settings: {record.terms[:MAX_TERMS]!r}; this peer: {self._terms!r}. "
                    "Give all peers the same settings"
                )
        self._present = present | self._callers
