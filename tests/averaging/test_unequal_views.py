"""Peers with unequal knowledge of each other: frozen ones, and ones that not all have heard of."""

import asyncio

import pytest

from colab_swarm.averaging.group import GroupFormationSettings, Joined, JoinEta
from colab_swarm.errors import PeerTimeout
from colab_swarm.runtime import loop_now
from tests.averaging.test_matchmaking import TICKET, Town, lie, one_group


async def test_a_frozen_peer_is_mute_until_something_comes_from_it() -> None:
    town = Town(3)
    first, frozen, last = town.trainers
    await one_group(*(trainer.join() for trainer in town.trainers), size=3)
    await last.peers.call(frozen.peers.id, TICKET.terms, JoinEta, timeout_s=5.0)  # now it has a link, too
    town.network.now().freeze(frozen.peers.name, 60.0)
    await one_group(first.join(), last.join(), size=2)
    assert first.matchmaker.mute() | last.matchmaker.mute() == {frozen.peers.id} and town.network.fired
    for trainer in (first, last):  # the other may see it by any call
        with pytest.raises(PeerTimeout):
            await trainer.peers.call(frozen.peers.id, TICKET.terms, JoinEta, timeout_s=5.0)
        assert trainer.matchmaker.mute() == {frozen.peers.id}
    await asyncio.sleep(60.0)
    for trainer in (first, last):
        await frozen.peers.call(trainer.peers.id, TICKET.terms, JoinEta, timeout_s=5.0)
        assert not trainer.matchmaker.mute()


async def test_an_organizer_gives_way_to_a_better_one_that_it_had_not_heard_of() -> None:
    best, second, third, fourth = (town := Town(4)).trainers
    for late in (second, third):
        late.candidates = [one.peers.id for one in (second, third, fourth)]
    joins = [trainer.join(after_s=0.01 * (trainer is best)) for trainer in town.trainers]
    began = loop_now()
    await one_group(*joins, size=4)
    assert loop_now() - began < 0.5  # two would share the others, and wait for each other


async def test_a_peer_that_asks_an_organizer_is_ready_for_it_and_soon_for_others() -> None:
    best, second, third = (town := Town(3)).trainers
    await one_group(*(trainer.join() for trainer in town.trainers), size=3)
    asked = lie(best, Joined(reason="unreachable"), after_s=3.0)
    second.believed_s, second.followed = 1.0, False
    waiting = asyncio.create_task(second.join())
    await asyncio.sleep(0.5)
    for caller, ready_in_s in (best, 0.0), (third, 1.0):
        answer = await caller.peers.call(second.peers.id, TICKET.terms, JoinEta, timeout_s=5.0)
        assert asked and answer.ready_in_s == ready_in_s
    waiting.cancel()


async def test_a_peer_that_was_silent_and_answers_again_is_waited_for() -> None:
    first, thawed, last = (town := Town(3)).trainers
    await one_group(*(trainer.join() for trainer in town.trainers), size=3)
    town.network.now().freeze(thawed.peers.name, 5.0)
    for trainer in town.trainers:
        trainer.followed = False  # else they hand out the last group
    await one_group(first.join(), last.join(), size=2)
    await asyncio.sleep(5.0)
    assert town.network.fired and first.matchmaker._silent.holds(thawed.peers.id, loop_now())
    thawed.ready_in_s = 1.0
    await one_group(first.join(), last.join(), thawed.join(after_s=1.0), size=3)


@pytest.mark.parametrize(("rounds", "waits_s"), [(0, 8.0), (3, 3.2)])
async def test_a_broken_promise_costs_less_where_peers_have_come_in_time(rounds: int, waits_s: float) -> None:
    first, second, liar = (town := Town(3, settings=GroupFormationSettings(slack_s=8.0))).trainers
    for _ in range(rounds):
        await one_group(*(trainer.join() for trainer in town.trainers), size=3)
    began, liar.followed = loop_now(), False  # it does not hand out the last group, but promises to come
    await one_group(first.join(), second.join(), size=2)
    assert liar.peers.id in first.matchmaker._late.ends(loop_now())  # it promised, and did not come
    assert waits_s <= loop_now() - began < waits_s + 0.2
