"""Streams between real nodes."""

from __future__ import annotations

import asyncio

import pytest

from colab_swarm.errors import PeerLost
from colab_swarm.net.peers import Stream
from tests.net.swarm import Piece, Talk, items, peers, proxied, sink, until


async def test_a_lost_link_is_an_error_at_both_ends_and_never_a_short_result() -> None:
    outcome: list[str] = []

    async def collect(opening: Talk, stream: Stream) -> None:
        try:
            async for _ in items(stream):
                outcome.append("item")
        except PeerLost:
            outcome.append("lost")
            raise

    async with peers("alice", "bob") as (alice, bob), proxied(alice, bob) as proxy:
        bob.serve_stream(Talk, collect)
        stream = await alice.stream(bob.id, Talk(), timeout_s=5)
        await stream.send(Piece(0))
        await until(lambda: outcome == ["item"])
        proxy.cut()
        with pytest.raises(PeerLost):
            await stream.receive(Piece)
        with pytest.raises(PeerLost):
            await stream.send(Piece(1))
        await until(lambda: outcome == ["item", "lost"])


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["upload_bps", "download_bps"])
async def test_a_bandwidth_limit_holds(limit: str) -> None:
    alice_limit = {} if limit == "download_bps" else {limit: 16e6}
    bob_limit = {limit: 16e6} if limit == "download_bps" else {}
    async with peers("alice", **alice_limit) as (alice,), peers("bob", **bob_limit) as (bob,):
        alice.learn(bob.contact)
        bob.serve_stream(Talk, sink)
        async with await alice.stream(bob.id, Talk(), timeout_s=5) as stream:
            began_at = asyncio.get_running_loop().time()
            for index in range(20):
                await stream.send(Piece(index), bytes(1 << 16))
            await stream.end()
            await stream.receive(Piece)
            seconds = asyncio.get_running_loop().time() - began_at
        assert 0.3 < seconds < 2.0  # 1.3 MB at 2 MB/s, after a burst of 0.2 MB
