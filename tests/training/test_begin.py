"""Peers that asked to begin together do: the first step waits for the others, later ones for nobody."""

import pytest

import colab_swarm as cs
from colab_swarm.events import Notice
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training.settings import TrainingSettings
from tests.training.toy import ROWS, join_training, model, take

STEPS = 6


def contributors(swarm: Swarm, least: int | None, bucket: bool = False) -> list[int]:
    """Train, and return how many peers took part in each step that this one saw."""
    settings = {"local_steps": 2} if bucket else {}
    optimizer = join_training(swarm, net := model(), min_peers=least, **settings)
    counts = []
    while optimizer.global_step < STEPS:
        result = take(optimizer, net, optimizer.global_step, ROWS[swarm.name])
        if result is not None:
            counts.append(len(result.contributors))
    return counts


@pytest.mark.parametrize(
    ("alice", "bob", "first", "bucket"),
    [(2, None, 2, False), (2, 2, 2, True), (None, None, 1, False), (1, 1, 1, True)],
)
def test_two_begin_together_if_the_first_asks_for_it(
    alice: int | None, bob: int | None, first: int, bucket: bool
) -> None:
    wishes = {"alice": alice, "bob": bob}
    options = {"mailbox": "memory://begin"} if bucket else {}
    with cs.simulate(1, network="lan", seed=1, samples_per_s=2.0, **options) as sim:
        sim.join("bob", at=60.0)
        counts = sim.run(lambda swarm: contributors(swarm, wishes[swarm.name], bucket))
    if first == 2:
        assert counts["alice"][0] == counts["bob"][0] == 2 and len(counts["bob"]) == STEPS
    else:
        assert counts["alice"][0] == 1


def test_a_third_that_is_late_is_not_waited_for() -> None:
    with cs.simulate(2, network="lan", seed=1, samples_per_s=2.0) as sim:
        sim.join("carol", at=6.0)
        counts = sim.run(lambda swarm: contributors(swarm, 2))
    assert counts["alice"][0] == counts["bob"][0] == 2 and counts["alice"][-1] == 3


def test_a_peer_may_ask_for_fewer_and_the_waiting_one_says_for_whom() -> None:
    wishes = {"alice": 3, "bob": 1}
    with cs.simulate(1, network="lan", seed=1, samples_per_s=2.0) as sim:
        sim.join("bob", at=20.0)
        counts = sim.run(lambda swarm: contributors(swarm, wishes[swarm.name]))
        (notice,) = sim.swarms["alice"].events.recent(Notice)
    assert counts["alice"] == counts["bob"] == [2] * STEPS
    assert isinstance(notice, Notice) and "waits until 3 peers train; now alice" in notice.text


@pytest.mark.parametrize("least", [0, -1, 1.5, 1000])
def test_a_number_of_peers_that_cannot_be_is_refused(least: int) -> None:
    with pytest.raises(ValueError, match="min_peers"):
        TrainingSettings("run/model", 8.0, min_peers=least)
