"""Messages reach the collaboration that they name."""

from collections.abc import Awaitable, Callable

import pytest

from colab_swarm.averaging.router import PrefixRouter
from colab_swarm.errors import CallRefused
from colab_swarm.net.peers import Message, PeerId, Role, Stream
from colab_swarm.sim import LAN, SimNetwork, SimPeers


class Ask(Message, frozen=True):
    prefix: str


class Answer(Message, frozen=True):
    text: str


def answering(text: str) -> Callable[[PeerId, Ask], Awaitable[Answer]]:
    async def answer(_peer: PeerId, _ask: Ask) -> Answer:
        return Answer(text)

    return answer


async def converse(opening: Ask, stream: Stream) -> None:
    await stream.send(Answer(opening.prefix))


def meet() -> tuple[PrefixRouter, Callable[[str], Awaitable[str]], SimPeers]:
    """Return the router of one peer, ``await ask(prefix)`` for its answer, and the asking peer."""
    network = SimNetwork(LAN, seed=1)
    alice, bob = network.peer("alice"), network.peer("bob")
    network.introduce()

    async def ask(prefix: str) -> str:
        return (await bob.call(alice.id, Ask(prefix), Answer, timeout_s=1)).text

    return PrefixRouter(alice), ask, bob


async def test_a_message_reaches_the_collaboration_that_it_names_until_the_last_one_has_closed() -> None:
    router, ask, bob = meet()
    for name in ("one", "two"):
        router.serve(name, Ask, answering(name), Role.VIEWER)
    assert [await ask("one"), await ask("two")] == ["one", "two"]
    with pytest.raises(CallRefused, match="no part in 'three'"):
        await ask("three")
    with pytest.raises(ValueError, match="'one' already"):
        router.serve("one", Ask, answering("again"), Role.VIEWER)
    router.unserve("one", Ask)
    assert await ask("two") == "two"
    router.unserve("two", Ask)
    with pytest.raises(CallRefused, match="not served here"):
        await ask("two")
    router.serve_stream("one", Ask, converse, Role.VIEWER)
    async with await bob.stream(router.peers.id, Ask("one"), timeout_s=1) as stream:
        assert (await stream.receive(Answer))[0].text == "one"


async def test_an_assistant_serves_the_other_collaborations_until_the_peer_reserves_one() -> None:
    router, ask, _bob = meet()
    router.serve("own", Ask, answering("own"), Role.VIEWER)

    def enter(prefix: str) -> None:
        if prefix != "unwanted":
            router.serve(prefix, Ask, answering("the assistant"), Role.VIEWER)

    router.assist(enter, lambda prefix: router.unserve(prefix, Ask))
    assert [await ask("own"), await ask("other")] == ["own", "the assistant"]
    with pytest.raises(CallRefused, match="no part"):
        await ask("unwanted")
    with pytest.raises(ValueError, match="assists already"):
        router.assist(enter, enter)
    router.serve("other", Ask, answering("the owner"), Role.VIEWER)
    assert await ask("other") == "the owner"


async def test_a_prefix_that_no_message_can_carry_is_refused_at_once() -> None:
    router, _ask, _bob = meet()
    with pytest.raises(ValueError, match="over 512 characters"):
        router.serve("a" * 513, Ask, answering("a"), Role.VIEWER)
    router.serve("a" * 512, Ask, answering("a"), Role.VIEWER)
