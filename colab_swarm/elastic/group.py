"""Form an elastic group, and exchange buckets over peer links.

Waiting peers meet (`colab_swarm.averaging.moshpit`). They start from equal parameters: the first member sends its
parameters and optimizer state to all others. A group starts complete: a lost member cannot rejoin.

Any two members share one stream, in both directions, as long as the group lives. So the round trip is paid once, and a
bucket travels one way. If a stream breaks, each of the two members counts the other as lost and continues without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Sequence
from functools import partial

from colab_swarm.averaging.group import GroupFormationSettings, GroupMember, RoundRefused
from colab_swarm.averaging.moshpit import Assembly
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
FORMATION = GroupFormationSettings(window_s=2.0, slack_s=2.0, max_window_s=10.0, call_timeout_s=5.0)


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


@contextlib.asynccontextmanager
async def enter_group(
    services: PeerServices, settings: ElasticSettings, terms: str, replica: Replica
) -> AsyncIterator[PeerExchange]:
    """Enter a group of peers of a swarm; with ``services`` bound, an `EnterGroup`.

    Its services run until all members are ready.
    """
    router, prefix = services.router, settings.prefix
    formation = dataclasses.replace(FORMATION, size=settings.peers)
    assembly = Assembly(router, services.dht, prefix, formation, timeout_s=settings.wait_s, terms=terms)
    states = StateSharing(router, prefix, lambda: asyncio.to_thread(replica.snapshot))
    entered: asyncio.Future[PeerExchange] = asyncio.get_running_loop().create_future()
    router.serve_stream(prefix, ElasticLink, partial(_serve_link, entered), Role.WORKER)
    try:
        exchange = PeerExchange(
            services.peers,
            services.events,
            prefix=prefix,
            members=await _find_members(assembly, settings, replica),
            timeout_s=settings.wait_s,
        )
        entered.set_result(exchange)
        if exchange.me:
            snapshot = await download_state(services.peers, prefix, [exchange.opening.members[0]])
            await asyncio.to_thread(replica.load_snapshot, snapshot)
        yield exchange
    finally:
        assembly.close()
        states.close()
        router.unserve(prefix, ElasticLink)
        entered.cancel()
        await assembly.publish()


async def _serve_link(entered: asyncio.Future[PeerExchange], opening: ElasticLink, stream: Stream) -> None:
    exchange = await asyncio.shield(entered)
    await exchange.serve(opening, stream)


async def _find_members(
    assembly: Assembly, settings: ElasticSettings, replica: Replica
) -> Sequence[GroupMember]:
    """Return the members, in the order of their numbers.

    Raises:
        StateError: they did not come together in time, or this peer is one too many.
        ValueError: another waiting peer has other terms.
    """
    peers, name = settings.peers, settings.prefix.rpartition("/")[2]
    logger.info("waiting for %d peers of %r", peers - 1, name)
    try:
        async with asyncio.timeout(settings.wait_s):
            return (await assembly.meet(replica.flat.numel, replica.schema)).members
    except TimeoutError:
        raise StateError(
            f"training {name!r} needs {peers} peers, {1 + len(assembly.waiting)} came in {settings.wait_s:g} s: "
            "start the others with the same name, or raise wait_s"
        ) from None
    except RoundRefused:
        raise StateError(f"{peers} other peers train {name!r} already: choose another name") from None
