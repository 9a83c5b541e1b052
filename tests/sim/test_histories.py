"""The checker finds what is wrong in histories, also of planted bugs; storms leave none that is wrong."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3

from colab_swarm.averaging.reducer import SpanReducer
from colab_swarm.events import Applied, Contributed, Event, EventLog, Loaded, Notice, stride
from colab_swarm.notebook.recorder import Header, Recorder, replay
from colab_swarm.tensors.chunks import Snapshot
from colab_swarm.tensors.codecs import Floats
from colab_swarm.training.election import Election
from colab_swarm.training.gradients import Gradients
from colab_swarm.training.records import LINEAGE_BYTES, Mean
from colab_swarm.training.replica import Replica
from tests.sim.histories import History, Violation, check
from tests.sim.storm import (
    LIARS,
    Fault,
    Storm,
    assert_consistent,
    endure,
    reports_of,
    shrink,
    simpler,
    storm_of,
)

ALICE, BOB, CAROL = "a11ce000", "b0b00000", "ca401000"
VALUES = {
    ALICE: np.array([1, 2, 3, 4], np.float32),
    BOB: np.array([4, 3, 2, 1], np.float32),
    CAROL: np.array([1, -1, 1, -1], np.float32),
}
WEIGHTS = {ALICE: 1.0, BOB: 3.0}
STEP_S, STEADY = 10.0, (0.0, 30.0)


def mean_of(weights: dict[str, float], values: dict[str, Floats] = VALUES) -> Floats:
    total = sum(weight * values[peer].astype(float) for peer, weight in weights.items())
    return (total / sum(weights.values())).astype(np.float32)


def step(peer: str, number: int, mean: Floats | None = None, **changes: Any) -> list[Event]:
    """Events of a peer's step that ends at ``STEP_S * number``: all of WEIGHTS contribute."""
    mean = mean_of(WEIGHTS) if mean is None else mean
    name, at, weight = f"round{number}", STEP_S * number, WEIGHTS[peer]
    facts = {"before": f"lineage{number - 1}", "lineage": f"lineage{number}", "state": f"state{number}"}
    facts |= {"weights": WEIGHTS, "gaps": (), "numel": len(mean), **changes}
    return [
        Contributed(at - 1, number - 1, name, weight, weight, number * weight, VALUES[peer].tobytes()),
        Applied(at, number, round=name, mean=mean[:: stride(len(mean))].tobytes(), **facts),
    ]


def training(steps: int = 3, *, last: Callable[[str], list[Event]] | None = None) -> list[History]:
    """Histories of alice and bob; ``last``: the last step of each."""
    last = last or (lambda peer: step(peer, steps))
    good = {peer: [one for number in range(1, steps) for one in step(peer, number)] for peer in WEIGHTS}
    return [History(peer, [*events, *last(peer)], STEADY) for peer, events in good.items()]


def rules(histories: Sequence[History], **options: Any) -> set[str]:
    return {one.rule for one in check(histories, **options)}


def test_good_histories_are_consistent() -> None:
    assert check(training()) == [] and check([]) == []


@pytest.mark.parametrize(
    "mean",
    [mean_of({ALICE: 1.0, BOB: 6.0}), mean_of({ALICE: 1.0}), (VALUES[ALICE] + 2 * 3 * VALUES[BOB]) / 4],
    ids=["heavier", "left out", "twice"],
)
def test_a_mean_that_is_not_that_of_the_contributions_is_found(mean: Floats) -> None:
    found = check(training(last=lambda peer: step(peer, 3, mean)))
    assert [(one.rule, one.peer, one.step) for one in found] == [("sum", peer, 3) for peer in WEIGHTS]


def test_a_contribution_may_be_missing_where_the_result_says_so() -> None:
    mean = mean_of(WEIGHTS)
    mean[:2], mean[3] = VALUES[ALICE][:2], 9.0
    without_bob, without_mean = (0, 2, (BOB,)), (3, 4, (ALICE, BOB))
    for gaps, expected in (
        ((without_bob, without_mean), set()),
        (((0, 1, (BOB,)), without_mean), {"sum"}),
        ((without_bob,), {"sum"}),
    ):
        assert rules(training(last=lambda peer, gaps=gaps: step(peer, 3, mean, gaps=gaps))) == expected


