"""A member sends messages and frames of every kind, mutated: nothing crashes, grows, or is said aloud."""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import colab_swarm as cs
from colab_swarm.averaging.group import Attend, News, StepReport, Ticket, Whereabouts
from colab_swarm.averaging.messages import Chunk
from colab_swarm.dht.records import FindNear, FoundNear
from colab_swarm.dht.service import on_loop
from colab_swarm.errors import PeerError, StateError
from colab_swarm.events import Fault
from colab_swarm.net.link import Link
from colab_swarm.net.peers import Message, PeerId, Role
from colab_swarm.tensors import chunks as chunks_module
from colab_swarm.tensors.chunks import MAX_STATE_BYTES, StateChunk, chunk_bytes
from colab_swarm.training.state import DescribeState
from tests.attacks.mutations import Mutator, link_of, send_messages
from tests.net.swarm import until
from tests.training import toy

BATCH = 50  # messages to a link


def end(swarm: cs.Swarm) -> None:
    """Leave without notice, which takes no time."""

    async def die() -> None:
        swarm.kill()
        await swarm.services.peers.close()

    swarm.runtime.call(die())


class Full:
    """A peer that does everything a peer can do, and a member that attacks it."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        options = cs.NetworkOptions(lan=False, relay=True)
        self.alice = cs.create("full", peer_name="alice", options=options)
        stack.callback(end, self.alice)
        self.optimizer = toy.join_training(self.alice, toy.model())
        self.alice.serve_as_reducer()
        self.alice.host_experts("ffn", lambda: cs.moe.FeedForward(8), grid=(2, 2), count=1, folder=folder)
        self.mallory = cs.join(
            str(self.alice.invite()), peer_name="mallory", options=cs.NetworkOptions(lan=False)
        )
        stack.callback(end, self.mallory)
        self.node: Any = self.alice.services.peers  # type: ignore[attr-defined]
        calls, streams = (
            [decoder.type for decoder, _, _ in table._by_name.values()] for table in self.node.services
        )
        self.calls: list[Any] = calls
        self.streams: list[Any] = streams
        self.items: list[Any] = [Chunk, StateChunk, StepReport, News, *streams]
        rounds = self.optimizer.rounds
        own = rounds.view.own
        self.known = [
            *(rounds.view.prefix, self.alice.run_id, "ffn.0.0", "float32", "int8", "ws://127.0.0.1:9"),
            *(self.alice.id, self.mallory.id, own.lineage, b"", bytes(16), bytes(32)),
        ]
        terms = rounds._rendezvous.settings.terms
        ticket = Ticket(terms, 4.0, samples=4.0)
        self.templates = [
            Attend(self.mallory.services.peers.contact, b"", terms, rounds._rendezvous.settings.target),
            StepReport(own.step, own.lineage, counted=4.0, granted=4.0, batch_samples=4.0, ticket=ticket),
            Whereabouts(rounds.view.prefix, b"", 9, 9),
        ]
        self.call(on_loop(rounds._rendezvous.start))  # alice organizes

    def call(self, work: Any) -> Any:
        return self.alice.runtime.call(work)

    def counted(self) -> Counter[str]:
        """What messages could pile up in: handlers, streams, rounds, and the tables of each service."""
        links = [*self.node.table]
        rounds = self.optimizer.rounds
        return Counter(
            handlers=sum(len(link.tasks) for link in links),
            streams=sum(len(link.mux.streams) for link in links),
            calls=sum(len(link.mux.serving) for link in links),
            links=len(links),
            rounds=len(self.alice.services.averager._rounds),
            standing=len(rounds._rendezvous._queues),
            tasks=len(asyncio.all_tasks(self.alice.runtime._loop)),
        )

    async def attack(self, seed: int, count: int) -> int:
        rng, sent, turn = random.Random(seed), 0, seed
        while sent < count:
            link = await link_of(self.mallory, self.alice)
            mutator, batch = Mutator(rng, self.known, self.templates), 0
            while batch < BATCH and link.lost is None:
                calls = [self.calls[(turn + i) % len(self.calls)] for i in range(3)]
                streams = [self.streams[(turn + i) % len(self.streams)] for i in range(2)]
                batch += await send_messages(link, mutator, calls, streams, self.items)
                turn += 3
                await asyncio.sleep(0)
            sent += batch
            await self.arrive(link)
            link.abort("the attack is over")
        return sent

    async def attack_frames(self, seed: int, count: int) -> int:
        rng, sent = random.Random(seed), 0
        while sent < count:
            link = await link_of(self.mallory, self.alice)
            mutator = Mutator(rng, self.known)
            for packet in mutator.packets():
                link.carrier.send_bytes(link._keys[0].encrypt(packet))  # type: ignore[index]
                sent += 1
            await self.arrive(link)
        return sent

    async def arrive(self, link: Link) -> None:
        """Return when alice has read all that was sent, or has dropped the link."""
        with suppress(PeerError):
            await self.ask(link)

    async def ask(self, link: Link) -> FoundNear:
        return await link.call(FindNear(bytes(32), self.mallory.contact), FoundNear, timeout_s=20)

    async def settle(self, most: Counter[str]) -> None:
        """Return when nothing more is left than ``most``."""
        for link in [*self.mallory.services.peers.table]:  # type: ignore[attr-defined]
            link.abort("settled")
        async with asyncio.timeout(60):  # what handlers wait for by themselves
            await until(lambda: self.counted() <= most)

    async def works(self) -> bool:
        return isinstance(await self.ask(await link_of(self.mallory, self.alice)), FoundNear)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Full]:
    with ExitStack() as stack:
        yield Full(stack, tmp_path_factory.mktemp("saves"))


def check(full: Full, caplog: pytest.LogCaptureFixture, attack: Any, seed: int, count: int) -> None:
    full.call(full.works())
    before = full.counted()
    most = before + Counter(handlers=2, streams=2, calls=2, links=1, tasks=12, rounds=1, standing=1)
    assert full.call(attack(seed, count)) >= count  # the attack fired
    try:
        full.call(full.settle(most))
    except TimeoutError:
        pytest.fail(f"seed {seed}: left over {full.counted()}, before {before}")
    assert full.call(full.works())
    loud = [one for one in caplog.records if one.levelno >= logging.ERROR]
    assert not loud, f"seed {seed}: {[one.getMessage() + str(one.exc_info) for one in loud[:3]]}"
    assert not full.alice.events.recent(Fault), f"seed {seed}: {full.alice.events.recent(Fault)[:3]}"
    loss = toy.loss_of(toy.model(), 0)
    assert torch.isfinite(loss) and not full.optimizer.global_step


def test_every_service_of_a_full_peer_is_attacked(full: Full) -> None:
    names = {kind.__name__ for kind in (*full.calls, *full.streams)}
    assert names >= {
        *(
            "FindNear",
            "Fetch",
            "StoreRecord",
            "Whereabouts",
            "Attend",
            "ReduceSpan",
            "RecallSpan",
        ),
        *("DescribeState", "FetchState", "ForwardExpert", "BackwardExpert", "KeepSave", "FetchSave"),
        *("RequestMembership", "ShareRevoked", "Reserve", "OpenCircuit", "CircuitOffer", "DialBack"),
        *("Moved", "MeasureSpeed"),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attack", "seeds", "count"),
    [
        ("attack", 4, 100),
        ("attack_frames", 2, 50),
        pytest.param("attack", 18, 1000, marks=pytest.mark.ordeal),
        pytest.param("attack_frames", 4, 500, marks=pytest.mark.ordeal),
    ],
)
def test_mutated_messages_and_frames_do_no_harm(
    full: Full, caplog: pytest.LogCaptureFixture, attack: str, seeds: int, count: int
) -> None:
    @settings(max_examples=seeds, phases=[Phase.explicit, Phase.generate])  # a seed cannot be shrunk
    @given(seed=st.integers(0, 1 << 32))
    def endure(seed: int) -> None:
        check(full, caplog, getattr(full, attack), seed, count)

    endure()


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
        chunks = -(-size // chunk_bytes(size))
        return Claim(b"m" * 16, 5000, size, bytes(32 * chunks))

    prefix = full.optimizer.rounds.view.prefix
    full.mallory.services.router.serve(prefix, DescribeState, describe, Role.GUEST)
    rounds = full.optimizer.rounds
    monkeypatch.setattr(chunks_module.np, "empty", spy)
    try:
        with pytest.raises(StateError, match=r"bytes are too many|not a valid Manifest"):
            full.call(rounds._states.download([full.mallory.id], 1 << 28))
    finally:
        full.mallory.services.router.unserve(prefix, DescribeState)
    assert asked and max(allocated, default=0) < 1 << 28
