"""A bucket for members without its keys: members that have them carry its objects over links.

A courier writes only what the caller has signed, in the caller's places, and deletes nothing. The caller
checks each object that it gets, but must believe the lists: a courier can hide an object, or tell a false time.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, TypeVar
from weakref import WeakValueDictionary

import msgspec

from colab_swarm.dht.service import BackgroundTasks, RunServices
from colab_swarm.errors import (
    BucketError,
    CallRefused,
    PeerError,
    PeerLost,
    PeerTimeout,
    ProtocolError,
    require,
)
from colab_swarm.mailbox.bucket import Bucket, Errors, StoredObject
from colab_swarm.mailbox.rounds import LEFT, Farewell, PseudoGradient, kind_at, unseal
from colab_swarm.net.peers import Ack, Buffer, Message, PeerId, Refusal, Role, Stream

T = TypeVar("T")
MAX_OBJECT_BYTES = 1 << 30  # of an object
AT_ONCE = 8  # objects in a courier's memory
PART_BYTES = 120 << 10
ROWS, MAX_ROWS, ROW_BYTES = 500, 100_000, 128  # of a list: in one item, and in all; of a row, about
ANSWER_S, SLOWEST_BPS = 120.0, 128e3  # until an answer begins; the least pace after that
ANNOUNCE_S, FORGET_S = 60.0, 180.0
OF_ONE = PseudoGradient, Farewell  # their paths name the member

Text = Annotated[str, msgspec.Meta(max_length=300)]
Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_OBJECT_BYTES)]
Length = Annotated[int, msgspec.Meta(ge=0)]
Moment = Annotated[float, msgspec.Meta(ge=0, lt=1e12)]


class ListObjects(Message, frozen=True):
    """Opens a stream: the answer is some `ObjectRows`."""

    model: Text
    folder: Text
    after: Text


class ReadObject(Message, frozen=True):
    """Opens a stream: the answer is an `ObjectSize`, and the object in parts."""

    model: Text
    path: Text


class WriteObject(Message, frozen=True):
    """Opens a stream: the object follows in parts; the answer is a `Written`."""

    model: Text
    path: Text
    size_bytes: Size


class ObjectRows(Message, frozen=True):
    """Path, bytes and time of objects, sorted; the last item of a list has ``more`` false."""

    rows: Annotated[tuple[tuple[Text, Length, Moment], ...], msgspec.Meta(max_length=ROWS)]
    more: bool


class ObjectSize(Message, frozen=True):
    """None: there is no such object."""

    size_bytes: Size | None


class Written(Message, frozen=True):
    """Whether the object was written; else there is one at its path."""

    first: bool


class CourierRecord(Message, frozen=True):
    """Says that a peer carries: a value in the DHT."""

    addresses: Annotated[tuple[str, ...], msgspec.Meta(max_length=16)] = ()


def couriers_key(services: RunServices) -> str:
    return f"{services.run_id}/couriers"


@asynccontextmanager
async def _patience() -> AsyncIterator[Callable[[int], None]]:
    """Wait for `ANSWER_S`, and longer by each byte that is told to have moved: a size is only a promise."""
    try:
        async with asyncio.timeout(ANSWER_S) as limit:
            yield lambda count: limit.reschedule((limit.when() or 0.0) + 8 * count / SLOWEST_BPS)
    except TimeoutError as error:
        raise PeerTimeout("an object or a list took too long") from error


async def _send(stream: Stream, data: Buffer) -> None:
    view = memoryview(data)
    async with _patience() as moved:
        for at in range(0, len(view), PART_BYTES):
            await stream.send(Ack(), part := view[at : at + PART_BYTES])
            moved(len(part))


async def _receive(stream: Stream, size_bytes: int) -> bytes:
    data = bytearray()
    async with _patience() as moved:
        while len(data) < size_bytes:
            _, part = await stream.receive(Ack)
            require(0 < len(part) <= size_bytes - len(data), "an object of another size", ProtocolError)
            data += part
            moved(len(part))
    return bytes(data)


class Courier:
    """Carries a run's ``bucket`` for members without keys, from `start` to `stop`.

    It moves `AT_ONCE` objects at once, and one each way for a member. Who falls `ANSWER_S` behind `SLOWEST_BPS`
    loses its turn.
    """

    def __init__(self, bucket: Bucket, services: RunServices) -> None:
        self._bucket, self._services = bucket, services
        self._all = asyncio.Semaphore(AT_ONCE)
        self._turns = WeakValueDictionary[tuple[PeerId, type[Message]], asyncio.Lock]()  # while in use
        self._tasks = BackgroundTasks("carrying the bucket", services.events, services.rng)

    async def start(self) -> None:
        """Raises `BucketError` if the bucket cannot be used."""
        await self._bucket.require_conditional_writes()
        peers = self._services.peers
        peers.serve_stream(ListObjects, self._list, role=Role.VIEWER)
        peers.serve_stream(ReadObject, self._read, role=Role.VIEWER)
        peers.serve_stream(WriteObject, self._write, role=Role.WORKER)
        await self._announce()
        self._tasks.every(ANNOUNCE_S, self._announce)

    def stop(self) -> None:
        for kind in (ListObjects, ReadObject, WriteObject):
            self._services.peers.unserve(kind)
        self._tasks.cancel()

    async def _announce(self) -> None:
        record = CourierRecord(self._services.peers.contact.addresses)
        await self._services.dht.publish(couriers_key(self._services), record, ttl_s=FORGET_S)

    def _turn(self, opening: Message, stream: Stream) -> asyncio.Lock:
        return self._turns.setdefault((stream.peer, type(opening)), asyncio.Lock())

    def _path_of(self, model: str, place: str) -> str:
        if ".." in f"{model}/{place}".split("/"):
            raise Refusal(f"{model}/{place} is outside of the run")
        return f"{model}/{place}"

    async def _ask(self, verb: Awaitable[T]) -> T:
        try:
            return await verb
        except BucketError as error:  # the caller tries another courier
            raise PeerLost(str(error)) from error
        except ValueError as error:  # of obstore, for a path that it does not take
            raise Refusal(str(error)) from error

    async def _list(self, opening: ListObjects, stream: Stream) -> None:
        model, folder = opening.model, self._path_of(opening.model, opening.folder)
        after = opening.after and self._path_of(model, opening.after)
        async with self._turn(opening, stream), _patience() as moved:
            found = await self._ask(self._bucket.list(folder, after))
            rows = [(one.path[len(model) + 1 :], one.size_bytes, one.modified_at) for one in found]
            rows = [row for row in rows if kind_at(row[0])]  # another path may be too long for an item
            for at in range(0, len(rows) or 1, ROWS):
                await stream.send(ObjectRows(tuple(rows[at : at + ROWS]), more=at + ROWS < len(rows)))
                moved(ROWS * ROW_BYTES)

    async def _read(self, opening: ReadObject, stream: Stream) -> None:
        path = self._path_of(opening.model, opening.path)
        async with self._turn(opening, stream), self._all:
            data = await self._ask(self._bucket.read(path))
            if data is not None and len(data) > MAX_OBJECT_BYTES:
                raise Refusal(f"{path} has {len(data)} bytes: too many to carry")
            async with _patience():
                await stream.send(ObjectSize(None if data is None else len(data)))
            await _send(stream, data or b"")

    async def _write(self, opening: WriteObject, stream: Stream) -> None:
        path, caller = self._path_of(opening.model, opening.path), stream.peer
        if (kind := kind_at(opening.path)) is None:
            raise Refusal(f"nothing is written to {path}")
        async with self._turn(opening, stream), self._all:
            data = await _receive(stream, opening.size_bytes)
            try:
                statement, _ = await asyncio.to_thread(unseal, data, kind)
            except ProtocolError as error:
                raise Refusal(f"{path}: {error}") from error
            named = path.rpartition("/")[2].removesuffix(LEFT) if kind in OF_ONE else caller.hex()
            own = statement.member == caller and named == caller.hex()
            if not own or statement.prefix != f"{self._services.run_id}/{opening.model}":
                raise Refusal(f"what is for {path} is another member's, or of another model")
            first = await self._ask(self._bucket.create(path, data))
        await stream.send(Written(first))


class CourierStore:
    """The store of a member without keys: it asks the run's couriers, one after another.

    It asks for one object at a time, as they send them so: another would wait for longer than it may.
    """

    errors: Errors = (PeerError,)
    refusals: Errors = (PermissionError,)
    rights = "with its members that have keys"

    def __init__(self, services: RunServices, prefix: str) -> None:
        self._services, self._root = services, f"runs/{prefix}/"
        self._model = prefix.removeprefix(f"{services.run_id}/")
        self._last: PeerId | None = None  # that answered
        self._turns: defaultdict[type[Message], asyncio.Lock] = defaultdict(asyncio.Lock)

    async def create(self, path: str, data: Buffer) -> bool:
        require(len(data) <= MAX_OBJECT_BYTES, f"{len(data)} bytes are too many to carry", PermissionError)

        async def talk(stream: Stream) -> bool:
            await _send(stream, data)
            async with _patience() as moved:
                moved(len(data))  # to the bucket
                return (await stream.receive(Written))[0].first

        return await self._ask(WriteObject(self._model, self._place(path), len(data)), talk)

    async def read(self, path: str) -> bytes | None:
        place, damaged = self._place(path), list[bytes | None]()
        kind = kind_at(place)
        assert kind is not None, path

        async def talk(stream: Stream) -> bytes | None:
            async with _patience():
                head, _ = await stream.receive(ObjectSize)
            data = None if head.size_bytes is None else await _receive(stream, head.size_bytes)
            try:
                require(data is not None, f"{path} is not there", ProtocolError)
                await asyncio.to_thread(unseal, data or b"", kind)
            except ProtocolError:  # by this courier, perhaps
                damaged.append(data)
                raise
            return data

        try:
            return await self._ask(ReadObject(self._model, place), talk)
        except PeerError:
            if damaged:
                return damaged[0]
            raise

    async def list(self, prefix: str, after: str) -> list[StoredObject]:
        async def talk(stream: Stream) -> list[StoredObject]:
            found, more = list[StoredObject](), True
            async with _patience() as moved:
                while more and len(found) < MAX_ROWS:
                    part, _ = await stream.receive(ObjectRows)
                    moved(len(part.rows) * ROW_BYTES)
                    found += (StoredObject(f"{self._root}{one[0]}", *one[1:]) for one in part.rows)
                    more = part.more
            return found

        folder = self._place(prefix).rstrip("/")
        return await self._ask(ListObjects(self._model, folder, after and self._place(after)), talk)

    async def delete(self, paths: Sequence[str]) -> None:
        raise PermissionError("only members with keys delete objects")

    def _place(self, path: str) -> str:
        return path.removeprefix(self._root)

    async def _couriers(self) -> AsyncIterator[PeerId]:
        last = self._last
        if last is not None:
            yield last
        found = await self._services.dht.published(couriers_key(self._services), CourierRecord)
        others = sorted(found.keys() - {last, self._services.peers.id})
        for peer in self._services.rng.sample(others, len(others)):
            yield peer

    async def _ask(self, opening: Message, talk: Callable[[Stream], Awaitable[T]]) -> T:
        told: Exception | None = None
        async with self._turns[type(opening)]:
            async for courier in self._couriers():
                try:
                    async with await self._services.peers.stream(courier, opening, timeout_s=15.0) as stream:
                        answer = await talk(stream)
                except PeerError as error:
                    if not (isinstance(error, CallRefused) and error.code == "refused"):
                        told = PeerLost(f"no courier answers: {error}")
                    elif told is None:  # otherwise one that is away may do this
                        told = PermissionError(str(error))
                    continue
                self._last = courier
                return answer
            self._last = None
        raise told or PeerLost("no member that carries it is online")