@pytest.mark.parametrize(("times", "expected"), [(0.5, set()), (1.0, set()), (1.1, {"sum"}), (-0.1, {"sum"})])
def test_a_far_larger_contribution_may_count_for_less(times: float, expected: set[str]) -> None:
    large = {**VALUES, BOB: 100 * VALUES[BOB]}
    mean = (large[ALICE] + 3 * times * large[BOB]) / 4

    def last(peer: str) -> list[Event]:
        contributed, applied = step(peer, 3, mean.astype(np.float32))
        return [replace(contributed, values=large[peer].tobytes()), applied]

    assert rules(training(last=last)) == expected


def test_a_weight_above_what_was_contributed_is_found() -> None:
    heavier = {ALICE: 2.0, BOB: 3.0}
    assert rules(training(last=lambda peer: step(peer, 3, mean_of(heavier), weights=heavier))) == {"sum"}
    lighter = {ALICE: 1.0, BOB: 2.0}  # an organizer bounds weights
    assert rules(training(last=lambda peer: step(peer, 3, mean_of(lighter), weights=lighter))) == set()


def test_a_round_of_a_peer_without_a_history_is_not_summed() -> None:
    weights = {**WEIGHTS, CAROL: 2.0}
    histories = training(last=lambda peer: step(peer, 3, 7 * mean_of(weights), weights=weights))
    assert rules(histories) == set()
    carol = Contributed(29.0, 2, "round3", 2.0, 2.0, 2.0, VALUES[CAROL].tobytes())
    assert rules([*histories, History(CAROL, [carol], honest=False)]) == {"sum"}


def test_a_long_vector_is_compared_at_a_sample_of_its_values() -> None:
    numel = 5000
    rng = np.random.default_rng(0)
    values = {peer: rng.standard_normal(numel, np.float32) for peer in WEIGHTS}
    mean = mean_of(WEIGHTS, values)
    mean[1000:2000] = values[ALICE][1000:2000]

    def histories(*gaps: tuple[int, int, tuple[str, ...]]) -> list[History]:
        def last(peer: str) -> list[Event]:
            contributed, applied = step(peer, 3, mean, gaps=gaps)
            return [replace(contributed, values=values[peer][:: stride(numel)].tobytes()), applied]

        return training(last=last)

    assert rules(histories((1000, 2000, (BOB,)))) == set()
    assert rules(histories((1000, 1990, (BOB,)))) == rules(histories()) == {"sum"}


def test_samples_that_are_contributed_again_are_found() -> None:
    histories = training()
    last = histories[1].events[-2]
    assert isinstance(last, Contributed)
    histories[1].events[-2] = replace(last, computed=8.0)  # of which two steps took 6
    assert check(histories) == [Violation("once", BOB, 2, "it contributed 3 samples when 2 were left")]


def test_samples_of_a_round_that_lacked_them_may_be_contributed_again() -> None:
    def histories(**result: Any) -> list[History]:
        first = [one for peer in WEIGHTS for one in step(peer, 1, VALUES[ALICE], **result)]
        again = [replace(one, computed=3.0) if isinstance(one, Contributed) else one for one in step(BOB, 2)]
        return [History(ALICE, first[:2]), History(BOB, [*first[2:], again[0]])]

    assert rules(histories(gaps=((0, 4, (BOB,)),))) == set()
    assert "once" in rules(histories()) & rules(histories(gaps=((0, 3, (BOB,)),)))


@pytest.mark.parametrize(
    "changes", [{"state": "another"}, {"before": "another"}, {"step": 4}, {"mean": VALUES[ALICE].tobytes()}]
)
def test_equal_lineages_with_different_pasts_or_states_are_found(changes: dict[str, Any]) -> None:
    def last(peer: str) -> list[Event]:
        contributed, applied = step(peer, 3)
        return [contributed, applied if peer == ALICE else replace(applied, **changes)]

    assert "state" in rules(training(last=last))


