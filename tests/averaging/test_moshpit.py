"""Averaging any array: meetings' passes over a grid, exact and in spite of failures."""

import asyncio
import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.averaging import moshpit
from colab_swarm.averaging.moshpit import MoshpitAverager, MoshpitGrid, MoshpitResult, RoundMeter
from colab_swarm.events import EventLog
from colab_swarm.experiments.dedloc import Town, is_contribution, play
from colab_swarm.net.peers import PeerId
from colab_swarm.sim import LAN, SimNetwork
from colab_swarm.swarm.network import assemble, find_others
from colab_swarm.tensors.codecs import Floats

WINDOW_S = 5.0
ONES = np.ones(10, np.float32)


def some(share: float, seed: int) -> Callable[[str, int], bool]:
    return lambda name, round_: random.Random(f"{seed} {name} {round_}").random() < share


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "clients", "group_size", "weights", "sides"),
    [
        (13, 0, 4, [0, *range(1, 13)], (3, 4)),
        (5, 4, 2, None, (5,)),  # every group needs a peer that can be dialled
        (1, 0, 2, None, (1,)),
    ],
)
def test_all_hold_the_exact_weighted_mean_after_a_round_per_side_of_the_grid(
    count: int, clients: int, group_size: int, weights: list[float] | None, sides: tuple[int, ...]
) -> None:
    town = Town(count, clients=clients, group_size=group_size, weights=weights)
    story = play(town)
    mean = town.mean()
    assert all(result.complete and result.sides == sides for result in story.results.values())
    assert len(story.results) == count and len(story.history) == len(sides) + 1
    for values in story.means.values():
        np.testing.assert_allclose(values, mean, atol=1e-6)


@pytest.mark.slow
def test_with_a_tenth_failing_in_every_round_the_error_shrinks_and_no_peer_stalls() -> None:
    story = play(Town(16, group_size=4, doomed=some(0.1, 1), seed=1), passes=2)
    assert story.fired and {fault.name for fault in story.fired} == {"crash"}
    assert len(story.results) == 16 - len(story.fired)
    spread = story.spread()
    assert len(spread) >= 4 and all(now < before for before, now in itertools.pairwise(spread))
    assert story.seconds < 2 * (WINDOW_S + moshpit._LAG_S)


def test_a_peer_that_falls_silent_is_given_up_and_the_others_go_on() -> None:
    def script(network: SimNetwork) -> None:
        others = {f"p{i}" for i in range(9) if i != 4}
        network.when(is_contribution, sender="p4").partition({"p4"}, others)

    story = play(Town(9, group_size=3, seed=1), script=script)
    assert [fault.name for fault in story.fired] == ["partition"]
    first = {name: result.rounds[0] for name, result in story.results.items()}
    assert len([name for name, one in first.items() if one and len(one.contributors) == 3]) == 6
    others = [result for name, result in story.results.items() if name != "p4"]
    # p4's groups wait for it, and the next ones for these.
    assert max(result.seconds for result in others) < WINDOW_S + 12
    failed = {name: result.failed for name, result in story.results.items()}
    assert failed.pop("p4") == 4 and 1 <= max(failed.values()) <= 2
    assert sum(result.complete for result in others) == 4  # nobody failed in their groups
    assert max(result.seconds for result in story.results.values()) < 45  # the links are given up after 30


@pytest.mark.slow
def test_liars_neither_choose_the_groups_nor_spoil_the_mean() -> None:
    town = Town(16, group_size=4, liars={"p3", "p7"})
    story = play(town)
    honest = [name for name in town.names() if name not in town.liars]
    assert {result.sides for result in story.results.values()} == {(4, 4)}
    for name in honest:
        assert np.abs(story.means[name] - town.mean(honest)).max() < 1.5
        assert np.isfinite(story.means[name]).all()


async def few(*names: str, codec: str = "float32") -> list[MoshpitAverager]:
    """Peers that average by hand."""
    network = SimNetwork(LAN)
    services = [assemble(network.peer(name), "run", EventLog(), random.Random(name)) for name in names]
    for one in services:
        await find_others(one, [services[0].peers.contact] if one is not services[0] else [])
    return [MoshpitAverager(one.router, one.dht, one.averager, "run/average", codec) for one in services]


async def after(seconds: float, averager: MoshpitAverager, values: Floats) -> tuple[Floats, MoshpitResult]:
    await asyncio.sleep(seconds)
    return await averager.average(values)


async def test_few_large_values_among_small_ones_are_averaged_as_topk() -> None:
    values = np.where(np.arange(10_000) % 50 == 0, 4.0, 0.001).astype(np.float32)
    averagers = await few("alice", "bob", codec="topk:0.02")
    results = await asyncio.gather(*(averager.average(values) for averager in averagers))
    for mean, result in results:
        np.testing.assert_allclose(mean, values, atol=1e-3)
        assert sum(one.sent_bytes for one in result.rounds if one) < 0.7 * 4 * len(values)


async def test_an_unknown_codec_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="unknown codec 'zip'"):
        await few("alice", codec="zip")


async def test_vectors_of_different_lengths_do_not_meet() -> None:
    alice, bob = await few("alice", "bob")
    results = await asyncio.gather(after(9.0, alice, ONES), after(9.0, bob, np.ones(11, np.float32)))
    assert [len(result.peers) for _, result in results] == [1, 1]
    assert max(result.seconds for _, result in results) < asyncio.get_running_loop().time() - 8.9


