"""A job among unreliable volunteers, its coordinator killed again and again: no unit is lost or counted twice.

Volunteers kill, send rubbish, come late, send twice, give back; parameter servers take results in any order; and at
random moments the dispatcher is rebuilt from the log, and must have the same state.
"""

import random
from collections import Counter

import pytest

from colab_swarm.workunits import state
from colab_swarm.workunits.dispatcher import Dispatcher
from colab_swarm.workunits.state import Accepted, AnyEntry, Assigned, Assimilated, Unit
from tests.workunits.local import check_state
from tests.workunits.test_dispatcher import Desk

SUBSETS, EPOCHS = 20, 3
MISBEHAVIOUR = {"alice": 0.0, "bob": 0.05, "carol": 0.1, "dave": 0.3, "erin": 0.5, "frank": 0.9}
"""How often a volunteer does something else than to train and return."""


class Ordeal(Desk):
    """``done`` counts what volunteers and chance did."""

    def __init__(self, seed: int, replication: int) -> None:
        deadline_s = None if seed % 2 else 60.0
        plan = {"max_epochs": EPOCHS, "replication": replication, "deadline_s": deadline_s}
        super().__init__(SUBSETS, in_flight=4, **plan)
        self.rng, self.done = random.Random(seed), Counter[str]()
        self.held: dict[str, list[Assigned]] = {volunteer: [] for volunteer in MISBEHAVIOUR}
        self.sent: dict[str, list[Assigned]] = {volunteer: [] for volunteer in MISBEHAVIOUR}
        self.queue: list[Accepted] = []

    def commit(self, *entries: AnyEntry) -> list[AnyEntry]:
        self.done.update(type(entry).__name__ for entry in entries)
        self.queue += [entry for entry in entries if isinstance(entry, Accepted)]
        return super().commit(*entries)

    def step(self) -> None:
        self.now += self.rng.expovariate(1.0)
        self.expire()
        self.commit(*self.core.advance(now=self.now))
        volunteer = self.rng.choice([*MISBEHAVIOUR])
        held = self.held[volunteer]
        if self.rng.random() < MISBEHAVIOUR[volunteer]:
            faults = [self.kill, self.give_all_back, self.send_again, *[self.send_rubbish] * 3]
            self.rng.choice(faults)(volunteer)
        elif held and self.rng.random() < 0.6:
            self.send(volunteer, held.pop(self.rng.randrange(len(held))), value=0.0)
        else:
            held += self.ask(volunteer, self.rng.randint(1, 4))
        if self.queue and self.rng.random() < 0.4:
            accepted = self.queue.pop(self.rng.randrange(len(self.queue)))
            killed = self.rng.random() < 0.05  # between the two entries
            self.assimilate([accepted], accuracy=None if killed else 0.5)
        if self.rng.random() < 0.02:
            self.restart()
        check_state(self.core)

    def send(self, volunteer: str, given: Assigned, value: float) -> None:
        self.sent[volunteer].append(given)
        if (refusal := self.core.refusal(given.assignment, volunteer, now=self.now)) is not None:
            self.done[refusal[0]] += 1
            return
        if self.core.state.replicas[given.assignment].fate == "expired":
            self.done["late"] += 1
        self.result(given, value)

    def kill(self, volunteer: str) -> None:
        """It may come back with its units."""
        self.sent[volunteer] += self.held[volunteer]
        self.held[volunteer].clear()
        self.done["vanished"] += 1

    def send_rubbish(self, volunteer: str) -> None:
        """Found out by the validator, or only by comparing replicas."""
        if not self.held[volunteer]:
            return
        given = self.held[volunteer].pop(self.rng.randrange(len(self.held[volunteer])))
        if self.plan.replication > 1 and self.rng.random() < 0.5:
            self.send(volunteer, given, value=self.rng.uniform(1, 100))
        elif self.core.refusal(given.assignment, volunteer, now=self.now) is None:
            self.reject(given)

    def give_all_back(self, volunteer: str) -> None:
        self.give_back(volunteer)
        self.held[volunteer].clear()

    def send_again(self, volunteer: str) -> None:
        if self.sent[volunteer]:
            self.send(volunteer, self.rng.choice(self.sent[volunteer]), 0.0)

    def restart(self) -> None:
        before, self.core = self.core, Dispatcher(self.plan, SUBSETS, random.Random(len(self.log)))
        for entry in self.log:
            self.core.state.apply(state.decode_entry(state.encode_entry(entry)))
        assert self.core.state == before.state
        self.done["restarted"] += 1


@pytest.mark.slow
@pytest.mark.parametrize("replication", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_every_unit_is_assimilated_exactly_once_whatever_happens(seed: int, replication: int) -> None:
    ordeal = Ordeal(seed, replication)
    while not ordeal.core.state.finished:
        ordeal.step()
        assert len(ordeal.log) < 5000
    ordeal.restart()
    everything = Counter(Unit(epoch, subset) for epoch in range(1, EPOCHS + 1) for subset in range(SUBSETS))
    assert Counter(entry.unit for entry in ordeal.log if isinstance(entry, Assimilated)) == everything
    assert Counter(entry.unit for entry in ordeal.log if isinstance(entry, Accepted)) == everything
    done = set[Unit]()
    for entry in ordeal.log:
        if isinstance(entry, Assimilated):
            done.add(entry.unit)
        elif isinstance(entry, Assigned):
            before = {unit for unit in everything if unit.epoch < entry.unit.epoch}
            assert before <= done, f"{entry.unit} was assigned before its epoch began"
