"""A member sends messages of every kind, mutated: nothing crashes, grows, or is said aloud."""

import asyncio
import contextlib
import copy
import logging
import math
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import inspect

import colab_swarm as cs
from colab_swarm.averaging.group import Attend, News, StepReport, Ticket, Whereabouts
from colab_swarm.averaging.messages import Chunk
from colab_swarm.dht.records import FindNear, FoundNear
from colab_swarm.errors import PeerError, StateError
from colab_swarm.events import Fault
from colab_swarm.net.link import Link
from colab_swarm.net.peers import Message, PeerId, Role
from colab_swarm.runtime import on_loop
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.tensors import chunks as chunks_module
from colab_swarm.tensors.chunks import MAX_STATE_BYTES, StateChunk, chunk_bytes
from colab_swarm.training.state import DescribeState
from tests.net.swarm import until
from tests.training import toy

BATCH = 50  # messages to a link
NUMBERS = (0, 1, -1, 255, 2**31, 2**40, 2**63 - 1, -(2**63), 0.0, -0.0, 1e-300, 1e300, math.nan, math.inf)
TEXTS = ("", "\x00", "x" * 3000, "é" * 300, b"", bytes(31), bytes(32), bytes(5000))
WILD: tuple[Any, ...] = (
    *NUMBERS,
    *TEXTS,
    None,
    True,
    [],
    [[]],
    [[[[[[]]]]]],
    [0] * 300,
    {},
    {"a": {"b": []}},
)


