"""The checker finds what is wrong in histories, also of planted bugs; storms leave none that is wrong."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3

from colab_swarm.averaging.reducer import SpanReducer
from colab_swarm.averaging.share import Share
from colab_swarm.events import MemberTrace, RoundFinished
from colab_swarm.tensors.chunks import Snapshot
from colab_swarm.tensors.codecs import Floats
from colab_swarm.training.link_rounds import LinkRounds
from colab_swarm.training.records import LINEAGE_BYTES, Mean
from colab_swarm.training.replica import Replica
from tests.sim.histories import MOMENTUM, WIDTH, History, State, Violation, check
from tests.sim.storm import Fault, Storm, assert_consistent, endure, reports_of, shrink, simpler, storm_of

ALICE, BOB, CAROL = "a11ce000", "b0b00000", "ca401000"
SAMPLES = {ALICE: 1.0, BOB: 3.0}
MEAN = np.repeat(np.array([[0.25], [0.75]], np.float32), WIDTH, axis=1)
STEP_S, STEADY = 10.0, (0.0, 30.0)


def averaged(step: int, **changes: Any) -> RoundFinished:
    """The round of a step to which all of SAMPLES contribute."""
    members = tuple(MemberTrace(peer, samples, 0.5) for peer, samples in SAMPLES.items())
    good = RoundFinished(0.0, step, 2, (ALICE, BOB), 4.0, 0, 0, 1, 1, 1.0, members=members)
    return replace(good, **changes)


def training(steps: int = 3, means: dict[int, Floats] | None = None) -> list[History]:
    """Histories of alice and bob; ``means``: those that are not `MEAN`, by step."""
    histories = []
    for row, peer in enumerate(SAMPLES):
        history = History(peer, row, computed=steps * SAMPLES[peer], steady=STEADY)
        values = np.zeros((2, WIDTH), np.float32)
        velocity = values
        history.states.append(State(0.0, 0, "lineage0", values))
        for step in range(1, steps + 1):
            velocity = MOMENTUM * velocity + (means or {}).get(step, MEAN)
            values = values - velocity
            history.rounds.append(averaged(step - 1))
            history.states.append(State(STEP_S * step, step, f"lineage{step}", values, history.rounds[-1]))
        histories.append(history)
    return histories


def change(history: History, index: int, **changes: Any) -> None:
    history.states[index] = replace(history.states[index], **changes)


def test_good_histories_are_consistent_and_so_are_those_whose_round_lost_something() -> None:
    assert check(training()) == [] and check([]) == []
    for lost in ({"contributors": (ALICE,)}, {"kept_local": 1}, {"spans_lost": 1}):
        histories = training(means={3: 2 * MEAN})
        for history in histories:
            change(history, 3, round=averaged(2, **lost))
        assert check(histories) == []


@pytest.mark.parametrize(
    "mean", [MEAN[::-1], MEAN * [[1], [0]], 2 * MEAN], ids=["other", "left out", "twice"]
)
def test_a_mean_that_is_not_that_of_the_contributions_is_found(mean: Floats) -> None:
    found = check(training(means={3: mean}))
    assert [(one.rule, one.peer, one.step) for one in found] == [("sum", peer, 3) for peer in SAMPLES]


def test_a_step_that_others_take_another_way_is_found_once_the_storm_is_over() -> None:
    alice, bob = training(4)
    there = alice.states[2]
    change(alice, 2, lineage="alone")
    alice.states.insert(3, replace(there, at=there.at + 1.0))  # alice loads bob's state
    alice.steady = bob.steady = (0.0, 45.0)
    assert check([alice, bob]) == []
    assert {one.rule for one in check([alice, bob], patience_s=15.0)} == {"fork"}


def test_a_steady_peer_that_stands_still_or_steps_back_is_found_and_a_killed_one_may() -> None:
    late, killed = History(CAROL, 2, steady=(25.0, 60.0)), History(CAROL, 2)
    found = check([*training(), killed, late])
    assert found == [Violation("progress", CAROL, -1, "no new step for 35 s from 25 s on")]
    late.states.append(replace(training()[0].states[3], at=40.0))
    assert check([*training(), late]) == []
    alice, bob = training()
    alice.steady = (0.0, 65.0)
    alice.states += [replace(alice.states[2], at=at) for at in (40.0, 50.0, 60.0)]
    assert [one.rule for one in check([alice, bob])] == ["progress"]


# -- storms

STORM = Storm(
    seed=1,
    spells=(
        (16.0, (Fault("kill", "bob"),)),
        (24.0, (Fault("freeze", "carol"),)),
        (40.0, (Fault("partition", "carol", 0, 100),)),
    ),
)
KEPT = [
    # A minority that met late joiners while it was cut off must not take itself for the majority.
    Storm(
        73,
        (
            (24.0, (Fault("slow", "bob", 13, 88),)),
            (24.0, (Fault("slow", "bob", 27, 87), Fault("freeze", "carol", 40, 66))),
        ),
        peers=3,
        late=2,
        network="home",
    ),
    # Two pairs that knew nobody else, and a late joiner between their steps.
    Storm(
        15,
        (
            (24.0, (Fault("partition", "bob", 16, 67), Fault("partition", "dave", 44, 87))),
            (40.0, (Fault("kill", "bob", 2, 60),)),
        ),
        late=2,
    ),
    # A peer that froze in the only micro-batch that was measured got no part any more.
    Storm(52, ((12.0, (Fault("freeze", "alice", 3, 60), Fault("freeze", "alice", 0, 60))),), peers=3),
    # An organizer that had been cut off did not wait for those who had been silent to it then.
    Storm(
        304,
        ((24.0, (Fault("freeze", "alice", 23, 99),)), (24.0, (Fault("freeze", "alice", 0, 92),))),
        peers=3,
        late=2,
        network="home",
    ),
    Storm(509, ((40.0, (Fault("slow", "carol", 40, 74),)),), peers=3, network="home"),
    # The organizer was lost while it told a group: the others gave it to each other for ever.
    Storm(260, ((24.0, (Fault("lose", "carol", 30, 73),)),), peers=3, late=1),
    # A peer that had organized for itself came back with its grant of the whole batch.
    Storm(
        211,
        ((40.0, (Fault("partition", "frank", 36, 97), Fault("leave", "carol", 26, 87))),),
        peers=8,
        late=1,
    ),
    # The next organizer had not got the first group, by which the others stood at it.
    Storm(
        371,
        (
            (12.0, (Fault("lose", "bob", 15, 80), Fault("freeze", "dave", 39, 96))),
            (12.0, (Fault("leave", "dave", 48, 90),)),
        ),
        peers=8,
    ),
]
"""Storms that once ended in a violation."""
MANY = Storm(
    5,
    (
        (
            24.0,
            (Fault("kill", "bob"), Fault("freeze", "carol"), Fault("slow", "dave"), Fault("lose", "erin")),
        ),
        (24.0, (Fault("partition", "grace"), Fault("leave", "heidi"), Fault("kill", "frank"))),
    ),
    peers=12,
    late=2,
)


def a_contribution_that_counts_twice(patch: pytest.MonkeyPatch) -> None:
    on_chunk = SpanReducer.on_chunk

    def wrong(reducer: SpanReducer, member: int, chunk: int, values: Floats) -> bool:
        return on_chunk(reducer, member, chunk, values * 2 if member == 0 else values)

    patch.setattr(SpanReducer, "on_chunk", wrong)


def samples_that_stay_after_a_round(patch: pytest.MonkeyPatch) -> None:
    begin = Share.begin

    def wrong(share: Share, granted: float) -> None:
        counted = share.counted / 2
        begin(share, granted)
        share.counted = counted

    patch.setattr(Share, "begin", wrong)


def a_state_that_is_not_loaded_as_it_was(patch: pytest.MonkeyPatch) -> None:
    load = Replica.load_snapshot

    def wrong(replica: Replica, snapshot: Snapshot) -> None:
        load(replica, snapshot)
        with torch.no_grad():
            replica.parameters[0].mul_(1.001)

    patch.setattr(Replica, "load_snapshot", wrong)


def a_lineage_without_the_mean(patch: pytest.MonkeyPatch) -> None:
    def wrong(mean: Mean, lineage: bytes) -> bytes:
        return blake3(lineage).digest(LINEAGE_BYTES)

    patch.setattr(Mean, "lineage_after", wrong)


def a_peer_that_never_catches_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LinkRounds, "behind", property(lambda rounds: False))


BUGS = [
    ("sum", a_contribution_that_counts_twice),
    ("once", samples_that_stay_after_a_round),
    ("state", a_state_that_is_not_loaded_as_it_was),
    ("state", a_lineage_without_the_mean),
    ("progress", a_peer_that_never_catches_up),
]


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "plant"), BUGS)
def test_a_planted_bug_is_found(
    rule: str, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert rule in {violation.rule for violation in check(endure(STORM))}


@pytest.mark.slow
@pytest.mark.parametrize(
    "storm", [STORM, MANY, *KEPT, *map(storm_of, range(2))], ids=lambda storm: str(storm.seed)
)
def test_a_storm_leaves_consistent_histories(storm: Storm) -> None:
    assert_consistent(storm)


def test_a_storm_that_fails_is_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    def error_of(storm: Storm) -> str:
        return "bob" * any(fault.peer == "bob" for _, faults in storm.spells for fault in faults)

    monkeypatch.setattr("tests.sim.storm.error_of", error_of)
    large = Storm(1, (*STORM.spells, (24.0, (Fault("slow", "bob"), Fault("kill", "dave")))), late=2)
    assert shrink(large) == Storm(1, ((24.0, (Fault("slow", "bob"),)),), peers=3)
    assert large in simpler(replace(large, late=3)) and not error_of(replace(large, spells=STORM.spells[1:]))


@pytest.mark.slow
@pytest.mark.ordeal
def test_five_hundred_storms_leave_consistent_histories() -> None:
    assert not reports_of(range(500))
