"""A donor that gives another state under an honest lineage is found out, and its state given up."""

from typing import Any

import numpy as np
import pytest
import torch

import colab_swarm as cs
from colab_swarm.errors import StateError
from colab_swarm.events import Fault, StateReceived
from colab_swarm.net.peers import PeerId
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training.layerwise import Lamb
from colab_swarm.training.replica import Replica, UpdateRule
from colab_swarm.training.sketch import RELOAD_S, SKETCH_STEPS, StateCheck, StateSketch
from tests.training import toy

ALICE, BOB, CAROL, DAVE = (PeerId(bytes([n]) * 32) for n in range(4))
VOTES = dict.fromkeys((ALICE, BOB, CAROL, DAVE), 1.0)


def sketch(*values: float, step: int = 10, lineage: bytes = b"same") -> StateSketch:
    return StateSketch(step, lineage, (*values, *[0.0] * (5 - len(values))))


TRUE, FALSE = sketch(3.0, 0.5), sketch(3.0, 0.4)


def loaded_from(*donors: PeerId, own: StateSketch = FALSE) -> StateCheck:
    check = StateCheck()
    check.on_loaded(donors)
    check.on_sketch(own)
    return check


@pytest.mark.parametrize(
    ("sketches", "given_up", "published"),  # of the peers that computed their state, and of alice
    [
        ({BOB: TRUE, CAROL: TRUE, ALICE: FALSE}, True, False),
        ({BOB: TRUE, ALICE: FALSE}, False, False),  # who is right?
        ({BOB: FALSE, CAROL: FALSE, DAVE: TRUE, ALICE: FALSE}, False, True),
        ({BOB: sketch(1.0), CAROL: sketch(2.0), DAVE: TRUE, ALICE: FALSE}, False, False),  # all differ
        ({BOB: sketch(3.0, 0.5, step=20), CAROL: sketch(3.0, 0.5, lineage=b"other")}, False, False),
    ],
)
def test_a_state_that_most_others_do_not_hold_is_given_up(
    sketches: dict[PeerId, StateSketch], given_up: bool, published: bool
) -> None:
    check = loaded_from(ALICE)
    assert check.judge(sketches, VOTES, now=0.0) == ((ALICE,) if given_up else ())
    assert (check.published is not None) is published


def test_a_peer_that_took_every_step_itself_gives_up_nothing() -> None:
    check = StateCheck()
    check.on_sketch(FALSE)
    assert check.judge({BOB: TRUE, CAROL: TRUE}, VOTES, now=0.0) == () and check.published == FALSE


def test_a_state_is_given_up_once_in_ten_minutes() -> None:
    check = loaded_from(ALICE)
    for now, found in ((0.0, (ALICE,)), (RELOAD_S - 1, ()), (RELOAD_S, (BOB,))):
        assert check.judge({BOB: TRUE, CAROL: TRUE}, VOTES, now=now) == found
        if check.own is None:
            check.on_loaded((BOB,))
            check.on_sketch(FALSE)


def test_a_state_counts_if_nobody_else_has_a_sketch_until_the_next() -> None:
    check = loaded_from(ALICE)
    assert check.judge({}, VOTES, now=0.0) == () and check.published is None
    check.on_sketch(sketch(3.0, step=20))
    assert check.published is not None


@pytest.mark.parametrize(
    "values", [(3.0, 0.5), (float("nan"), 0.5), (3.0, float("inf")), (3.1, 0.5), (3.0, 0.47)]
)
def test_sketches_agree_within_the_rounding_of_other_processors(values: tuple[float, ...]) -> None:
    assert TRUE.agrees(sketch(*values)) is (values == (3.0, 0.5))
    assert TRUE.agrees(sketch(3.03, 0.51)) and not TRUE.agrees(StateSketch(10, b"same", (3.0, 0.5)))


@pytest.mark.parametrize("kind", ["parameter", "exp_avg_sq", "none"])
def test_a_replicas_sketch_shows_a_changed_parameter_or_optimizer_state(kind: str) -> None:
    net = torch.nn.Linear(300, 300)  # longer than the signs of one block
    replica = Replica(UpdateRule(optimizer := Lamb(net.parameters(), lr=0.01)))
    replica.apply(np.ones(replica.numel, np.float32))
    before = replica.sketch()
    with torch.no_grad():
        changed: dict[str, Any] = {"parameter": net.weight, **optimizer.state[net.weight]}
        if kind in changed:
            changed[kind][200:] = 0.0
    assert before.agrees(replica.sketch()) is (kind == "none")
    replica.lineage = b"another"
    assert len(before.values) == 15 and not np.allclose(replica.sketch().values, before.values, rtol=0.02)


def test_a_late_joiner_gives_up_the_state_of_a_liar_and_loads_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lie(replica: Replica) -> Any:
        if replica.rule is not liars.get("dave"):
            if next(busy, False):
                raise StateError("busy")
            return snapshot(replica)
        poisoned = Replica(UpdateRule(Lamb((net := toy.model()).parameters(), lr=0.01)))
        poisoned.load(replica.state())
        net.load_state_dict(toy.model(seed=9).state_dict())
        return snapshot(poisoned)

    def train(swarm: Swarm) -> torch.Tensor:
        net = toy.model()
        optimizer = toy.join_training(swarm, net)
        if swarm.name == "dave":
            liars["dave"] = optimizer.rule
        while optimizer.global_step < 6 * SKETCH_STEPS:
            toy.loss_of(net, optimizer.global_step, slice(0, 2)).backward()
            optimizer.step(samples=2)
        return toy.parameters_of(net)

    liars: dict[str, UpdateRule] = {}
    busy = iter([True] * 3)  # the honest, when they are first asked
    snapshot = Replica.snapshot
    monkeypatch.setattr(Replica, "snapshot", lie)
    with cs.simulate(4, seed=4, samples_per_s=10.0) as sim:
        sim.join("erin", at=12.0)
        parameters = sim.run(train)
        liar, log = sim.swarms["dave"].id.hex(), sim.swarms["erin"].events
    first, second = (e.donors for e in log.recent(StateReceived) if isinstance(e, StateReceived))
    assert first == (liar,) and liar not in second
    assert [fault.where for fault in log.recent(Fault) if isinstance(fault, Fault)] == ["this peer's state"]
    assert all(torch.equal(one, parameters["alice"]) for one in parameters.values())
