"""A member says absurd things to the organizer; an organizer says them to the members."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

import colab_swarm as cs
from colab_swarm.averaging.forming import Formation, FormationSettings
from colab_swarm.averaging.group import (
    Attend,
    Group,
    News,
    RoundTerms,
    StepReport,
    Ticket,
    Whereabouts,
)
from colab_swarm.averaging.rendezvous import Rendezvous
from colab_swarm.averaging.strategy import AdaptiveShares
from colab_swarm.events import EventLog, Fault, PeerRefused
from colab_swarm.net.patience import Patience
from colab_swarm.net.peers import Contact, PeerId, Role
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training.comparison import Comparison
from colab_swarm.training.view import WATCHING, SwarmView
from tests.training import toy

ALICE, BOB, CAROL, MALLORY = (PeerId(bytes([index]) * 32) for index in range(1, 5))
HONEST = (ALICE, BOB, CAROL)
TERMS = RoundTerms("run/model", 10, b"same", 178)
CALM = StepReport(10, b"same", counted=4.0, batch_samples=4.0, batch_s=1.0)  # mallory's, before it lies
TICKET = Ticket(TERMS, 4.0, samples=4.0)


def attend(peer: PeerId, **changes: Any) -> Attend:
    return replace(Attend(Contact(peer, ("ws://10.0.0.1:1",)), b"", TERMS, 64.0), **changes)


class Desk:
    """An organizer at which three honest peers stand, and mallory; without a network."""

    def __init__(self) -> None:
        comparison = Comparison(SwarmView(ALICE, WATCHING), 1e-3, EventLog(), drift_bytes=1e9)
        settings = FormationSettings(TERMS, 64.0, AdaptiveShares(), agree=comparison.agree)
        self.formation = Formation(settings, ALICE, None, Patience(60.0), 0.0)
        self.counted = dict.fromkeys(HONEST, 4.0)
        self.granted = dict.fromkeys((*HONEST, MALLORY), 0.0)
        self.refusals = set[str]()
        for peer in HONEST:
            assert not self.formation.on_attend(peer, attend(peer))

    def group(self, hostile: Callable[[float], StepReport] | None, begin: int = 0) -> Group | None:
        """Return the group of a step, or None after a minute; mallory reports each second, as others compute."""
        for second in range(begin, begin + 60):
            now = float(second)
            if hostile is not None:
                self.refusals.add(self.formation.on_report(MALLORY, hostile(now), now))
            for peer in HONEST:
                self.formation.on_report(peer, self.report(peer), now)
            action = self.formation.next_action(now, ())
            self.granted |= action.grants
            if action.group is not None:
                return action.group
        return None

    def report(self, peer: PeerId) -> StepReport:
        ticket = None
        counted = self.counted[peer]
        if counted < self.granted[peer]:
            self.counted[peer] = counted = counted + 4.0
        if counted >= self.granted[peer]:
            ticket = Ticket(TERMS, counted, samples=counted, rates=(0.1,), sketch=(1.0, 2.0, 3.0, 4.0, 5.0))
        return replace(CALM, counted=counted, granted=self.granted[peer], ticket=ticket)


REFUSED = {
    "more samples than granted": replace(CALM, ticket=replace(TICKET, samples=1e8)),
    "a count beyond all grants": replace(CALM, counted=9e8),
    "a grant that nobody gave": replace(CALM, granted=9e8),
    "huge micro-batches": replace(CALM, batch_samples=9e8),
    "no number as a weight": replace(CALM, ticket=replace(TICKET, weight=math.nan)),
    "a negative weight": replace(CALM, ticket=replace(TICKET, weight=-1.0)),
}
ENDURED = {
    "tiny micro-batches": replace(CALM, batch_samples=5e-324),
    "micro-batches that take no time": replace(CALM, batch_s=5e-324),
    "a micro-batch that began an age ago": replace(CALM, age_s=9e8),
    "a step far ahead": replace(CALM, step=1 << 47, lineage=b"x"),
    "bandwidths that are none": replace(CALM, ticket=replace(TICKET, upload_bps=math.nan, download_bps=-1.0)),
    "half a sketch": replace(CALM, ticket=replace(TICKET, rates=(0.1,), sketch=(1.0, 2.0))),
    "other rates": replace(CALM, ticket=replace(TICKET, rates=(0.5,))),
    "another state": replace(CALM, ticket=replace(TICKET, rates=(0.1,), sketch=(9.0,) * 5)),
    "no numbers as rates": replace(CALM, ticket=replace(TICKET, rates=(math.nan,) * 8)),
}


@pytest.mark.parametrize("lie", REFUSED | ENDURED)
def test_an_absurd_report_stops_no_organizer(lie: str) -> None:
    desk = Desk()
    assert not desk.formation.on_attend(MALLORY, attend(MALLORY))
    group = desk.group(lambda now: (REFUSED | ENDURED)[lie])
    assert (desk.refusals != {""}) == (lie in REFUSED), desk.refusals
    assert group is not None
    group.check()
    assert group.witness is not None and group.witness.rates == (0.1,)
    assert group.witness.sketch == (1.0, 2.0, 3.0, 4.0, 5.0)
    counted = {member.id: member.samples for member in group.members}
    assert sum(counted[peer] for peer in HONEST) >= 60.0  # of 64: mallory may have counted 4


@pytest.mark.parametrize(
    "hostile",
    [lambda now: replace(CALM, batch_s=9e8), lambda now: replace(CALM, counted=4.0 + now / 1000)],
    ids=["its micro-batches take an age", "it counts ever more slowly"],
)
def test_a_member_that_computes_without_end_holds_up_a_step_until_it_is_removed(
    hostile: Callable[[float], StepReport],
) -> None:
    desk = Desk()
    assert not desk.formation.on_attend(MALLORY, attend(MALLORY))
    assert desk.group(hostile) is None and desk.refusals == {""}
    desk.formation.on_lost(MALLORY)
    assert desk.group(None, begin=60) is not None


OPENINGS = {
    "the contact of another": {"contact": Contact(BOB)},
    "more addresses than a group can tell": {"contact": Contact(MALLORY, ("ws://10.0.0.1:1",) * 9999)},
    "an address without end": {"contact": Contact(MALLORY, ("x" * 99_999,))},
    "another model": {"terms": replace(TERMS, numel=179)},
    "an assistant that contributes": {"assistant": replace(TICKET, assists=True)},
    "an assistant of no weight": {"assistant": replace(TICKET, weight=math.nan, assists=True)},
}


@pytest.mark.parametrize("lie", OPENINGS)
def test_an_absurd_opening_is_refused(lie: str) -> None:
    desk = Desk()
    assert desk.formation.on_attend(MALLORY, attend(MALLORY, **OPENINGS[lie]))
    group = desk.group(None)
    assert group is not None
    assert {member.id for member in group.members} == set(HONEST)


@pytest.mark.parametrize(
    "changes", [{"target": 0.0}, {"terms": replace(TERMS, numel=0)}, {"terms": replace(TERMS, codec="zip")}]
)
def test_an_assistant_takes_no_terms_that_nobody_can_train_by(changes: dict[str, Any]) -> None:
    nothing = FormationSettings(RoundTerms("run/model", 0, b"", 0), 0.0, AdaptiveShares())
    formation = Formation(nothing, ALICE, None, Patience(60.0), 0.0)
    assert formation.on_attend(MALLORY, attend(MALLORY, **changes))
    assert not formation.on_attend(BOB, attend(BOB))


Lie = Callable[[News], list[News]]
"""What a hostile organizer says in place of its news."""


def with_a_member_twice(news: News) -> list[News]:
    if news.group is None:
        return [news]
    members = (*news.group.members, news.group.members[-1])
    return [replace(news, group=replace(news.group, members=members))]


LIES: dict[str, tuple[Lie, bool]] = {
    "members twice": (with_a_member_twice, True),
    "a negative grant for the step": (lambda news: [News(news.key, -1.0)], True),
    "no group": (lambda news: [] if news.group else [news], False),
}
"""What it says, and whether that shows it."""
CALM_S, GONE_S, END_S = 15.0, 75.0, 135.0


def train(swarm: Swarm) -> tuple[Rendezvous, Callable[[], bool]]:
    """Join the training; return the part that stands at an organizer, and a call that tells whether a batch stepped."""
    optimizer = toy.join_training(swarm, net := toy.model(), target_batch_size=32)

    def step() -> bool:
        before = optimizer.global_step
        toy.take(optimizer, net, before, slice(0, 2))
        return optimizer.global_step > before

    return optimizer.rounds._rendezvous, step


@pytest.mark.slow
@pytest.mark.parametrize("lie", LIES)
def test_an_organizer_that_lies_ends_no_loop_and_once_it_is_gone_the_others_go_on(lie: str) -> None:
    before, after, fired = Counter[str](), Counter[str](), Counter[str]()
    events: list[tuple[str, Any]] = []
    liars: list[str] = []
    spoil, shows = LIES[lie]

    async def begin(swarm: Swarm, rendezvous: Rendezvous) -> None:
        send = rendezvous._send

        def say(peer: PeerId, news: News) -> None:
            told = [news] if peer == swarm.id else spoil(news)
            for one in told:
                send(peer, one)
            fired["lies"] += told != [news]

        rendezvous._send = say  # type: ignore[method-assign]
        simulation.network.at(GONE_S).crash(swarm.name)

    def work(swarm: Swarm) -> None:
        rendezvous, step = train(swarm)
        swarm.events.listen(lambda event: events.append((swarm.name, event)))
        while True:
            stepped = step()
            now = swarm.runtime.time()
            if not liars and now > CALM_S and rendezvous.formation is not None:
                liars.append(swarm.name)
                swarm.runtime.call(begin(swarm, rendezvous))
            steps = before if now < GONE_S else after
            steps[swarm.name] += stepped and now > CALM_S

    with cs.simulate(4, network="lan", seed=1, samples_per_s=4.0) as simulation:
        simulation.run(work, seconds=END_S)
        assert simulation.network.fired and fired["lies"], fired
    del before[liars[0]]
    told = [event for name, event in events if name != liars[0]]
    assert not [event for event in told if isinstance(event, Fault)]
    assert any(isinstance(event, PeerRefused) for event in told) == shows
    assert not shows or min(before.values()) >= 4  # of 30
    assert len(after) == 3 and min(after.values()) >= 15


@pytest.mark.slow
def test_the_next_organizer_goes_on_whatever_a_member_answers() -> None:
    steps, fired = Counter[str](), Counter[str]()
    organizers: list[str] = []

    async def lie(swarm: Swarm, rendezvous: Rendezvous, task: asyncio.Task[None]) -> None:
        async def say(peer: PeerId, ask: Whereabouts) -> News:
            fired["lies"] += 1
            assert rendezvous.group is not None
            return News(b"", group=replace(rendezvous.group, holders=(99,)))

        prefix = f"{swarm.run_id}/model"
        swarm.services.router.unserve(prefix, Whereabouts)
        swarm.services.router.serve(prefix, Whereabouts, say, Role.GUEST)
        task.cancel()  # it stands nowhere, so it is asked
        await asyncio.Event().wait()

    def work(swarm: Swarm) -> None:
        rendezvous, step = train(swarm)
        while simulation.time < CALM_S:
            step()
        if rendezvous.formation is not None:
            organizers.append(swarm.name)
            simulation.network.at(CALM_S + 5.0).crash(swarm.name)
        elif swarm.name == "alice":
            assert rendezvous._task is not None
            swarm.runtime.call(lie(swarm, rendezvous, rendezvous._task))
        while True:
            steps[swarm.name] += step()

    with cs.simulate(4, network="lan", seed=1, samples_per_s=4.0) as simulation:
        simulation.run(work, seconds=CALM_S + 65.0)
        assert simulation.network.fired and fired["lies"] and organizers != ["alice"]
        faults = [swarm.events.recent(Fault) for name, swarm in simulation.swarms.items() if name != "alice"]
    assert not any(faults)
    honest = {"bob", "carol", "dave"} - {*organizers}
    assert min(steps[name] for name in honest) >= 7  # of two, a step takes 4 s
