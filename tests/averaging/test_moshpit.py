from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable

import numpy as np
import pytest

from colab_swarm.averaging.group import JoinRound
from colab_swarm.averaging.moshpit import MoshpitAverager, MoshpitResult
from colab_swarm.bench.dedloc import GroupRun, Town, is_contribution, play
from colab_swarm.events import EventLog
from colab_swarm.sim import LAN, SimNetwork
from colab_swarm.swarm.network import assemble, find_others
from colab_swarm.tensors.codecs import Floats

WINDOW_S = 5.0
ONES = np.ones(10, np.float32)


def some(share: float, seed: int) -> Callable[[str, int], bool]:
    return lambda name, round_: random.Random(f"{seed} {name} {round_}").random() < share


def assert_exact(story: GroupRun, mean: Floats) -> None:
    assert all(result.complete for result in story.results.values())
    for values in story.means.values():
        np.testing.assert_allclose(values, mean, atol=1e-6)


@pytest.mark.slow
def test_sixteen_peers_in_groups_of_four_hold_the_exact_mean_after_two_rounds() -> None:
    town = Town(16, group_size=4)
    story = play(town)
    assert len(story.results) == 16 and len(story.history) == 3
    assert_exact(story, town.mean())
    for result in story.results.values():
        assert result.sides == (4, 4)
        assert [len(one.contributors) for one in result.rounds if one] == [4, 4]


@pytest.mark.slow
@pytest.mark.parametrize("group_size", [2, 4, 13])
def test_a_number_without_factors_and_unequal_weights_give_the_exact_mean_too(group_size: int) -> None:
    town = Town(13, group_size=group_size, weights=[0, *range(1, 13)])
    assert_exact(play(town), town.mean())


def test_peers_that_only_dial_out_are_spread_such_that_every_group_can_average() -> None:
    town = Town(9, clients=6, group_size=3)
    story = play(town)
    assert_exact(story, town.mean())
    assert {result.sides for result in story.results.values()} == {(3, 3)}


def test_with_one_peer_that_can_be_dialled_there_is_one_group() -> None:
    town = Town(5, clients=4, group_size=2)
    story = play(town)
    assert_exact(story, town.mean())
    assert {result.sides for result in story.results.values()} == {(5,)}


