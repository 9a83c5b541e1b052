"""Relayed links that become direct or punched ones."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from colab_swarm.net import upgrade
from colab_swarm.net.carrier import LinkType
from colab_swarm.net.node import Node
from colab_swarm.net.peers import Contact, PeerId, Stream
from colab_swarm.net.relay import Circuits, Relay
from colab_swarm.net.upgrade import Upgrades
from tests.net.swarm import Echo, Piece, Talk, peers, until


@asynccontextmanager
async def relayed(
    *, alice_listens: bool = False
) -> AsyncIterator[tuple[Node, Node, dict[PeerId, str | None]]]:
    """Alice and bob; bob cannot be dialled and holds a place at carol's; the outcomes of upgrades, by peer."""
    async with (
        peers("carol") as (carol,),
        peers("alice", listen=alice_listens) as (alice,),
        peers("bob", listen=False) as (bob,),
    ):
        relay = Relay(carol)
        outcomes: dict[PeerId, str | None] = {}

        async def candidates() -> list[Contact]:
            return [carol.contact]

        for node in (alice, bob):
            bobs = Circuits(node, candidates, lambda: None, random.Random(1))
            Upgrades(node, bobs.seen_at.get, outcomes.__setitem__, random.Random(2))
        bobs.start()
        await until(lambda: bobs.addresses)
        alice.learn(Contact(bob.id, bobs.addresses))
        yield alice, bob, outcomes
        relay.close()


def way(node: Node, other: Node) -> LinkType | None:
    path = node.path_to(other.id)
    return path and path.way


async def test_a_relayed_link_becomes_a_punched_one_and_loses_no_stream() -> None:
    async with relayed() as (alice, bob, outcomes):
        got: list[int] = []

        async def collect(opening: Talk, stream: Stream) -> None:
            while True:
                got.append((await stream.receive(Piece))[0].index)

        bob.serve_stream(Talk, collect)
        stream = await alice.stream(bob.id, Talk(), timeout_s=5)
        assert way(alice, bob) is LinkType.RELAYED
        await stream.send(Piece(0))
        await until(lambda: way(alice, bob) is LinkType.PUNCHED and way(bob, alice) is LinkType.PUNCHED)
        assert len(alice.linker.table.of(bob.id)) == 2  # the stream still needs the relayed one
        await stream.send(Piece(1))
        await until(lambda: got == [0, 1])
        assert await alice.call(bob.id, Echo(b"over the hole"), Echo, timeout_s=5)
        await stream.end()
        await until(lambda: len(alice.linker.table.of(bob.id)) == len(bob.linker.table.of(alice.id)) == 1)
        await until(lambda: outcomes == {alice.id: None, bob.id: None})


async def test_the_other_end_dials_back_where_it_can() -> None:
    async with relayed(alice_listens=True) as (alice, bob, outcomes):
        await alice.call(bob.id, Echo(), Echo, timeout_s=5)
        await until(lambda: way(alice, bob) is LinkType.DIRECT)
        await until(lambda: outcomes.get(bob.id, "not yet") is None)


async def test_without_a_hole_the_relayed_link_stays_and_the_reason_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upgrade, "CAN_PUNCH", False)
    monkeypatch.setattr(upgrade, "PAUSE_S", (0.0, 0.02))
    async with relayed() as (alice, bob, outcomes):
        await alice.call(bob.id, Echo(), Echo, timeout_s=5)
        await until(lambda: outcomes.get(bob.id) == "one of the two ends cannot punch holes")
        assert way(alice, bob) is LinkType.RELAYED
        assert await alice.call(bob.id, Echo(b"still"), Echo, timeout_s=5) == Echo(b"still")


async def test_a_busy_end_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    real, requests = Upgrades._on_upgrade, 0

    async def busy_at_first(self: Upgrades, opening: upgrade.Upgrade, stream: Stream) -> None:
        nonlocal requests
        requests += 1
        if requests > upgrade.TRIES + 1:
            await real(self, opening, stream)
        else:
            await stream.send(upgrade.UpgradeReady(busy=True))

    monkeypatch.setattr(upgrade, "PAUSE_S", (0.0, 0.02))
    monkeypatch.setattr(Upgrades, "_on_upgrade", busy_at_first)
    async with relayed() as (alice, bob, outcomes):
        await alice.call(bob.id, Echo(), Echo, timeout_s=5)
        await until(lambda: way(alice, bob) is LinkType.PUNCHED)
        await until(lambda: outcomes.get(bob.id, "not yet") is None)
    assert requests == upgrade.TRIES + 2
