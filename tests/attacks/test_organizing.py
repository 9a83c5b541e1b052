"""A member says absurd things to the organizer; an organizer says them to the members."""

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import colab_swarm as cs
from colab_swarm.averaging.forming import Formation, FormationSettings
from colab_swarm.averaging.group import (
    Attend,
    Group,
    GroupMember,
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
from colab_swarm.net.peers import Contact, PeerId
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training.comparison import Comparison
from colab_swarm.training.view import WATCHING, SwarmView
from tests.attacks.mutations import Mutator
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


REPORTS = {
    "more samples than granted": replace(CALM, ticket=replace(TICKET, samples=1e8)),
    "a count beyond all grants": replace(CALM, counted=9e8),
    "a grant that nobody gave": replace(CALM, granted=9e8),
    "huge micro-batches": replace(CALM, batch_samples=9e8),
    "no number as a weight": replace(CALM, ticket=replace(TICKET, weight=math.nan)),
    "a negative weight": replace(CALM, ticket=replace(TICKET, weight=-1.0)),
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
REFUSED = set(list(REPORTS)[:6])


@pytest.mark.parametrize("lie", REPORTS)
def test_an_absurd_report_stops_no_organizer(lie: str) -> None:
    desk = Desk()
    assert not desk.formation.on_attend(MALLORY, attend(MALLORY))
    group = desk.group(lambda now: REPORTS[lie])
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


@pytest.mark.slow
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=30, phases=[Phase.explicit, Phase.generate])  # a seed cannot be shrunk
def test_mutated_reports_raise_nothing_and_without_their_author_the_others_go_on(seed: int) -> None:
    templates = [replace(CALM, ticket=TICKET), attend(MALLORY)]
    mutator = Mutator(random.Random(seed), ["run/model"], templates)

    def hostile(now: float) -> StepReport:
        while True:
            with suppress(msgspec.DecodeError, UnicodeDecodeError):
                return msgspec.msgpack.decode(mutator.body(StepReport), type=StepReport)

    desk = Desk()
    assert not desk.formation.on_attend(MALLORY, attend(MALLORY))
    group = desk.group(hostile)
    if group is None:
        desk.formation.on_lost(MALLORY)
        group = desk.group(None, begin=60)
    assert group is not None
    group.check()


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


def with_group(**changes: Any) -> Lie:
    """Say this of each group, and keep the rest."""

    def lie(news: News) -> list[News]:
        if news.group is None:
            return [news]
        told = {name: change(news.group) if callable(change) else change for name, change in changes.items()}
        return [replace(news, group=replace(news.group, **told))]

    return lie


def members(change: Callable[[list[GroupMember]], list[GroupMember]]) -> Callable[[Group], object]:
    return lambda group: tuple(change(list(group.members)))


NOBODY = Contact(PeerId(b"n" * 32), ("ws://10.99.0.1:1",))
INVALID: dict[str, Lie] = {
    "members twice": with_group(members=members(lambda every: [*every, every[-1]])),
    "another model": with_group(terms=lambda group: replace(group.terms, numel=5)),
    "grants that are no numbers": with_group(grants=lambda group: (math.nan,) * len(group.members)),
    "grants without end": with_group(grants=lambda group: (9e8,) * len(group.members)),
    "too few grants": with_group(grants=(1.0,)),
    "witnesses that are no members": with_group(
        witness=replace(TICKET, rates=(0.01,)), agreeing=(-1, 1 << 40)
    ),
    "a negative grant for the step": lambda news: [News(news.key, -1.0)],
    "a grant without end for another step": lambda news: [News(b"another", 1e30), news],
}
ENDURED: dict[str, Lie] = {
    "no group": lambda news: [] if news.group else [news],
    "nothing": lambda news: [],
    "groups without them": with_group(members=(), grants=(), holders=()),
    "that somebody else organizes": lambda news: [News(news.key, organizer=NOBODY)],
    "that it organizes no more": lambda news: [News(news.key)],
    "that they may not take part": lambda news: [News(news.key, refusal="\x1b[2J" * 99)],
}
CALM_S, GONE_S, END_S = 15.0, 75.0, 135.0
STEP_S = 2.0  # of four; three take 2.7 s


def organized_by_a_liar(lie: Lie) -> tuple[Counter[str], Counter[str], list[Any]]:
    """Let the organizer lie until it is gone; return the others' steps before and after, and what they were told."""
    before, after, fired = Counter[str](), Counter[str](), Counter[str]()
    events: list[tuple[str, Any]] = []
    liars: list[str] = []

    async def begin(swarm: Swarm, rendezvous: Rendezvous) -> None:
        send = rendezvous._send

        def spoil(peer: PeerId, news: News) -> None:
            told = [news] if peer == swarm.id else lie(news)
            for one in told:
                send(peer, one)
            fired["lies"] += told != [news]

        rendezvous._send = spoil  # type: ignore[method-assign]
        simulation.network.at(GONE_S).crash(swarm.name)

    def work(swarm: Swarm) -> None:
        optimizer = toy.join_training(swarm, net := toy.model(), target_batch_size=32)
        swarm.events.listen(lambda event: events.append((swarm.name, event)))
        while True:
            step = optimizer.global_step
            toy.take(optimizer, net, step, slice(0, 2))
            now = swarm.runtime.time()
            rendezvous: Rendezvous = optimizer.rounds._rendezvous
            if not liars and now > CALM_S and rendezvous.formation is not None:
                liars.append(swarm.name)
                swarm.runtime.call(begin(swarm, rendezvous))
            steps = before if now < GONE_S else after
            steps[swarm.name] += (optimizer.global_step - step) * (now > CALM_S)

    with cs.simulate(4, network="lan", seed=1, samples_per_s=4.0) as simulation:
        simulation.run(work, seconds=END_S)
        assert simulation.network.fired and fired["lies"], fired
    del before[liars[0]]
    told = [event for name, event in events if name != liars[0]]
    assert not [event for event in told if isinstance(event, Fault)]
    return before, after, told


USUAL = ("members twice", "a negative grant for the step", "no group")


@pytest.mark.slow
@pytest.mark.parametrize(
    "lie",
    [
        *USUAL,
        *(pytest.param(lie, marks=pytest.mark.ordeal) for lie in {**INVALID, **ENDURED} if lie not in USUAL),
    ],
)
def test_an_organizer_that_lies_ends_no_loop_and_once_it_is_gone_the_others_go_on(lie: str) -> None:
    before, after, events = organized_by_a_liar({**INVALID, **ENDURED}[lie])
    refusals = [event for event in events if isinstance(event, PeerRefused)]
    assert bool(refusals) == (lie in INVALID)
    assert lie in ENDURED or min(before.values()) >= 4  # of 30
    assert len(after) == 3 and min(after.values()) >= 15


def nothing_but(group: Group) -> Group:
    """Return a group whose members all follow."""
    idle = tuple(replace(member, weight=0.0, samples=0.0) for member in group.members)
    return replace(group, members=idle, seed=bytes(16))


ANSWERS: dict[str, Callable[[Group], News]] = {
    "an invalid group": lambda group: News(b"", group=replace(group, holders=(99,))),
    "a group in which nobody contributes": lambda group: News(b"", group=nothing_but(group)),
    "an organizer that is none": lambda group: News(group.round_id, organizer=NOBODY),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "answer", ["an invalid group", *(pytest.param(one, marks=pytest.mark.ordeal) for one in [*ANSWERS][1:])]
)
def test_the_next_organizer_goes_on_whatever_a_member_answers(answer: str) -> None:
    steps, fired = Counter[str](), Counter[str]()
    organizers: list[str] = []

    async def lie(swarm: Swarm, rendezvous: Rendezvous, task: asyncio.Task[None]) -> None:
        async def say(peer: PeerId, ask: Whereabouts) -> News:
            fired["lies"] += 1
            assert rendezvous.group is not None
            return ANSWERS[answer](rendezvous.group)

        swarm.services.router._handlers[Whereabouts][rendezvous._prefix] = say
        task.cancel()  # it stands nowhere, so it is asked
        await asyncio.Event().wait()

    def work(swarm: Swarm) -> None:
        optimizer = toy.join_training(swarm, net := toy.model(), target_batch_size=32)
        rendezvous: Rendezvous = optimizer.rounds._rendezvous
        while simulation.time < CALM_S:
            toy.take(optimizer, net, optimizer.global_step, slice(0, 2))
        if rendezvous.formation is not None:
            organizers.append(swarm.name)
            simulation.network.at(CALM_S + 5.0).crash(swarm.name)
        elif swarm.name == "alice":
            assert rendezvous._task is not None
            swarm.runtime.call(lie(swarm, rendezvous, rendezvous._task))
        while True:
            step = optimizer.global_step
            toy.take(optimizer, net, step, slice(0, 2))
            steps[swarm.name] += optimizer.global_step - step

    with cs.simulate(4, network="lan", seed=1, samples_per_s=4.0) as simulation:
        simulation.run(work, seconds=CALM_S + 65.0)
        assert simulation.network.fired and fired["lies"] and organizers != ["alice"]
        faults = [swarm.events.recent(Fault) for name, swarm in simulation.swarms.items() if name != "alice"]
    assert not any(faults)
    honest = {"bob", "carol", "dave"} - {*organizers}
    print(steps, fired)
    assert min(steps[name] for name in honest) >= 7  # of two, a step takes 4 s
