"""Samples per second are samples by the clock: a table of rounds, and a run in simulation."""

import statistics

import pytest

import colab_swarm as cs
from colab_swarm.net.peers import PeerId
from colab_swarm.sim.profiles import NetworkProfile
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training.pace import SwarmPace
from tests.training.toy import join_training, loss_of, model

ALICE, BOB = PeerId(b"a" * 32), PeerId(b"b" * 32)


@pytest.mark.parametrize(
    ("rounds", "now", "pace"),  # (time, samples of alice, of bob)
    [
        pytest.param([], 9.0, 0.0, id="no round"),
        pytest.param([(5.0, 60.0, 40.0)], 9.0, 0.0, id="one round"),
        pytest.param([(5.0, 60.0, 40.0), (7.0, 60.0, 40.0)], 7.0, 50.0, id="two rounds"),
        pytest.param([(0.0, 1.0, 0.0), (1.0, 60.0, 0.0), (4.0, 60.0, 60.0)], 4.0, 45.0, id="uneven rounds"),
        pytest.param([(0.0, 1.0, 0.0), (300.0, 60.0, 0.0)], 300.0, 0.2, id="a round of minutes"),
        pytest.param([(2.0, 50.0, 50.0), (4.0, 50.0, 50.0)], 14.0, 10.0, id="a round that does not come"),
        pytest.param(
            [(float(at), 9.0 if at <= 70 else 1.0, 0.0) for at in range(101)],
            100.0,
            1.0,
            id="only recent ones",
        ),
        pytest.param(
            [(0.0, 8.0, 0.0), (60.0, 20.0, 0.0), (60.0, 20.0, 0.0), (60.0, 20.0, 0.0)],
            60.0,
            1.0,
            id="at once",
        ),
    ],
)
def test_samples_per_second_are_those_of_the_last_rounds_by_the_time_between_them(
    rounds: list[tuple[float, float, float]], now: float, pace: float
) -> None:
    seen = SwarmPace()
    for at, alice, bob in rounds:
        seen.on_round({ALICE: alice, BOB: bob}, now=at)
    assert seen.samples_per_s(now) == pytest.approx(pace)
    assert sum(seen.by_peer(now).values()) == pytest.approx(pace)


def test_each_contributor_has_its_own_and_missed_rounds_begin_anew() -> None:
    seen = SwarmPace()
    for at in (0.0, 2.0, 4.0):
        seen.on_round({ALICE: 60.0, BOB: 20.0}, now=at)
    assert seen.by_peer(4.0) == pytest.approx({ALICE: 30.0, BOB: 10.0})
    seen.begin_again()
    seen.on_round({ALICE: 60.0}, now=500.0)
    assert seen.samples_per_s(500.0) == 0.0 and seen.by_peer(500.0) == {}


@pytest.mark.slow
@pytest.mark.parametrize("latency_s", [0.001, 0.15])
def test_what_a_run_shows_is_what_it_counts_however_long_its_rounds_take(latency_s: float) -> None:
    """Two peers compute 1,000 samples/s each, and wait for rounds the rest of the time."""
    took: dict[str, tuple[float, float]] = {}
    shown: dict[str, float] = {}

    def train(swarm: Swarm) -> None:
        net = model()
        optimizer = join_training(swarm, net, target_batch_size=100, min_peers=2)
        began_at = samples = 0.0
        speeds = []
        while optimizer.global_step < 20:
            loss_of(net, 0).backward()
            if optimizer.global_step == 0:
                began_at = swarm.runtime.time()
                samples = 0.0
            optimizer.step(samples=10)
            samples += 10
            # Before one of them leaves.
            if optimizer.global_step < 19:
                snapshot = swarm.snapshot()
                speeds.append(optimizer.metrics()["swarm_samples_per_s"])
        rows = {row.name: row.samples_per_s for row in snapshot.peers}
        assert rows[swarm.name] == snapshot.own_samples_per_s
        assert snapshot.own_samples_per_s == pytest.approx(snapshot.samples_per_s / 2, rel=0.2)
        took[swarm.name] = samples, swarm.runtime.time() - began_at
        shown[swarm.name] = statistics.median(speeds)

    with cs.simulate(2, network=NetworkProfile("far", latency_s), samples_per_s=1000.0) as simulation:
        simulation.run(train)
    counted = sum(samples / seconds for samples, seconds in took.values())
    for speed in shown.values():
        assert speed == pytest.approx(counted, rel=0.15)
    assert latency_s < 0.05 or counted < 1000.0  # else the rounds took no time
