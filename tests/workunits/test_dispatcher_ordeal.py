"""A job among unreliable volunteers, its coordinator killed again and again: no unit is lost or counted twice.

Volunteers kill, send rubbish, come late, send twice, give back; parameter servers take results in any order; and at
random moments the dispatcher is rebuilt from the log, and must know what it knew.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from colab_swarm.workunits.dispatcher import Dispatcher
from colab_swarm.workunits.job import WorkPlan
from colab_swarm.workunits.state import (
    Accepted,
    AnyEntry,
    Assigned,
    Assimilated,
    Expired,
    GaveBack,
    Measured,
    Met,
    Rejected,
    Returned,
    Unit,
    decode_entry,
    encode_entry,
)
from tests.workunits.local import check_state

SUBSETS, EPOCHS = 20, 3
MISBEHAVIOUR = {"alice": 0.0, "bob": 0.05, "carol": 0.1, "dave": 0.3, "erin": 0.5, "frank": 0.9}
"""How often a volunteer does something else than to train and return."""


class Ordeal:
    """Everything that happens is in ``log``; ``done`` counts what volunteers and chance did."""

    def __init__(self, seed: int, replication: int) -> None:
        self.rng, self.now, self.log = random.Random(seed), 1000.0, list[bytes]()
        self.plan = WorkPlan(
            subsets=SUBSETS,
            max_epochs=EPOCHS,
            replication=replication,
            deadline_s=None if seed % 2 else 60.0,
            in_flight=4,
        )
        self.held: dict[str, list[str]] = {volunteer: [] for volunteer in MISBEHAVIOUR}
        self.sent: dict[str, list[str]] = {volunteer: [] for volunteer in MISBEHAVIOUR}
        self.values: dict[str, float] = {}
        self.queue: list[Accepted] = []
        self.version, self.done = 0, Counter[str]()
        self.dispatcher = self.new_dispatcher()
        for volunteer in MISBEHAVIOUR:
            self.commit([Met(at=self.now, volunteer=volunteer, name=volunteer)])

    def new_dispatcher(self) -> Dispatcher:
        dispatcher = Dispatcher(self.plan, [f"{n:064x}" for n in range(SUBSETS)], random.Random(5))
        for entry in self.log:
            dispatcher.state.apply(decode_entry(entry))
        return dispatcher

    def commit(self, entries: list[AnyEntry]) -> None:
        for entry in entries:
            self.log.append(encode_entry(entry))
            self.dispatcher.state.apply(entry)
            self.done[type(entry).__name__] += 1
            if isinstance(entry, Accepted):
                self.queue.append(entry)

    def step(self) -> None:
        self.now += self.rng.expovariate(1.0)
        self.commit([*self.dispatcher.expired(now=self.now)])
        self.commit(self.dispatcher.advance(now=self.now))
        volunteer = self.rng.choice([*MISBEHAVIOUR])
        if self.rng.random() < MISBEHAVIOUR[volunteer]:
            self.rng.choice([self.kill, self.give_back, self.send_again, *[self.send_rubbish] * 3])(volunteer)
        elif self.held[volunteer] and self.rng.random() < 0.6:
            self.return_one(volunteer, value=0.0)
        else:
            self.ask(volunteer)
        if self.queue and self.rng.random() < 0.4:
            self.assimilate()
        if self.rng.random() < 0.02:
            self.restart()
        check_state(self.dispatcher)

    def ask(self, volunteer: str) -> None:
        given = self.dispatcher.assign(
            volunteer, self.rng.randint(1, 4), (), now=self.now, version=self.version
        )
        self.commit([*given])
        self.held[volunteer] += [one.assignment for one in given]

    def return_one(self, volunteer: str, value: float) -> None:
        held = self.held[volunteer]
        self.send(volunteer, held.pop(self.rng.randrange(len(held))), value)

    def send(self, volunteer: str, assignment: str, value: float) -> None:
        self.sent[volunteer].append(assignment)
        if (refusal := self.dispatcher.refusal(assignment, volunteer, now=self.now)) is not None:
            self.done[refusal[0]] += 1
            with pytest.raises(ValueError):
                self.dispatcher.on_result(assignment, 1.0, "x", now=self.now)
            return
        if self.dispatcher.state.replicas[assignment].fate == "expired":
            self.done["late"] += 1
        self.values[f"result-{assignment}"] = value
        self.commit(
            self.dispatcher.on_result(
                assignment,
                1.0,
                f"result-{assignment}",
                now=self.now,
                distance=lambda one, other: abs(self.values[one] - self.values[other]),
            )
        )

    def kill(self, volunteer: str) -> None:
        """It may come back with what it had."""
        self.sent[volunteer] += self.held[volunteer]
        self.held[volunteer].clear()
        self.done["vanished"] += 1

    def send_rubbish(self, volunteer: str) -> None:
        """Found out by the validator, or only by comparing replicas."""
        if not self.held[volunteer]:
            return
        if self.plan.replication > 1 and self.rng.random() < 0.5:
            return self.return_one(volunteer, value=self.rng.uniform(1, 100))
        assignment = self.held[volunteer].pop()
        if self.dispatcher.refusal(assignment, volunteer, now=self.now) is None:
            self.commit([Rejected(at=self.now, assignment=assignment, reason="not finite")])

    def give_back(self, volunteer: str) -> None:
        held = self.held[volunteer]
        self.commit([*self.dispatcher.give_back(volunteer, held, now=self.now)])
        held.clear()

    def send_again(self, volunteer: str) -> None:
        if self.sent[volunteer]:
            self.send(volunteer, self.rng.choice(self.sent[volunteer]), 0.0)

    def assimilate(self) -> None:
        accepted = self.queue.pop(self.rng.randrange(len(self.queue)))
        self.version += 1
        self.commit(
            [
                Assimilated(
                    at=self.now,
                    unit=accepted.unit,
                    assignment=accepted.assignment,
                    server="server-1",
                    version=self.version,
                    seconds=0.1,
                )
            ]
        )
        if self.rng.random() < 0.95:  # else it was killed in between
            self.commit([Measured(at=self.now, unit=accepted.unit, accuracy=0.5)])

    def restart(self) -> None:
        before, self.dispatcher = self.dispatcher, self.new_dispatcher()
        assert self.dispatcher.state == before.state
        self.done["restarted"] += 1


@pytest.mark.slow
@pytest.mark.parametrize("replication", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_every_unit_is_assimilated_exactly_once_whatever_happens(seed: int, replication: int) -> None:
    ordeal = Ordeal(seed, replication)
    while not ordeal.dispatcher.state.finished:
        ordeal.step()
        assert len(ordeal.log) < 5000
    ordeal.restart()
    log = [decode_entry(entry) for entry in ordeal.log]
    everything = Counter(Unit(epoch, subset) for epoch in range(1, EPOCHS + 1) for subset in range(SUBSETS))
    assert Counter(entry.unit for entry in log if isinstance(entry, Assimilated)) == everything
    assert Counter(entry.unit for entry in log if isinstance(entry, Accepted)) == everything
    done = set[Unit]()
    for entry in log:
        if isinstance(entry, Assimilated):
            done.add(entry.unit)
        elif isinstance(entry, Assigned):
            before = {unit for unit in everything if unit.epoch < entry.unit.epoch}
            assert before <= done, f"{entry.unit} was assigned before its epoch began"


@pytest.mark.slow
def test_the_ordeals_faults_do_happen() -> None:
    happened = Counter[str]()
    for seed in range(3):
        ordeal = Ordeal(seed, replication=2)
        while not ordeal.dispatcher.state.finished:
            ordeal.step()
        happened += ordeal.done
    faults = (Expired, Rejected, GaveBack, Returned)
    wanted = {*(kind.__name__ for kind in faults), "late", "vanished", "restarted", "stale", "banned"}
    assert wanted <= happened.keys(), happened