def test_alone_the_mean_is_the_own_vector() -> None:
    town = Town(1)
    assert_exact(play(town), town.vector("p0"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_with_a_tenth_failing_in_every_round_the_error_shrinks_and_no_peer_stalls(seed: int) -> None:
    story = play(Town(16, group_size=4, doomed=some(0.1, seed), seed=seed), passes=2)
    assert story.fired and {fault.name for fault in story.fired} == {"crash"}
    assert len(story.results) == 16 - len(story.fired)
    spread = story.spread()
    assert len(spread) >= 4 and all(now < before for before, now in itertools.pairwise(spread))
    assert story.seconds < 2 * (WINDOW_S + 5.0)


@pytest.mark.slow
def test_a_crash_costs_its_own_group_of_that_round_only() -> None:
    town = Town(16, group_size=4, doomed=lambda name, round_: (name, round_) == ("p5", 0))
    story = play(town)
    assert [fault.arguments for fault in story.fired] == [("p5",)]
    first = {name: result.rounds[0] for name, result in story.results.items()}
    struck = [name for name, one in first.items() if one and len(one.contributors) < 4]
    assert len(struck) == 3
    untouched = [name for name in first if name not in struck]
    groups = {one.group.round_id for name in untouched if (one := first[name])}
    for group in groups:
        members = [name for name in untouched if (one := first[name]) and one.group.round_id == group]
        assert len(members) == 4
        for name in members:
            np.testing.assert_allclose(story.history[1][name], town.mean(members), atol=1e-6)


@pytest.mark.slow
def test_an_organizer_that_dies_is_replaced() -> None:
    def script(network: SimNetwork) -> None:
        network.when(lambda message: isinstance(message, JoinRound), receiver="p3").crash("p3")

    story = play(Town(16, group_size=4), script=script)
    assert [fault.name for fault in story.fired] == ["crash"]
    assert len(story.results) == 15 and story.spread()[-1] < 0.1
    assert story.seconds < WINDOW_S + 5.0


def test_a_peer_that_falls_silent_is_given_up_and_the_others_go_on() -> None:
    def script(network: SimNetwork) -> None:
        others = {f"p{i}" for i in range(9) if i != 4}
        network.when(is_contribution, sender="p4").partition({"p4"}, others)

    story = play(Town(9, group_size=3), script=script)
    assert [fault.name for fault in story.fired] == ["partition"]
    first = {name: result.rounds[0] for name, result in story.results.items()}
    in_time = [name for name, one in first.items() if one and len(one.contributors) == 3]
    assert len(in_time) == 6
    assert sum(result.seconds < WINDOW_S + 5 for result in story.results.values()) >= 4  # not in p4's groups
    assert max(result.seconds for result in story.results.values()) < 60  # the links are given up after 30


@pytest.mark.slow
def test_liars_neither_choose_the_groups_nor_spoil_the_mean() -> None:
    town = Town(16, group_size=4, liars={"p3", "p7"})
    story = play(town)
    honest = [name for name in town.names() if name not in town.liars]
    assert {result.sides for result in story.results.values()} == {(4, 4)}
    for name in honest:
        assert np.abs(story.means[name] - town.mean(honest)).max() < 1.5
        assert np.isfinite(story.means[name]).all()


@pytest.mark.slow
@pytest.mark.ordeal
def test_failures_make_the_survivors_vote_for_smaller_groups() -> None:
    calm, rough = play(Town(16)), play(Town(16, doomed=some(0.3, 1)), passes=2)
    assert len(rough.fired) >= 4
    assert set(calm.votes.values()) == {16} and max(rough.votes.values()) <= 4


async def few(*names: str) -> list[MoshpitAverager]:
    """Peers that average by hand."""
    network = SimNetwork(LAN)
    services = [assemble(network.peer(name), "run", EventLog(), random.Random(name)) for name in names]
    for one in services:
        await find_others(one, [services[0].peers.contact] if one is not services[0] else [])
    return [MoshpitAverager(one.router, one.dht, one.averager, "run/average") for one in services]


async def after(seconds: float, averager: MoshpitAverager, values: Floats) -> tuple[Floats, MoshpitResult]:
    await asyncio.sleep(seconds)
    return await averager.average(values)


async def test_the_first_caller_waits_for_others_within_the_window() -> None:
    alice, bob = await few("alice", "bob")
    (mine, result), (theirs, _) = await asyncio.gather(
        after(0.0, alice, ONES), after(WINDOW_S - 1, bob, 3 * ONES)
    )
    np.testing.assert_array_equal(mine, 2 * ONES)
    np.testing.assert_array_equal(theirs, 2 * ONES)
    assert result.seconds == pytest.approx(WINDOW_S, abs=0.5)


async def test_a_late_caller_is_alone_and_joins_the_next_pass() -> None:
    alice, bob, carol = await few("alice", "bob", "carol")
    *_, (own, result) = await asyncio.gather(
        after(0.0, alice, ONES), after(0.0, bob, ONES), after(WINDOW_S + 1, carol, 4 * ONES)
    )
    np.testing.assert_array_equal(own, 4 * ONES)
    assert len(result.peers) == 1
    again = await asyncio.gather(*(after(0.0, one, result.seconds * ONES) for one in (alice, bob, carol)))
    assert {len(result.peers) for _, result in again} == {3}


async def test_peers_that_met_before_wait_for_each_other_only() -> None:
    averagers = await few("alice", "bob", "carol")
    await asyncio.gather(*(one.average(ONES) for one in averagers))
    results = await asyncio.gather(*(after(i, one, i * ONES) for i, one in enumerate(averagers)))
    for mean, _ in results:
        np.testing.assert_allclose(mean, ONES)
    assert results[2][1].seconds < 1.0


async def test_vectors_of_different_lengths_do_not_meet() -> None:
    alice, bob = await few("alice", "bob")
    results = await asyncio.gather(alice.average(ONES), bob.average(np.ones(11, np.float32)))
    assert [len(result.peers) for _, result in results] == [1, 1]


@pytest.mark.parametrize(
    ("values", "options", "text"),
    [
        (ONES.astype(np.float64), {}, "float32"),
        (ONES.reshape(2, 5), {}, "flat"),
        (ONES * np.nan, {}, "finite"),
        (ONES, {"weight": -1.0}, "weight=-1.0"),
        (ONES, {"weight": 1e7}, "weight="),
        (ONES, {"group_size": 1}, "2 members"),
    ],
)
async def test_invalid_arguments_are_refused_at_once(
    values: Floats, options: dict[str, float], text: str
) -> None:
    (alice,) = await few("alice")
    with pytest.raises(ValueError, match=text):
        await alice.average(values, **options)  # type: ignore[arg-type]


async def test_one_peer_averages_one_vector_of_a_name_at_a_time() -> None:
    (alice,) = await few("alice")
    first = asyncio.create_task(alice.average(ONES))
    await asyncio.sleep(1)
    with pytest.raises(RuntimeError, match="already"):
        await alice.average(ONES)
    mean, result = await first
    assert mean is not ONES and repr(result).startswith("MoshpitResult(1 peers on 1, complete")
    alice.close()