class Mutator:
    """Makes messages of any type: as an honest peer sends them, or valid by their type, then mutated.

    Args:
        known: texts and bytes that mean something to the peer.
        templates: messages that an honest peer would send.
    """

    def __init__(self, seed: int, known: list[Any], templates: list[Message]) -> None:
        self.rng = random.Random(seed)
        self._templates = {type(one): msgspec.msgpack.encode(one) for one in templates}
        self._texts = [one for one in known if isinstance(one, str)]
        self._bytes = [one for one in known if isinstance(one, bytes)]

    def value(self, kind: inspect.Type) -> Any:
        """Return a plain value that is valid for a type, as far as its annotations say."""
        rng = self.rng
        match kind:
            case inspect.StructType(fields=fields):
                return [self.value(one.type) for one in fields]
            case inspect.UnionType(types=types):
                return self.value(rng.choice(types))
            case inspect.VarTupleType(item_type=item, min_length=least, max_length=most):
                longest = 3 if most is None else min(most, 3)
                count = rng.randint(least or 0, max(longest, least or 0))
                return [self.value(item) for _ in range(count)]
            case inspect.TupleType(item_types=items):
                return [self.value(one) for one in items]
            case inspect.IntType(ge=least, le=most):
                low = -2 if least is None else least
                high = 1000 if most is None else most
                return rng.choice((low, high, rng.randint(low, min(high, low + 20))))
            case inspect.FloatType(ge=least, le=most):
                low = -1.0 if least is None else float(least)
                high = 100.0 if most is None else float(most)
                return rng.choice((low, high, rng.uniform(low, min(high, low + 10))))
            case inspect.BoolType():
                return rng.random() < 0.5
            case inspect.BytesType(max_length=most):
                return rng.choice(self._bytes)[:most]
            case inspect.StrType(max_length=most):
                return rng.choice(self._texts)[:most]
            case inspect.EnumType(cls=cls):
                return rng.choice(list(cls)).value
            case inspect.NoneType():
                return None
        return self._wild()

    def _wild(self) -> Any:
        return copy.deepcopy(self.rng.choice((*WILD, *self._texts, *self._bytes)))

    def body(self, kind: type[Any]) -> bytes:
        """Return an encoded message: valid, or with fields mutated, or with bytes mutated."""
        value = self.value(inspect.type_info(kind))
        if kind in self._templates and self.rng.random() < 0.7:
            value = msgspec.msgpack.decode(self._templates[kind])
        how = self.rng.random()
        if how < 0.6:
            for _ in range(self.rng.choice((1, 1, 2))):
                self._mutate(value)
        data = msgspec.msgpack.encode(value)
        return self._scrambled(data) if how > 0.8 else data

    def _mutate(self, value: Any) -> None:
        while isinstance(value, list) and value:
            index = self.rng.randrange(len(value))
            if isinstance(value[index], list) and value[index] and self.rng.random() < 0.7:
                value = value[index]
                continue
            match self.rng.randrange(6):
                case 0:
                    del value[index]
                case 1:
                    value.insert(index, self._wild())
                case _:
                    value[index] = self._wild()
            return

    def _scrambled(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(self.rng.choice((1, 1, 2, 8))):
            at = self.rng.randrange(len(changed) + 1)
            match self.rng.randrange(4):
                case 0 if changed:
                    changed[at % len(changed)] ^= 1 << self.rng.randrange(8)
                case 1:
                    changed[at:at] = self.rng.randbytes(self.rng.choice((1, 4, 40)))
                case 2:
                    del changed[at : at + self.rng.choice((1, 4, 40))]
                case _:
                    changed[at : at + 1] = b"\xff"
        return bytes(changed)

    def opening(self, kind: type[Any]) -> bytes:
        return msgspec.msgpack.encode((kind.__name__, msgspec.Raw(self.body(kind))))

    def payload(self) -> bytes:
        size = self.rng.choice((0, 0, 1, 63, 64, 4096, 16_384, 100_000))
        return self.rng.randbytes(size) if self.rng.random() < 0.5 else bytes(size)


def end(swarm: Swarm) -> None:
    """Leave without notice, which takes no time."""

    async def die() -> None:
        swarm.kill()
        await swarm.services.peers.close()

    swarm.runtime.call(die())


class Full:
    """A peer that does everything a peer can do, and a member that attacks it."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path) -> None:
        options = cs.NetworkOptions(lan=False, relay=True)
        self.alice = cs.create("full", peer_name="alice", options=options)
        stack.callback(end, self.alice)
        self.optimizer = toy.join_training(self.alice, toy.model())
        self.alice.reduce()
        self.alice.experts.host("ffn", lambda: cs.moe.FeedForward(8), grid=(2, 2), count=1, folder=folder)
        self.mallory = cs.join(
            str(self.alice.invite()), peer_name="mallory", options=cs.NetworkOptions(lan=False)
        )
        stack.callback(end, self.mallory)
        self.node: Any = self.alice.services.peers
        self.attacker: Any = self.mallory.services.peers
        calls, streams = (
            [decoder.type for decoder, _, _ in table._by_name.values()] for table in self.node.services
        )
        self.calls: list[Any] = calls
        self.streams: list[Any] = streams
        self.items: list[Any] = [Chunk, StateChunk, StepReport, News, *streams]
        rounds: Any = self.optimizer.rounds
        own = rounds.view.own
        self.known = [
            *(rounds.view.prefix, self.alice.run_id, "ffn.0.0", "float32", "int8", "ws://127.0.0.1:9"),
            *(self.alice.id, self.mallory.id, own.lineage, b"", bytes(16), bytes(32)),
        ]
        settings = rounds._rendezvous.settings
        ticket = Ticket(settings.terms, 4.0, samples=4.0)
        self.templates: list[Message] = [
            Attend(self.attacker.contact, b"", settings.terms, settings.target),
            StepReport(own.step, own.lineage, counted=4.0, granted=4.0, batch_samples=4.0, ticket=ticket),
            Whereabouts(rounds.view.prefix, b"", 9, 9),
        ]
        self.call(on_loop(rounds._rendezvous.start))  # alice organizes

    def call(self, work: Any) -> Any:
        return self.alice.runtime.call(work)

    def counted(self) -> Counter[str]:
        """What messages could pile up in: handlers, streams, rounds, and the tables of each service."""
        links = [*self.node.table]
        rounds: Any = self.optimizer.rounds
        return Counter(
            handlers=sum(len(link.tasks) for link in links),
            streams=sum(len(link.mux.streams) for link in links),
            calls=sum(len(link.mux.serving) for link in links),
            links=len(links),
            rounds=len(self.alice.services.averager._rounds),
            standing=len(rounds._rendezvous._queues),
            tasks=len(asyncio.all_tasks(self.alice.runtime._loop)),
        )

    async def fresh_link(self) -> Link:
        for link in [*self.attacker.table]:
            link.abort("again")
        for _ in range(3):
            with contextlib.suppress(PeerError):
                link = await self.attacker.link_to(self.alice.id, 20.0)
                return link
        raise AssertionError("no link to the attacked peer")

    async def attack(self, seed: int, count: int) -> None:
        mutator = Mutator(seed, self.known, self.templates)
        sent = 0
        turn = seed
        while sent < count:
            link = await self.fresh_link()
            until_fresh = sent + BATCH
            while sent < until_fresh and link.lost is None:
                for step in range(3):
                    self.send_call(link, mutator, self.calls[(turn + step) % len(self.calls)])
                for step in range(2):
                    self.send_stream(link, mutator, self.streams[(turn + step) % len(self.streams)])
                link.flush_soon()
                sent += 5
                turn += 3
                await asyncio.sleep(0)
            with contextlib.suppress(PeerError):  # it has read all that was sent, or has dropped the link
                await self.ask(link)

    def send_call(self, link: Link, mutator: Mutator, kind: type[Any]) -> None:
        answer = asyncio.get_running_loop().create_future()
        link.mux.call(mutator.opening(kind), answer)
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())

    def send_stream(self, link: Link, mutator: Mutator, kind: type[Any]) -> None:
        stream = link.mux.open(mutator.opening(kind))
        # An organizer goes on to the reports only after a valid opening.
        for item in [StepReport] * 3 if kind is Attend else mutator.rng.sample(self.items, 3):
            if stream.credit_bytes > 0:
                link.send_item(stream, mutator.body(item), mutator.payload())

    async def ask(self, link: Link) -> FoundNear:
        return await link.call(
            FindNear(bytes(32), self.mallory.services.peers.contact), FoundNear, timeout_s=20
        )

    async def works(self) -> bool:
        return isinstance(await self.ask(await self.fresh_link()), FoundNear)

    async def settle(self, most: Counter[str]) -> None:
        """Return when nothing more is left than ``most``."""
        for link in [*self.attacker.table]:
            link.abort("settled")
        async with asyncio.timeout(60):  # what handlers wait for by themselves
            await until(lambda: self.counted() <= most)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Full]:
    with contextlib.ExitStack() as stack:
        yield Full(stack, tmp_path_factory.mktemp("saves"))


SERVICES = (
    "FindNear Fetch StoreRecord Whereabouts Attend ReduceSpan RecallSpan DescribeState FetchState ForwardExpert "
    "BackwardExpert KeepSave FetchSave RequestMembership ShareRevoked Reserve OpenCircuit CircuitOffer DialBack Moved "
    "MeasureSpeed"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "count"), [(0, 200), (1, 200), pytest.param(2, 18_000, marks=pytest.mark.ordeal)]
)
def test_mutated_messages_do_no_harm(
    full: Full, caplog: pytest.LogCaptureFixture, seed: int, count: int
) -> None:
    assert {kind.__name__ for kind in (*full.calls, *full.streams)} >= {*SERVICES.split()}
    full.call(full.works())
    before = full.counted()
    most = before + Counter(handlers=2, streams=2, calls=2, links=1, tasks=12, rounds=1, standing=1)
    full.call(full.attack(seed, count))
    try:
        full.call(full.settle(most))
    except TimeoutError:
        pytest.fail(f"left over {full.counted()}, before {before}")
    assert full.call(full.works())
    loud = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert not loud, [record.getMessage() + str(record.exc_info) for record in loud[:3]]
    assert not full.alice.events.recent(Fault) and not full.optimizer.global_step


@pytest.mark.parametrize("size", [MAX_STATE_BYTES, 10 << 30])
def test_a_manifest_of_gigabytes_costs_no_memory(
    full: Full, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """A donor claims a state far larger than any of this model could be; what cannot be decoded counts as a lie too."""
    asked: list[PeerId] = []
    allocated: list[int] = []
    empty = np.empty

    def spy(shape: Any, *args: Any, **named: Any) -> Any:
        allocated.append(int(np.prod(shape)))
        return empty(shape, *args, **named)

    class Claim(Message, frozen=True):
        subject: bytes
        step: int
        size_bytes: int
        digests: bytes

    async def describe(peer: PeerId, ask: DescribeState) -> Claim:
        asked.append(peer)
        return Claim(b"m" * 16, 5000, size, bytes(32 * -(-size // chunk_bytes(size))))

    rounds: Any = full.optimizer.rounds
    prefix = rounds.view.prefix
    full.mallory.services.router.serve(prefix, DescribeState, describe, Role.GUEST)
    monkeypatch.setattr(chunks_module.np, "empty", spy)
    try:
        with pytest.raises(StateError, match=r"bytes are too many|not a valid Manifest"):
            full.call(rounds._states.download([full.mallory.id], 1 << 28))
    finally:
        full.mallory.services.router.unserve(prefix, DescribeState)
    assert asked and max(allocated, default=0) < 1 << 28
