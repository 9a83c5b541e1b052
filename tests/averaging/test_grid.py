from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.averaging.moshpit import (
    MoshpitGrid,
    RoundMeter,
    RoundTime,
    choose_group_size,
    plan_sides,
    rounds_for,
    success_rate,
)
from colab_swarm.net.peers import PeerId

TIME = RoundTime(overhead_s=0.5, transfer_s=2.0)
SIZES = st.integers(1, 70)


def crowd(count: int) -> list[PeerId]:
    return [PeerId(i.to_bytes(32, "big")) for i in range(count)]


def grid(count: int, group_size: int, *, reachable: int | None = None) -> MoshpitGrid:
    limit = count if reachable is None else reachable
    return MoshpitGrid(b"seed", {peer: i < limit for i, peer in enumerate(crowd(count))}, group_size)


def lines(g: MoshpitGrid, axis: int) -> set[tuple[PeerId, ...]]:
    return {g.line(peer, axis) for peer in g.cells}


def average(
    g: MoshpitGrid,
    values: dict[PeerId, float],
    weights: dict[PeerId, float],
    axis: int,
    *,
    missing: frozenset[PeerId],
) -> None:
    """One round along an axis; who is missing keeps what it has."""
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
        average(g, values, weights, axis, missing=frozenset())
        assert sum(weights.values()) == pytest.approx(total)
    assert np.allclose(list(values.values()), mean, atol=1e-9)


@given(SIZES, st.integers(2, 70))
def test_the_lines_of_an_axis_are_a_partition_and_two_axes_cross_in_a_cell(
    count: int, group_size: int
) -> None:
    g = grid(count, group_size)
    for axis in range(len(g.sides)):
        assert sorted(itertools.chain(*lines(g, axis))) == sorted(g.cells)
    for one, other in itertools.combinations(range(len(g.sides)), 2):
        for peer in g.cells:
            shared = set(g.line(peer, one)) & set(g.line(peer, other))
            assert {g.cells[mate] for mate in shared} == {g.cells[peer]}


@given(st.integers(1, 5000), st.integers(1, 14))
def test_a_grid_has_no_empty_cell_and_equal_sides(count: int, rounds: int) -> None:
    sides = plan_sides(count, rounds)
    assert count / 2 < np.prod(sides) <= count or count == 1
    assert len(sides) <= rounds and max(sides) <= 2 * min(sides) + 1


@given(SIZES, st.integers(2, 70), st.data())
def test_every_line_has_a_peer_that_accepts_connections(
    count: int, group_size: int, data: st.DataObject
) -> None:
    reachable = data.draw(st.integers(1, count))
    g = grid(count, group_size, reachable=reachable)
    dialled = set(crowd(count)[:reachable])
    for axis in range(len(g.sides)):
        assert all(dialled & set(line) for line in lines(g, axis))


def test_peers_that_miss_rounds_are_mixed_in_by_the_next_and_no_weight_is_lost() -> None:
    g = grid(16, 4)
    rng = np.random.default_rng(0)
    values = {peer: float(rng.standard_normal()) for peer in g.cells}
    weights = dict.fromkeys(g.cells, 1.0)
    mean = float(np.mean(list(values.values())))
    spread = [float(np.var(list(values.values())))]
    for round_ in range(12):
        missing = frozenset(peer for peer in g.cells if rng.random() < 0.1)
        average(g, values, weights, round_ % 2, missing=missing)
        spread.append(float(np.mean([(value - mean) ** 2 for value in values.values()])))
        assert sum(weights.values()) == pytest.approx(16)
    assert spread[2] < 0.1 * spread[0] and spread[-1] < 1e-4 * spread[0]


def test_the_seed_alone_decides_the_cells() -> None:
    peers = dict.fromkeys(crowd(16), True)
    assert MoshpitGrid(b"one", peers, 4).cells == MoshpitGrid(b"one", dict(reversed(peers.items())), 4).cells
    assert MoshpitGrid(b"one", peers, 4).cells != MoshpitGrid(b"two", peers, 4).cells
    assert repr(MoshpitGrid(b"one", peers, 4)) == "MoshpitGrid(16 peers on 4x4)"


@pytest.mark.parametrize(
    ("peers", "group_size", "rounds"),
    [(1, 2, 1), (16, 4, 2), (16, 16, 1), (13, 4, 2), (17, 4, 3), (16, 2, 4)],
)
def test_as_many_rounds_as_it_takes_until_all_have_met(peers: int, group_size: int, rounds: int) -> None:
    assert rounds_for(peers, group_size) == rounds


def test_the_rate_of_success_is_that_of_the_paper() -> None:
    failures_per_s = -np.log(1 - 0.1) / TIME.seconds(4)  # q = 0.1 in a round of four
    rate = success_rate(16, 4, failures_per_s=failures_per_s, time=TIME)
    assert rate == pytest.approx((1 - 0.1) ** (4 * 2) / (TIME.seconds(4) * 2))


@pytest.mark.parametrize("peers", [4, 13, 16, 27, 64, 100])
def test_the_chosen_group_falls_from_all_to_pairs_as_failures_get_frequent(peers: int) -> None:
    sizes = [choose_group_size(peers, failures_per_s=10.0**i, time=TIME) for i in np.arange(-5, 4, 0.25)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == peers and sizes[-1] == 2


def test_a_meter_votes_for_smaller_groups_when_members_fail_and_recovers_with_them() -> None:
    meter = RoundMeter()
    assert meter.choose_group_size(16) == 16
    votes = []
    for _ in range(40):
        meter.on_round(16, 5, overhead_s=0.5, averaging_s=2.0)
        votes.append(meter.choose_group_size(16))
    assert votes == sorted(votes, reverse=True) and votes[-1] == 2
    assert meter.failures_per_s == pytest.approx(5 / 16 / meter.time.seconds(16), rel=0.2)
    for _ in range(100):
        meter.on_round(2, 0, overhead_s=0.5, averaging_s=2.0)
    assert meter.choose_group_size(16) == 16


def test_a_meter_takes_its_times_from_undisturbed_rounds() -> None:
    meter = RoundMeter()
    meter.on_round(4, 0, overhead_s=0.1, averaging_s=3.0)
    meter.on_round(4, 1, overhead_s=60.0, averaging_s=60.0)
    assert meter.time == RoundTime(0.1, 4.0) and meter.time.seconds(4) == pytest.approx(3.1)
