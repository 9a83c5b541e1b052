"""The pure part of chaos: scripts, random faults, and what the meter makes of a training."""

import math
import random

import pytest

from colab_swarm.sim.chaos import LASTS_S, SETTLE_S, ChaosFault, ChaosMeter, random_faults, read_script

PEERS = ("alice", "bob", "carol")


def test_a_script_has_a_fault_in_each_line() -> None:
    text = "12 kill bob 20  # comes back\n\n40.5 freeze carol 10\nstep30 restart alice\n60 kill bob\n"
    assert read_script(text, PEERS) == [
        ChaosFault(12.0, "kill", "bob", 20.0),
        ChaosFault(40.5, "freeze", "carol", 10.0),
        ChaosFault(30.0, "restart", "alice", 0.0, by_step=True),
        ChaosFault(60.0, "kill", "bob", math.inf),
    ]


@pytest.mark.parametrize(
    "line", ["kill bob", "12 kill", "12 explode bob", "12 kill zoe", "12 kill bob 1 2", "x kill bob"]
)
def test_a_wrong_line_of_a_script_is_quoted(line: str) -> None:
    with pytest.raises(ValueError, match=line.split()[0]):
        read_script(line, PEERS)


@pytest.mark.parametrize("seed", range(20))
def test_random_faults_leave_one_peer_alone_and_are_over_at_the_end(seed: int) -> None:
    given = {"until_s": 600.0, "mean_s": 5.0, "kinds": tuple(LASTS_S)}
    faults = random_faults(PEERS, **given, rng=random.Random(seed))
    assert faults == random_faults(PEERS, **given, rng=random.Random(seed)) and len(faults) > 20
    for fault in faults:
        under_way = {one.peer for one in faults if one.at <= fault.at < one.at + one.seconds}
        assert len(under_way) < len(PEERS) and fault.at + fault.seconds <= 600.0


def measured() -> ChaosMeter:
    meter = ChaosMeter(PEERS)
    for peer in PEERS:
        meter.on_step(0.0, peer, 1, "one")
    meter.begin(0.0)
    for step in range(2, 12):
        meter.on_step(2.0 * step, "alice", step, f"a{step}")
    meter.begin(30.0)
    return meter


def test_the_meter_compares_with_the_undisturbed_steps_of_before() -> None:
    meter = measured()
    for peer in PEERS:
        meter.on_step(60.0, peer, 16, "same")
    found = meter.report(90.0)
    assert (found["steps"], found["steps a minute"], found["undisturbed steps a minute"]) == (5, 5.0, 20.0)
    assert found["part of the undisturbed steps"] == 0.25 and found["forks that lasted"] == []


def test_the_longest_wait_counts_only_while_two_peers_train() -> None:
    meter = measured()
    meter.on_stop(34.0, "bob")  # alice and carol go on
    meter.on_stop(40.0, "carol")
    meter.on_start(60.0, "bob")
    meter.on_step(75.0, "bob", 12, "a12")
    found = meter.report(76.0)
    assert found["longest wait for a step with two peers, s"] == 10.0
    assert (found["median time until then, s"], found["restarts that did not"]) == (15.0, 0)
    assert found["part of the peers' time without a fault"] == pytest.approx(
        (4 * 3 + 6 * 2 + 35 * 1 + 2) / 46 / 3
    )


def test_a_frozen_peer_does_not_train_and_one_that_did_not_come_back_is_counted() -> None:
    meter = measured()
    meter.disturbed.add("bob")
    meter.on_stop(30.0, "carol")
    meter.on_start(31.0, "carol")
    found = meter.report(90.0)
    assert found["longest wait for a step with two peers, s"] == 0.0 and found["restarts that did not"] == 1


def test_a_fork_lasts_if_a_peer_still_steps_where_the_leader_went_another_way() -> None:
    meter = measured()
    for step in range(12, 20):
        meter.on_step(31.0 + step, "alice", step, f"a{step}")
        meter.on_step(31.0 + step, "bob", step, f"b{step}")  # it ends long before the report
        meter.on_step(31.0 + step, "carol", step - 2, f"a{step - 2}")  # behind, but on the way
    meter.on_step(51.0 + SETTLE_S, "alice", 20, "a20")
    assert meter.report(52.0 + SETTLE_S)["forks that lasted"] == []
    meter.on_step(52.0 + SETTLE_S, "bob", 18, "again")
    assert meter.report(53.0 + SETTLE_S)["forks that lasted"] == ["bob"]
