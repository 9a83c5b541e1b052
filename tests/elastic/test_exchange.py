"""Buckets over simulated peer links: received buckets, dropped and lost members."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.averaging.group import GroupMember
from colab_swarm.elastic.group import READY, ElasticLink, PeerExchange
from colab_swarm.elastic.schedulers import NormBounded
from colab_swarm.elastic.steps import ElasticSettings, ElasticSteps, Piece
from colab_swarm.errors import PeerError, StateError
from colab_swarm.events import EventLog, PeerLeft
from colab_swarm.net.peers import Buffer
from colab_swarm.sim import LAN, SimNetwork, SimPeers, run_virtual

PREFIX = "run/elastic/model"
SIZES = [6, 4]
SETTINGS = ElasticSettings(PREFIX, 2, NormBounded(0.5))


@dataclass
class Seen:
    """A receiver that records everything."""

    pieces: list[tuple[int, Piece, bytes]] = field(default_factory=list)
    lost: dict[int, str] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def on_piece(self, peer: int, piece: Piece, payload: Buffer) -> None:
        self.pieces.append((peer, piece, bytes(payload)))
        self.changed.set()

    def on_lost(self, peer: int, reason: str) -> None:
        assert peer not in self.lost
        self.lost[peer] = reason
        self.changed.set()

    async def wait(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


@dataclass
class Group:
    """Members on a simulated LAN."""

    network: SimNetwork
    peers: list[SimPeers]
    exchanges: list[PeerExchange]
    events: EventLog

    @classmethod
    def of(cls, *names: str, silent: str = "", quiet: str = "") -> "Group":
        """Members with these names; the ``silent`` one has no exchange, the ``quiet`` one only dials out."""
        network = SimNetwork(LAN, seed=1)
        peers = sorted((network.peer(name, listen=name != quiet) for name in names), key=lambda peer: peer.id)
        network.introduce()
        members = [GroupMember(peer.id, peer.contact.addresses, 1.0, 1.0) for peer in peers]
        events, exchanges = EventLog(), []
        for peer in peers:
            if peer.name != silent:
                exchange = PeerExchange(peer, events, PREFIX, members, timeout_s=10.0)
                peer.serve_stream(ElasticLink, exchange.serve)
                exchanges.append(exchange)
        return cls(network, peers, exchanges, events)

    async def begin(self, receivers: list[Any]) -> None:
        for exchange, receiver in zip(self.exchanges, receivers, strict=True):
            exchange.steps = receiver
        await asyncio.gather(*(exchange.begin() for exchange in self.exchanges))

    async def close(self) -> None:
        await asyncio.gather(*(exchange.close() for exchange in self.exchanges))


@pytest.mark.parametrize("quiet", ["", "alice", "bob", "carol"])
async def test_all_others_receive_buckets_in_order_up_to_the_goodbye(quiet: str) -> None:
    group, seen = Group.of("alice", "bob", "carol", quiet=quiet), [Seen() for _ in range(3)]
    await group.begin(list(seen))
    sent = [(Piece(0, bucket, 1.5), bytes([bucket]) * 100_000) for bucket in range(20)]
    for item in sent:
        group.exchanges[1].send(*item)
    await group.exchanges[1].close()
    for other in (0, 2):
        await seen[other].wait(lambda: 1 in seen[other].lost)  # noqa: B023
        assert seen[other].pieces == [(1, *item) for item in sent]
    assert not seen[1].pieces and len(group.events.recent(PeerLeft)) == 2
    await group.close()
    await group.close()


async def test_a_member_that_does_not_come_is_named() -> None:
    group = Group.of("alice", "bob", silent="bob")
    with pytest.raises(StateError, match="restart all peers"):
        await group.begin([Seen()])
    group.exchanges[0].kill()


async def test_a_stranger_and_a_second_stream_of_a_member_are_refused() -> None:
    group, seen = Group.of("alice", "bob"), [Seen(), Seen()]
    stranger = group.network.peer("mallory")
    group.network.introduce()
    await group.begin(list(seen))
    first, second = group.peers
    opening = ElasticLink(PREFIX, (first.id, second.id))
    other, again = "another group", "a stream already"
    wrong = ElasticLink(PREFIX, (first.id,))
    for peer, said, words in ((stranger, opening, other), (first, opening, again), (first, wrong, other)):
        async with await peer.stream(second.id, said, timeout_s=5.0) as stream:
            await stream.send(Piece(0, 0), b"lies")
            with pytest.raises(PeerError, match=words):
                await stream.receive(Piece)
    assert not seen[1].pieces and not seen[1].lost
    await group.close()


async def test_a_member_that_lies_is_dropped_and_the_step_continues() -> None:
    group = Group.of("alice", "bob")
    honest = ElasticSteps(group.exchanges[0], SETTINGS, SIZES)
    liar = Seen()
    await group.begin([honest, liar])
    own(honest)
    group.exchanges[1].send(READY, b"\0" * 24)  # again: harmless, and ignored
    for bucket, size in enumerate(SIZES):
        group.exchanges[1].send(Piece(0, bucket), bytes(4 * size))
    await honest.finish()
    own(honest, step=1)
    group.exchanges[1].send(Piece(1, 0), np.full(6, np.nan, np.float32).tobytes())
    async with asyncio.timeout(5):
        await honest.finish()
    assert honest.finished is not None and honest.finished[1].lost == (1,)
    honest.ledger.check_invariants()
    await liar.wait(lambda: 0 in liar.lost)
    assert len(group.events.recent(PeerLeft)) == 2, "each has lost the other, once"
    await group.close()


def own(steps: ElasticSteps, step: int = 0) -> None:
    for bucket, size in enumerate(SIZES):
        values = np.ones(size, np.float32)
        steps.hand_over(Piece(step, bucket, float(size)), values, values.tobytes())


@given(
    st.integers(-(2**63), 2**63 - 1) | st.integers(0, 3),
    st.integers(-(2**63), 2**63 - 1) | st.integers(0, 2),
    st.binary(max_size=32) | st.sampled_from([b"\0" * 24, b"\0" * 16, b"\xff" * 24]),
    st.sampled_from(["float32", "float16", "int8", "topk:0.5", "sparseloco", "onebit"]),
)
def test_any_bytes_are_believed_or_dropped(step: int, bucket: int, payload: bytes, codec: str) -> None:
    async def main() -> None:
        exchange = Group.of("alice", "bob").exchanges[0]
        steps = ElasticSteps(exchange, ElasticSettings(PREFIX, 2, NormBounded(0.5), codec), SIZES)
        steps.on_piece(1, Piece(step, bucket), payload)
        assert exchange.lost or (0 <= step <= 2 and 0 <= bucket < 2)
        if step == 0 and not exchange.lost:
            assert steps.ledger.standing(0.0).numels == (SIZES[bucket],)
        steps.ledger.check_invariants()

    run_virtual(main())


@pytest.mark.parametrize("squares", [-1.0, float("nan"), float("inf")])
def test_an_invalid_norm_is_refused(squares: float) -> None:
    for piece in (Piece(0, 0, squares), Piece(0, 0, 0.0, squares)):
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(piece), type=Piece)
