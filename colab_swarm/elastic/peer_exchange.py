"""Buckets over peer links: one stream between any two members, both ways, for as long as the group lives.

So the price of a round trip is paid when the group is formed, and a bucket takes one way. Whoever's stream breaks is
lost, for good: the others go on without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from colab_swarm.averaging.group import Member
from colab_swarm.elastic.exchange import Piece, Receiver
from colab_swarm.errors import PeerError, StateError
from colab_swarm.events import EventLog, PeerLeft
from colab_swarm.net.peers import Buffer, Message, PeerId, Peers, Refusal, Stream, short

READY = Piece(-1, 0)
FAREWELL_S = 5.0


class ElasticLink(Message, frozen=True):
    """Opens the stream between two members of a group, whose ids it tells."""

    prefix: str
    members: tuple[PeerId, ...]


class PeerExchange:
    """This peer's streams to the other members; an `Exchange`.

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
        members: Sequence[Member],
        timeout_s: float,
    ) -> None:
        self._peers, self._events = peers, events
        self._members, self._timeout_s = members, timeout_s
        self._opening = ElasticLink(prefix, tuple(member.id for member in members))
        self.me = self._opening.members.index(peers.id)
        self.members = len(members)
        self.lost: dict[int, str] = {}
        self._receiver: Receiver | None = None
        self._begun, self._all_ready = asyncio.Event(), asyncio.Event()
        self._unready = {index for index in range(len(members)) if index != self.me}
        self._queues: dict[int, asyncio.Queue[tuple[Piece, Buffer] | None]] = {
            index: asyncio.Queue() for index in self._unready
        }
        self._streams: dict[int, Stream] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(self, receiver: Receiver) -> None:
        """See `Exchange`."""
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
        """See `Exchange`."""
        for index, queue in self._queues.items():
            if index not in self.lost:
                queue.put_nowait((piece, payload))

    def drop(self, peer: int, reason: str) -> None:
        """See `Exchange`."""
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
        """See `Exchange`."""
        for queue in self._queues.values():
            queue.put_nowait(None)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=FAREWELL_S)
        self.vanish()

    def vanish(self) -> None:
        """See `Exchange`."""
        for task in self._tasks:
            task.cancel()
