"""Messages of any type, valid but for what is mutated, and how a member sends them without any checks."""

import asyncio
import contextlib
import copy
import math
import random
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import inspect

from colab_swarm.averaging.group import Attend, StepReport
from colab_swarm.errors import PeerError
from colab_swarm.net.link import Link
from colab_swarm.net.mux import FrameKind, encode, to_packets
from colab_swarm.net.peers import Message
from colab_swarm.swarm.swarm import Swarm

WILD: tuple[Any, ...] = (
    *(None, True, 0, 1, -1, 255, 2**31, 2**40, 2**63 - 1, -(2**63), 0.0, -0.0, 1e-300, 1e300),
    *(
        math.nan,
        math.inf,
        -math.inf,
        "",
        "\x00",
        "x" * 3000,
        "é" * 300,
        b"",
        bytes(31),
        bytes(32),
        bytes(5000),
    ),
    *([], [[]], [[[[[[]]]]]], [0] * 300, {}, {"a": {"b": []}}),
)


class Mutator:
    """Makes messages of the services of a peer; ``known`` are texts and bytes that mean something to it.

    ``templates``: messages that an honest peer would send.
    """

    def __init__(self, rng: random.Random, known: list[Any], templates: Iterable[Message] = ()) -> None:
        self._rng = rng
        self._templates = {type(one): msgspec.msgpack.encode(one) for one in templates}
        self._texts = [one for one in known if isinstance(one, str)] or [""]
        self._bytes = [one for one in known if isinstance(one, bytes)] or [b""]

    def value(self, kind: inspect.Type, depth: int = 0) -> Any:
        """A plain value that is valid for a type, as far as its annotations say."""
        rng = self._rng
        match kind:
            case inspect.StructType(fields=fields):
                return [self.value(one.type, depth + 1) for one in fields]
            case inspect.UnionType(types=types):
                return self.value(rng.choice(types), depth)
            case inspect.LiteralType(values=values):
                return rng.choice(values)
            case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
                most = min(kind.max_length if kind.max_length is not None else 3, 3)
                return [
                    self.value(item, depth + 1)
                    for _ in range(rng.randint(kind.min_length or 0, max(most, kind.min_length or 0)))
                ]
            case inspect.TupleType(item_types=items):
                return [self.value(one, depth + 1) for one in items]
            case inspect.DictType():
                return {}
            case inspect.IntType(ge=least, le=most, lt=under):
                low = int(least if least is not None else -2)
                high = int(most if most is not None else under - 1 if under is not None else 1000)
                return rng.choice((low, high, rng.randint(low, min(high, low + 20))))
            case inspect.FloatType(ge=least, le=most, lt=under):
                low = least if least is not None else -1.0
                high = most if most is not None else under / 2 if under is not None else 100.0
                return rng.choice((float(low), float(high), rng.uniform(low, min(high, low + 10))))
            case inspect.BoolType():
                return rng.random() < 0.5
            case inspect.BytesType(max_length=most):
                return rng.choice(self._bytes)[: most if most is not None else None]
            case inspect.StrType(max_length=most):
                return rng.choice(self._texts)[: most if most is not None else None]
            case inspect.EnumType(cls=cls):
                return rng.choice(list(cls)).value
            case inspect.NoneType():
                return None
            case inspect.CustomType() | inspect.AnyType() | inspect.RawType():
                return copy.deepcopy(rng.choice(WILD))
        return copy.deepcopy(rng.choice(WILD))

    def body(self, kind: type[Any]) -> bytes:
        """An encoded message: valid, or with a field mutated, or with bytes mutated."""
        rng = self._rng
        if kind in self._templates and rng.random() < 0.7:
            value = msgspec.msgpack.decode(self._templates[kind])
        else:
            value = self.value(inspect.type_info(kind))
        if (how := rng.random()) < 0.6:
            for _ in range(rng.choice((1, 1, 2))):
                self._mutate(value)
        try:
            data = msgspec.msgpack.encode(value)
        except (OverflowError, ValueError):
            data = msgspec.msgpack.encode(WILD[0])
        return self.scramble(data) if how > 0.8 else data

    def _mutate(self, value: Any) -> None:
        while isinstance(value, list) and value:
            index = self._rng.randrange(len(value))
            if isinstance(value[index], list) and value[index] and self._rng.random() < 0.7:
                value = value[index]
                continue
            match self._rng.randrange(6):
                case 0:
                    del value[index]
                case 1:
                    value.insert(index, copy.deepcopy(self._rng.choice(WILD)))
                case _:
                    value[index] = copy.deepcopy(self._rng.choice((*WILD, *self._texts, *self._bytes)))
            return

    def scramble(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(self._rng.choice((1, 1, 2, 8))):
            at = self._rng.randrange(len(changed) + 1)
            match self._rng.randrange(4):
                case 0 if changed:
                    changed[at % len(changed)] ^= 1 << self._rng.randrange(8)
                case 1:
                    changed[at:at] = self._rng.randbytes(self._rng.choice((1, 4, 40)))
                case 2:
                    del changed[at : at + self._rng.choice((1, 4, 40))]
                case _:
                    changed[at : at + 1] = b"\xff"
        return bytes(changed)

    def opening(self, kind: type[Any]) -> bytes:
        return msgspec.msgpack.encode((kind.__name__, msgspec.Raw(self.body(kind))))

    def payload(self) -> bytes:
        size = self._rng.choice((0, 0, 1, 63, 64, 4096, 16_384, 100_000))
        return self._rng.randbytes(size) if self._rng.random() < 0.5 else bytes(size)

    def packets(self) -> list[bytes]:
        """Packets of frames with any kind, number and content, some scrambled."""
        frames = [
            encode(
                self._rng.choice((*FrameKind, 0, 13, 255)),
                self._rng.choice((0, 1, 2, 3, 5, 7, 2**32, 2**63, self._rng.randrange(1000))),
                self._rng.choice(
                    (b"", b"\x00" * 4, b"\xff" * 4, self._rng.randbytes(self._rng.randrange(80)))
                ),
                self.payload() if self._rng.random() < 0.3 else b"",
            )
            for _ in range(self._rng.randrange(1, 5))
        ]
        return [self.scramble(one) if self._rng.random() < 0.5 else one for one in to_packets(frames)]


async def send_messages(
    link: Link, mutator: Mutator, calls: list[Any], streams: list[Any], items: list[Any]
) -> int:
    """Send one of each of these types, and items on the streams; return how many messages."""
    sent = 0
    for kind in calls:
        answer = asyncio.get_running_loop().create_future()
        link.mux.call(mutator.opening(kind), answer)
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        sent += 1
    for kind in streams:
        stream = link.mux.open(mutator.opening(kind))
        # An organizer goes on to the reports only after a valid opening.
        for item in [StepReport] * 3 if kind is Attend else items[:3]:
            if stream.credit_bytes > 0:
                link.send_item(stream, mutator.body(item), mutator.payload())
                sent += 1
        sent += 1
        mutator._rng.shuffle(items)
    link.flush_soon()
    return sent


async def link_of(swarm: Swarm, other: Swarm) -> Link:
    """A fresh link of ``swarm`` to the other peer."""
    node = swarm.services.peers  # type: ignore[attr-defined]
    for link in node.table.of(other.id):
        link.abort("again")
    for _ in range(3):
        with contextlib.suppress(PeerError):
            found: Link = await node.link_to(other.id, 20.0)
            return found
    raise AssertionError("no link to the attacked peer")