def test_a_state_that_was_loaded_is_compared_and_an_unknown_one_is_not() -> None:
    loaded = [Loaded(25.0, 2, "lineage2", state) for state in ("another", "", "state2")]
    found = [rules([*training(), History(CAROL, [one])]) for one in loaded]
    assert found == [{"state"}, set(), set()]


def forked(number: int) -> list[History]:
    """Alice takes step ``number`` of four another way, then loads bob's state."""
    alice, bob = training(4)
    index = 2 * number - 1
    alice.events[index] = replace(alice.events[index], lineage="alone", state="alone")
    alice.events.insert(index + 1, Loaded(STEP_S * number + 1, number, f"lineage{number}", f"state{number}"))
    alice.steady = bob.steady = (0.0, 45.0)
    return [alice, bob]


def test_a_step_that_the_swarm_does_not_follow_is_lost_once_the_storm_is_over() -> None:
    assert rules(forked(2)) == set() and rules(forked(2), patience_s=15.0) == {"lost"}
    assert [(one.rule, one.peer, one.step) for one in check(forked(4))] == [("lost", ALICE, 4)]


def test_a_fork_that_lasts_is_no_progress() -> None:
    alice, bob = training(5)
    for index, event in enumerate(alice.events):
        if isinstance(event, Applied) and event.step > 1:
            alice.events[index] = replace(event, lineage=f"fork{event.step}", state="")
    bob.events += step(BOB, 6)
    alice.steady = bob.steady = (0.0, 65.0)
    found = {(one.rule, one.peer) for one in check([alice, bob])}
    assert found == {("lost", ALICE), ("progress", ALICE)}


def test_a_steady_peer_that_stands_still_is_found_and_others_may() -> None:
    late, killed = History(CAROL, [], (25.0, 60.0)), History(CAROL, [])
    assert rules([*training(), killed]) == set()
    found = check([*training(), late])
    assert found == [Violation("progress", CAROL, -1, "no step of the swarm for 35 s from 25 s on")]
    late.events.append(Loaded(40.0, 3, "lineage3", "state3"))
    assert rules([*training(), late]) == set()


def test_a_step_back_is_no_progress() -> None:
    alice, bob = training()
    alice.steady = (0.0, 65.0)
    alice.events += [Loaded(at, 2, "lineage2", "state2") for at in (40.0, 50.0, 60.0)]
    assert [one.rule for one in check([alice, bob])] == ["progress"]


def test_of_a_liar_only_the_contributions_count() -> None:
    alice, bob = training(last=lambda peer: step(peer, 3, state=peer))
    assert rules([alice, bob]) == {"state"}
    bob.honest = False
    assert rules([alice, bob]) == set()


def test_a_history_survives_a_file(tmp_path: Path) -> None:
    def through_a_file(history: History) -> History:
        path, log = tmp_path / history.peer, EventLog()
        with closing(Recorder(log, path, Header("run", "", history.peer, began=0.0, at=0.0))):
            for event in history.events:
                log.emit(event)
        return replace(history, events=replay(path, live=False).events)

    histories = training(last=lambda peer: step(peer, 3, state=peer, gaps=((0, 2, (BOB,)),)))
    read = [through_a_file(history) for history in histories]
    assert read == histories and check(read) == check(histories) != []


# -- storms