@pytest.mark.parametrize(
    ("values", "options", "text"),
    [
        *((ONES * np.nan, {}, "finite"), (ONES, {"weight": -1.0}, "weight=-1.0")),
        *((ONES, {"weight": 1e7}, "weight="), (ONES, {"group_size": 1}, "give 2 or more")),
    ],
)
async def test_invalid_arguments_are_refused_at_once(
    values: Floats, options: dict[str, float], text: str
) -> None:
    (alice,) = await few("alice")
    with pytest.raises(ValueError, match=text):
        await alice.average(values, **options)  # type: ignore[arg-type]
    alice.close()


async def test_one_peer_averages_one_vector_of_a_name_at_a_time() -> None:
    (alice,) = await few("alice")
    first = asyncio.create_task(alice.average(ONES))
    await asyncio.sleep(1)
    with pytest.raises(RuntimeError, match="already"):
        await alice.average(ONES)
    mean, result = await first
    assert mean is not ONES and repr(result).startswith("MoshpitResult(1 peers on 1, complete")
    alice.close()


TIME = RoundMeter(overhead_s=0.5, transfer_s=2.0)
SIZES = st.integers(1, 70)


def crowd(count: int) -> list[PeerId]:
    return [PeerId(i.to_bytes(32, "big")) for i in range(count)]


def grid(count: int, group_size: int, *, reachable: int | None = None) -> MoshpitGrid:
    limit = count if reachable is None else reachable
    return MoshpitGrid(b"seed", {peer: i < limit for i, peer in enumerate(crowd(count))}, group_size)


def lines(g: MoshpitGrid, axis: int) -> set[tuple[PeerId, ...]]:
    return {g.line(peer, axis) for peer in g.cells}


def average(
    g: MoshpitGrid, values: dict[PeerId, float], weights: dict[PeerId, float], axis: int, missing: set[PeerId]
) -> None:
    """One round along an axis; a missing peer keeps its value."""
    for line in lines(g, axis):
        holders = [peer for peer in line if peer not in missing]
        total = sum(weights[peer] for peer in holders)
        if total:
            mean = sum(weights[peer] * values[peer] for peer in holders) / total
            for peer in holders:
                values[peer], weights[peer] = mean, g.carried(peer, holders, total)


@given(SIZES, st.integers(2, 70), st.integers(0, 1 << 32))
def test_one_pass_gives_everyone_the_exact_weighted_mean(count: int, group_size: int, seed: int) -> None:
    g, rng = grid(count, group_size), np.random.default_rng(seed)
    values = dict(zip(g.cells, rng.standard_normal(count).tolist(), strict=True))
    weights = dict(zip(g.cells, rng.choice([0.0, 0.5, 1.0, 300.0], count).tolist(), strict=True))
    weights[next(iter(weights))] = 1.0
    total = sum(weights.values())
    mean = sum(values[peer] * weights[peer] for peer in g.cells) / total
    for axis in range(len(g.sides)):
        average(g, values, weights, axis, set())
        assert sum(weights.values()) == pytest.approx(total)
    assert np.allclose(list(values.values()), mean, atol=1e-9)


@given(st.integers(1, 5000), st.integers(1, 14))
def test_a_grid_has_no_empty_cell_and_equal_sides(count: int, rounds: int) -> None:
    sides = moshpit.plan_sides(count, rounds)
    assert count / 2 < np.prod(sides) <= count or count == 1
    assert len(sides) <= rounds and max(sides) <= 2 * min(sides) + 1
    assert min(sides) >= 2 or count == 1


@given(SIZES, st.integers(2, 70), st.data())
def test_every_line_has_a_peer_that_listens(count: int, group_size: int, data: st.DataObject) -> None:
    reachable = data.draw(st.integers(1, count))
    g = grid(count, group_size, reachable=reachable)
    dialled = set(crowd(count)[:reachable])
    for axis in range(len(g.sides)):
        assert all(dialled & set(line) for line in lines(g, axis))


def test_the_seed_alone_decides_the_cells() -> None:
    peers = dict.fromkeys(crowd(16), True)
    assert MoshpitGrid(b"one", peers, 4).cells == MoshpitGrid(b"one", dict(reversed(peers.items())), 4).cells
    assert MoshpitGrid(b"one", peers, 4).cells != MoshpitGrid(b"two", peers, 4).cells


def test_the_number_of_rounds_and_the_rate_of_success_are_those_of_the_paper() -> None:
    found = [moshpit.rounds_for(*case) for case in ((1, 2), (16, 4), (16, 16), (13, 4), (17, 4), (16, 2))]
    assert found == [1, 2, 1, 2, 3, 4]
    failures_per_s = -np.log(1 - 0.1) / TIME.seconds(4)  # q = 0.1 in a round of four
    rate = replace(TIME, failures_per_s=failures_per_s).success_rate(16, 4)
    assert rate == pytest.approx((1 - 0.1) ** (4 * 2) / (TIME.seconds(4) * 2))


def test_a_meter_votes_for_smaller_groups_when_members_fail_and_recovers_with_them() -> None:
    meter = RoundMeter()
    assert meter.choose_group_size(16) == 16
    votes = []
    for _ in range(40):
        meter.on_round(16, 5, overhead_s=60.0, averaging_s=60.0)
        votes.append(meter.choose_group_size(16))
    assert votes == sorted(votes, reverse=True) and votes[-1] == 2
    assert meter.failures_per_s == pytest.approx(5 / 16 / meter.seconds(16), rel=0.2)
    for _ in range(100):
        meter.on_round(2, 0, overhead_s=0.5, averaging_s=1.0)
    assert (meter.overhead_s, meter.transfer_s) == pytest.approx((0.5, 2.0))
    assert meter.choose_group_size(16) == 16
