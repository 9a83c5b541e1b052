"""Form an elastic group, and exchange buckets over peer links.

Peers that wait for a group find each other by `colab_swarm.averaging.assembly`. The first member sends its state to the
other members. Each pair of members has one stream. If the stream breaks, each of the two members treats the other as
lost, and continues.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence

from colab_swarm.averaging.assembly import Assembly
from colab_swarm.averaging.group import GroupMember, RoundRefused
from colab_swarm.elastic.steps import ElasticSettings, ElasticSteps, Piece
from colab_swarm.errors import PeerError, StateError, require
from colab_swarm.events import EventLog, PeerLeft
from colab_swarm.net.node import Node
from colab_swarm.net.peers import Buffer, Message, PeerId, Refusal, Role, Stream, end_tasks, short
from colab_swarm.runtime import loop_now, wait_until
from colab_swarm.training.replica import Replica
from colab_swarm.training.settings import PeerServices
from colab_swarm.training.state import StateSharing

logger = logging.getLogger(__name__)

READY = Piece(-1, 0)
GOODBYE_S = 5.0


class ElasticLink(Message, frozen=True):
    """Opens the stream between two members of a group. ``members`` has the ids of all members."""

    prefix: str
    members: tuple[PeerId, ...]


class PeerExchange:
    """This peer's streams to the other members, on the runtime's loop. ``opening`` names the group on the wire."""

    steps: ElasticSteps

    def __init__(
        self, peers: Node, events: EventLog, prefix: str, members: Sequence[GroupMember], *, timeout_s: float
    ) -> None:
        self.opening = ElasticLink(prefix, tuple(member.id for member in members))
        self.me = self.opening.members.index(peers.id)
        self.members = len(members)
        self.lost: dict[int, str] = {}  # members, with reasons
        self._events = events
        self._peers = peers
        self._timeout_s = timeout_s
        self._dialled = [bool(member.addresses) for member in members]
        self._begun = asyncio.Event()
        self._all_ready = asyncio.Event()
        self._unready = {index for index in range(len(members)) if index != self.me}
        self._queues: dict[int, asyncio.Queue[tuple[Piece, Buffer] | None]] = {}
        for index in self._unready:
            self._queues[index] = asyncio.Queue()
        self._streams: dict[int, Stream] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(self) -> None:
        """Report buckets and losses to ``steps`` from now on; return when all members are ready to receive.

        Raises `StateError` if a member is lost, or not ready in time.
        """
        self._begun.set()
        for index in filter(self._opens, self._queues):
            self._tasks.add(asyncio.create_task(self._dial(index), name=f"elastic link {index}"))
        self.send(READY, b"")
        await wait_until(loop_now() + self._timeout_s, self._all_ready)
        if self._unready:
            names = ", ".join(short(self.opening.members[index]) for index in self._unready)
            raise StateError(f"{names} did not get ready in {self._timeout_s:g} s: restart all peers")
        if self.lost:
            ids = self.opening.members
            lost = self.lost.items()
            reasons = "; ".join(f"{short(ids[index])}: {reason}" for index, reason in lost)
            raise StateError(f"a member was lost before the first step ({reasons}): restart all peers")

    def _opens(self, index: int) -> bool:
        """Return True if this peer dials. The first of two members dials, unless only it has an address."""
        return (self.me < index) == self._dialled[max(index, self.me)]

    async def _dial(self, index: int) -> None:
        try:
            peer = self.opening.members[index]
            stream = await self._peers.stream(peer, self.opening, timeout_s=self._timeout_s)
        except PeerError as error:
            self.lose(index, str(error))
        else:
            await self._converse(index, stream)

    async def serve(self, opening: ElasticLink, stream: Stream) -> None:
        require(
            opening == self.opening and stream.peer in opening.members,
            "this peer trains in another group: restart all peers",
            Refusal,
        )
        await self._begun.wait()
        index = opening.members.index(stream.peer)
        require(
            index not in {self.me, *self._streams, *self.lost} and not self._opens(index),
            "there is, or was, a stream already",
            Refusal,
        )
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        await self._converse(index, stream)

    async def _converse(self, index: int, stream: Stream) -> None:
        self._streams[index] = stream
        async with stream:
            tasks = [asyncio.create_task(job(index, stream)) for job in (self._receive, self._send)]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await end_tasks(*tasks)

    async def _receive(self, index: int, stream: Stream) -> None:
        try:
            while True:
                piece, payload = await stream.receive(Piece)
                if piece == READY:
                    self._on_settled(index)
                else:
                    self.steps.on_piece(index, piece, payload)
        except PeerError as error:  # or the stream ended
            self.lose(index, str(error))

    async def _send(self, index: int, stream: Stream) -> None:
        try:
            while (item := await self._queues[index].get()) is not None:
                await stream.send(*item)
        except PeerError as error:
            self.lose(index, str(error))

    def send(self, piece: Piece, payload: Buffer) -> None:
        """Queue a bucket for all other members. The payload must not change any more."""
        for index, queue in self._queues.items():
            if index not in self.lost:
                queue.put_nowait((piece, payload))

    def lose(self, index: int, reason: str) -> None:
        """Stop the exchange with a member that left, is lost or sent an invalid bucket."""
        if index not in self.lost:
            self.lost[index] = reason
            self._events.emit(PeerLeft(loop_now(), self.opening.members[index].hex(), reason))
            self.steps.on_lost(index, reason)
        if index in self._streams:
            self._streams[index].reset(reason)
        self._on_settled(index)

    def _on_settled(self, index: int) -> None:
        self._unready.discard(index)
        if not self._unready:
            self._all_ready.set()

    async def close(self) -> None:
        """Send the queued buckets, then leave the group. Idempotent."""
        for queue in self._queues.values():
            queue.put_nowait(None)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=GOODBYE_S)
        self.kill()

    def kill(self) -> None:
        """End without a goodbye, like a crashed peer."""
        for task in self._tasks:
            task.cancel()


@contextlib.asynccontextmanager
async def enter_group(
    services: PeerServices, settings: ElasticSettings, terms: str, replica: Replica
) -> AsyncIterator[PeerExchange]:
    """Find the other members, load the first member's state into the replica, and yield an exchange.

    The services for finding members run until the end of the block, when all members are ready. Raises `StateError` if
    the group is not formed, and `ValueError` if another peer has other ``terms``.
    """
    router = services.router
    prefix = settings.prefix
    count = settings.peers
    wait_s = settings.wait_s
    name = prefix.rpartition("/")[2]
    assembly = Assembly(router, services.dht, prefix, size=count)
    states = StateSharing(router, prefix, lambda: asyncio.to_thread(replica.snapshot))
    entered: asyncio.Future[PeerExchange] = asyncio.get_running_loop().create_future()

    async def serve(opening: ElasticLink, stream: Stream) -> None:
        await (await asyncio.shield(entered)).serve(opening, stream)

    router.serve_stream(prefix, ElasticLink, serve, Role.WORKER)
    try:
        logger.info("waiting for the %d peers of %r", count, name)
        try:
            async with asyncio.timeout(wait_s):
                members = (await assembly.meet(terms)).members
        except TimeoutError:
            raise StateError(
                f"training {name!r} needs {count} peers, {len(assembly.waiting)} came in {wait_s:g} s: "
                "start the others with the same name, or raise wait_s"
            ) from None
        except RoundRefused:
            raise StateError(f"{count} other peers train {name!r} already: choose another name") from None
        exchange = PeerExchange(services.peers, services.events, prefix, members, timeout_s=wait_s)
        entered.set_result(exchange)
        if exchange.me:
            await asyncio.to_thread(replica.load_snapshot, await states.download([members[0].id]))
        yield exchange
    finally:
        states.close()
        router.unserve(prefix, ElasticLink)
        entered.cancel()