STORM = Storm(
    seed=1,
    spells=(
        (16.0, (Fault("kill", "bob"),)),
        (24.0, (Fault("freeze", "carol"),)),
        (40.0, (Fault("partition", "carol", 0, 100),)),
    ),
)
LIES = [replace(STORM, spells=STORM.spells[:2], seed=index, liar=liar) for index, liar in enumerate(LIARS)]
KEPT = [
    # Two peers waited for a silent organizer while another waited for them, and went on without them.
    Storm(
        0,
        ((12.0, (Fault("freeze", "alice", 0, 60),)), (12.0, (Fault("kill", "bob", 0, 60),))),
        peers=3,
        late=1,
        liar="hangs",
        network="home",
    ),
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
            (40.0, (Fault("kill", "alice", 2, 60),)),
        ),
        peers=3,
        late=2,
        liar="weighs",
    ),
    Storm(
        999,
        ((24.0, (Fault("partition", "bob", 49, 98),)), (12.0, (Fault("slow", "alice", 35, 83),))),
        peers=3,
        liar="boasts",
    ),
    # A peer that another one held for late because it had itself been late there.
    Storm(302, ((12.0, (Fault("freeze", "alice", 1, 70),)),), peers=3, late=1, liar="weighs"),
    # Organizers that thaw in a round which the others have given up.
    Storm(
        52,
        ((12.0, (Fault("freeze", "alice", 3, 60), Fault("freeze", "alice", 0, 60))),),
        peers=3,
        liar="swells",
    ),
    Storm(2, ((12.0, (Fault("kill", "bob"),)), (16.0, (Fault("freeze", "carol"),))), liar="weighs"),
    # Peers followed an organizer whose record said that it is far ahead, or nobody, but not both.
    Storm(
        0,
        ((12.0, (Fault("freeze", "alice", 0, 60),)), (24.0, (Fault("freeze", "alice", 1, 60),))),
        peers=3,
        late=1,
        liar="boasts",
        network="home",
    ),
    # An organizer that had been cut off did not wait for those who had been silent to it then.
    Storm(
        304,
        ((24.0, (Fault("freeze", "alice", 23, 99),)), (24.0, (Fault("freeze", "alice", 0, 92),))),
        peers=3,
        late=2,
        liar="hangs",
        network="home",
    ),
    Storm(509, ((40.0, (Fault("slow", "carol", 40, 74),)),), peers=3, liar="weighs", network="home"),
]
"""Storms that ended in a violation, as hypothesis printed them."""


def a_contribution_that_counts_twice(patch: pytest.MonkeyPatch) -> None:
    on_chunk = SpanReducer.on_chunk

    def wrong(reducer: SpanReducer, member: int, chunk: int, values: Floats) -> bool:
        return on_chunk(reducer, member, chunk, values * 2 if member == 0 else values)

    patch.setattr(SpanReducer, "on_chunk", wrong)


def gradients_that_stay_after_a_round(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Gradients, "forget", lambda gradients: None)


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
    patch.setattr(Election, "behind", property(lambda progress: False))


BUGS = [
    ("sum", a_contribution_that_counts_twice),
    ("once", gradients_that_stay_after_a_round),
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
    assert rule in rules(endure(STORM))


@pytest.mark.slow
@pytest.mark.parametrize(
    "storm",
    # Of the storms that once found a fault, every second one.
    [STORM, *LIES, *KEPT[::2], *(pytest.param(storm, marks=pytest.mark.ordeal) for storm in KEPT[1::2])],
    ids=lambda storm: f"{storm.seed} {storm.liar}",
)
def test_a_storm_leaves_consistent_histories(storm: Storm) -> None:
    histories = assert_consistent(storm)
    lied = any(history.of(Notice) for history in histories if not history.honest)
    assert lied or storm not in LIES


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [0, 1, 2, *(pytest.param(n, marks=pytest.mark.ordeal) for n in range(3, 8))]
)
def test_storms_leave_consistent_histories(number: int) -> None:
    assert_consistent(storm_of(number))


def test_a_storm_that_fails_is_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    def error_of(storm: Storm) -> str:
        return "bob" * any(fault.peer == "bob" for _, faults in storm.spells for fault in faults)

    monkeypatch.setattr("tests.sim.storm.error_of", error_of)
    large = Storm(
        1, (*STORM.spells, (24.0, (Fault("slow", "bob"), Fault("kill", "dave")))), late=2, liar="flips"
    )
    assert shrink(large) == Storm(1, ((24.0, (Fault("slow", "bob"),)),), peers=3)
    assert large in simpler(replace(large, late=3)) and not error_of(replace(large, spells=STORM.spells[1:]))


@pytest.mark.slow
@pytest.mark.ordeal
def test_five_hundred_storms_leave_consistent_histories() -> None:
    assert not reports_of(range(500))
