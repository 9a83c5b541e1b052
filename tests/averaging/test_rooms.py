"""One peer with several collaborations: each message reaches the one that it names."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from colab_swarm.averaging.matchmaking import PrefixRouter
from colab_swarm.errors import CallRefused
from colab_swarm.net.peers import Message, PeerId, Role, Stream
from colab_swarm.sim import LAN, SimNetwork, SimPeers, run_virtual


class Ask(Message, frozen=True):
    prefix: str


class Told(Message, frozen=True):
    text: str


def telling(text: str) -> Callable[[PeerId, Ask], Awaitable[Told]]:
    async def tell(_peer: PeerId, _ask: Ask) -> Told:
        return Told(text)

    return tell


def with_rooms(
    script: Callable[[PrefixRouter, Callable[[str], Awaitable[str]], SimPeers], Awaitable[None]],
) -> None:
    """Run ``script(rooms, ask, asker)``; ``await ask(prefix)`` is what the rooms' peer answers."""

    async def main() -> None:
        network = SimNetwork(LAN, seed=1)
        alice, bob = network.peer("alice"), network.peer("bob")
        network.introduce()

        async def ask(prefix: str) -> str:
            return (await bob.call(alice.id, Ask(prefix), Told, timeout_s=1)).text

        await script(PrefixRouter(alice), ask, bob)

    run_virtual(main())


def test_a_call_reaches_the_room_that_it_names() -> None:
    async def script(rooms: PrefixRouter, ask: Callable[[str], Awaitable[str]], _bob: SimPeers) -> None:
        for name in ("one", "two"):
            rooms.serve(name, Ask, telling(name), Role.VIEWER)
        assert [await ask("one"), await ask("two")] == ["one", "two"]
        with pytest.raises(CallRefused, match="no part in 'three'"):
            await ask("three")
        with pytest.raises(ValueError, match="'one' already"):
            rooms.serve("one", Ask, telling("again"), Role.VIEWER)

    with_rooms(script)


def test_a_stream_reaches_the_room_that_it_names() -> None:
    async def script(rooms: PrefixRouter, _ask: Callable[[str], Awaitable[str]], bob: SimPeers) -> None:
        async def converse(opening: Ask, stream: Stream) -> None:
            await stream.send(Told(opening.prefix))

        rooms.serve_stream("one", Ask, converse, Role.VIEWER)
        stream = await bob.stream(rooms.peers.id, Ask("one"), timeout_s=1)
        assert (await stream.receive(Told))[0].text == "one"
        stray = await bob.stream(rooms.peers.id, Ask("two"), timeout_s=1)
        with pytest.raises(CallRefused, match="no part in 'two'"):
            await stray.receive(Told)

    with_rooms(script)


def test_the_last_room_to_close_ends_the_service() -> None:
    async def script(rooms: PrefixRouter, ask: Callable[[str], Awaitable[str]], _bob: SimPeers) -> None:
        for name in ("one", "two"):
            rooms.serve(name, Ask, telling(name), Role.VIEWER)
        rooms.unserve("one", Ask)
        assert await ask("two") == "two"
        rooms.unserve("two", Ask)
        with pytest.raises(CallRefused, match="not served here"):
            await ask("two")

    with_rooms(script)


class Guest:
    """Serves whatever nobody else does."""

    def __init__(self, rooms: PrefixRouter) -> None:
        self.rooms = rooms

    def enter(self, prefix: str) -> None:
        if prefix != "unwanted":
            self.rooms.serve(prefix, Ask, telling("the guest"), Role.VIEWER)

    def leave(self, prefix: str) -> None:
        self.rooms.unserve(prefix, Ask)


def test_a_guest_serves_what_nobody_else_does_and_makes_room_for_the_owner() -> None:
    async def script(rooms: PrefixRouter, ask: Callable[[str], Awaitable[str]], _bob: SimPeers) -> None:
        rooms.serve("own", Ask, telling("own"), Role.VIEWER)
        rooms.welcome(Guest(rooms))
        assert [await ask("own"), await ask("other")] == ["own", "the guest"]
        with pytest.raises(CallRefused, match="no part"):
            await ask("unwanted")
        with pytest.raises(ValueError, match="assists already"):
            rooms.welcome(Guest(rooms))
        rooms.make_room("other")
        rooms.serve("other", Ask, telling("the owner"), Role.VIEWER)
        assert await ask("other") == "the owner"

    with_rooms(script)
