"""Who trains what: deadlines, reassignment, quorums, epochs, bans."""

import random
from collections.abc import Iterator

import pytest

from colab_swarm.workunits import state
from colab_swarm.workunits.dispatcher import FEW, FIRST_DEADLINE_S, MEASURE_S, PRESENT_S, Dispatcher
from colab_swarm.workunits.job import WorkPlan
from colab_swarm.workunits.messages import Resources
from colab_swarm.workunits.state import Accepted, AnyEntry, Assigned, Finished, Rejected, Returned
from tests.workunits.local import check_state

ALICE, BOB, CAROL, DAVE = "a" * 64, "b" * 64, "c" * 64, "d" * 64
desks: "list[Desk]" = []


class Desk:
    """A dispatcher whose decisions take effect at once, at ``now``."""

    def __init__(self, subsets: int = 4, **plan: object) -> None:
        self.plan = WorkPlan(**{"max_epochs": 3, "deadline_s": 100.0, **plan})  # type: ignore[arg-type]
        self.core = Dispatcher(self.plan, subsets, random.Random(1))
        self.now, self.values = 1000.0, dict[str, float]()
        self.log: list[AnyEntry] = []
        desks.append(self)

    def commit(self, *entries: AnyEntry) -> list[AnyEntry]:
        for entry in entries:
            self.core.state.apply(entry)
        self.log += entries
        return list(entries)

    def ask(self, volunteer: str, count: int = 1) -> list[Assigned]:
        """Ask ``count`` times; return the units that it gets."""
        units = []
        for _ in range(count):
            unit = self.core.assign(volunteer, now=self.now, name=f"{volunteer[0]}'s notebook")
            if unit is not None:
                units += self.commit(unit)
        return units

    def result(self, given: Assigned, value: float = 0.0) -> list[AnyEntry]:
        """It trained ``value``; results that differ by over 0.05 disagree."""
        self.values[given.assignment] = value

        def distance(one: str, other: str) -> float:
            return abs(self.values[one] - self.values[other])

        return self.commit(*self.core.on_result(given.assignment, 1.0, distance, now=self.now))

    def refusal(self, given: Assigned, volunteer: str, *, later_s: float = 0.0) -> tuple[str, str]:
        return self.core.refusal(given.assignment, volunteer, now=self.now + later_s) or ("", "")

    def give_back(self, volunteer: str) -> None:
        self.commit(*self.core.give_back(volunteer, now=self.now))

    def reject(self, given: Assigned) -> None:
        self.commit(Rejected(at=self.now, assignment=given.assignment, reason="not finite"))

    def expire(self) -> list[state.Expired]:
        expired = self.core.expired(now=self.now)
        self.commit(*expired)
        return expired

    def assimilate(self, entries: list[AnyEntry], accuracy: float | None = 0.5) -> None:
        for entry in entries:
            if isinstance(entry, Accepted):
                unit, name, version = entry.unit, entry.assignment, self.core.state.version + 1
                done = {"at": self.now, "unit": unit, "assignment": name, "version": version}
                self.commit(state.Assimilated(server="p", seconds=0.1, **done))
                if accuracy is not None:
                    self.commit(state.Measured(at=self.now, unit=unit, accuracy=accuracy))

    def advance(self) -> list[AnyEntry]:
        ended = list[AnyEntry]()
        while due := self.core.advance(now=self.now):
            ended += self.commit(*due)
        return ended

    def prove(self, *volunteers: str) -> None:
        for volunteer in volunteers:
            (given,) = self.ask(volunteer)
            self.assimilate(self.result(given))


@pytest.fixture(autouse=True)
def check_desks() -> Iterator[None]:
    desks.clear()
    yield
    for desk in desks:
        check_state(desk.core)


def test_a_new_volunteer_gets_few_units_and_a_proven_one_more() -> None:
    desk = Desk(subsets=20, in_flight=5)
    given = desk.ask(ALICE, count=8)
    assert len(given) == FEW
    desk.result(given[0])
    assert len(desk.ask(ALICE, count=8)) == 4
    record = desk.core.state.volunteers[ALICE]
    assert (record.volunteer, record.name, record.last_seen) == (ALICE, "a's notebook", desk.now)
    assert (record.accepted, record.in_flight) == (1, 5)


def test_in_later_epochs_a_volunteer_gets_the_subsets_that_it_has_first() -> None:
    desk = Desk(subsets=12, in_flight=6)
    desk.prove(ALICE, BOB)
    for _ in range(5):
        desk.prove(ALICE, BOB)
    had = {given.unit.subset for given in desk.log if isinstance(given, Assigned) and given.volunteer == BOB}
    assert {given.unit.subset for given in desk.ask(BOB, count=6)} == had


def test_an_expired_unit_goes_out_again_and_its_late_result_is_wanted_until_another_has_it() -> None:
    desk = Desk(subsets=2)
    late, done = desk.ask(ALICE, count=2)
    desk.core.state.volunteers[BOB] = state.VolunteerState(BOB, last_seen=desk.now + 99)
    desk.now += 10
    desk.assimilate(desk.result(done))
    desk.now += 90
    assert [entry.assignment for entry in desk.expire()] == [late.assignment]
    assert desk.refusal(late, ALICE) == ("", "")
    unit = desk.core.state.units[late.unit]
    assert desk.ask(ALICE) == [] and unit.mark == "late"
    (again,) = desk.ask(BOB)
    assert unit.mark == "training"
    assert 0.7 < desk.core.wait_s(CAROL, now=desk.now) < 1.3
    assert desk.core.wait_s(CAROL, now=again.deadline - 0.4) == pytest.approx(0.4)
    assert (again.unit, late.version, again.version) == (late.unit, 0, 1)
    code, text = desk.refusal(late, ALICE, later_s=5.0)
    assert code == "stale" and "passed 5 s ago and another volunteer has it" in text
    desk.assimilate(desk.result(again))
    assert (unit.mark, unit.staleness) == ("assimilated", 0)
    assert desk.refusal(late, ALICE)[0] == "surplus"


@pytest.mark.parametrize("alone", [True, False])
def test_a_failed_unit_returns_to_its_volunteer_at_once_or_when_none_took_it(alone: bool) -> None:
    desk = Desk(subsets=1)
    assert desk.ask(ALICE)
    seen_at = desk.now - PRESENT_S + (0 if alone else 3)
    desk.core.state.volunteers[BOB] = state.VolunteerState(BOB, last_seen=seen_at)
    desk.give_back(ALICE)
    assert bool(desk.ask(ALICE)) == alone
    desk.now += 2
    assert bool(desk.ask(ALICE)) != alone


def test_reliable_volunteers_get_failed_units_first_and_unreliable_ones_last() -> None:
    desk = Desk(subsets=9)
    desk.prove(ALICE)
    (failed,) = desk.ask(BOB)
    desk.reject(failed)
    assert all(given.unit != failed.unit for given in desk.ask(CAROL, count=2))
    (given,) = desk.ask(ALICE)
    assert given.unit == failed.unit


def test_three_bad_results_ban_a_volunteer_for_longer_each_time_and_free_its_units() -> None:
    desk = Desk(subsets=20)
    desk.prove(ALICE)
    given = desk.ask(ALICE, count=4)
    for bad in given[:3]:
        assert desk.core.ban_of(ALICE, now=desk.now) is None
        desk.reject(bad)
    code, text = desk.core.ban_of(ALICE, now=desk.now) or ("", "")
    assert code == "banned" and "3 of your results were refused" in text and "next 10 minutes" in text
    assert desk.ask(ALICE) == []
    assert [entry.assignment for entry in desk.expire()] == [given[3].assignment]
    bans_s = [desk.core.wait_s(ALICE, now=desk.now)]
    for _ in range(10):
        desk.now += bans_s[-1]
        assert desk.core.ban_of(ALICE, now=desk.now) is None
        (again,) = desk.ask(ALICE)
        desk.reject(again)
        bans_s.append(desk.core.wait_s(ALICE, now=desk.now))
    assert bans_s == [min(state.FIRST_BAN_S * 2**number, state.LONGEST_BAN_S) for number in range(11)]


def test_an_epoch_begins_when_the_one_before_is_assimilated_and_the_job_ends_at_its_last() -> None:
    desk, ended = Desk(), list[AnyEntry]()
    for epoch in (1, 2, 3):
        entries = []
        while given := desk.ask(ALICE):
            assert given[0].unit.epoch == epoch and given[0].version == 4 * (epoch - 1)
            entries += desk.result(given[0])
        assert [entry.alpha for entry in entries if isinstance(entry, Accepted)] == [epoch / (epoch + 1)] * 4
        assert desk.core.advance(now=desk.now) == []
        for accuracy, entry in zip((0.1, 0.2, 0.3, 0.4), entries, strict=True):
            desk.assimilate([entry], accuracy=accuracy)
        ended += desk.advance()
    assert [*map(type, ended)] == [state.EpochEnded] * 3 + [Finished]
    assert isinstance(ended[0], state.EpochEnded)
    assert (ended[0].accuracy, ended[0].low, ended[0].high) == (pytest.approx(0.25), 0.1, 0.4)
    assert desk.core.state.finished == "all 3 epochs are done" and desk.ask(ALICE) == []
    shortened = Desk(max_epochs=1)
    shortened.commit(*(entry for entry in desk.log if not isinstance(entry, Finished)))
    assert [*map(type, shortened.advance())] == [Finished]


def test_a_job_ends_at_its_target_accuracy_and_an_epoch_without_one_that_never_came() -> None:
    desk = Desk(subsets=1, target_accuracy=0.9)
    desk.assimilate(desk.result(desk.ask(ALICE)[0]), accuracy=0.9)
    desk.advance()
    assert desk.core.state.finished == "accuracy 0.900 reached the target 0.9" and desk.ask(ALICE) == []
    desk = Desk(subsets=1)
    desk.assimilate(desk.result(desk.ask(ALICE)[0]), accuracy=None)
    assert desk.core.advance(now=desk.now + MEASURE_S - 1) == []
    (ended,) = desk.core.advance(now=desk.now + MEASURE_S)
    assert isinstance(ended, state.EpochEnded)
    assert ended.accuracy != ended.accuracy  # NaN


def test_a_unit_goes_only_to_a_machine_that_has_what_the_job_needs() -> None:
    desk, small = Desk(needs=Resources(cpu_cores=4, memory_gb=8, gpu_memory_gb=12)), Resources(4, 7.5, 0.0)
    why = "8 GB of memory (your machine has 7.5) and 12 GB of GPU memory (your machine has 0)"
    assert why in desk.core.unfit(small)
    assert desk.core.assign(ALICE, now=desk.now, resources=small) is None
    assert desk.core.assign(ALICE, now=desk.now, resources=Resources(4, 8.0, 12.0))


def tail(**plan: object) -> tuple[Desk, Assigned]:
    """An epoch's last unit, at Alice; Bob has shown that units take 10 s."""
    desk = Desk(subsets=2, **plan)
    (last,) = desk.ask(ALICE)
    (bobs,) = desk.ask(BOB)
    desk.now += 10
    desk.assimilate(desk.result(bobs))
    return desk, last


def test_an_overdue_unit_goes_to_one_idle_volunteer_more_once_none_is_left_to_hand_out() -> None:
    desk, last = tail()
    assert desk.ask(BOB) == []  # it takes no longer than usual yet
    desk.now += 0.1
    assert desk.ask(ALICE) == []
    (copy,) = desk.ask(BOB)
    assert (copy.unit, copy.version) == (last.unit, 1)
    assert desk.ask(BOB) == desk.ask(CAROL) == []
    desk.give_back(BOB)
    assert desk.ask(BOB) == []  # it had its turn
    assert desk.ask(CAROL)[0].unit == last.unit


def test_fresh_units_go_before_copies_and_of_the_overdue_ones_the_one_that_is_out_longest() -> None:
    desk = Desk(subsets=4)
    desk.prove(BOB)
    (first,) = desk.ask(ALICE)
    desk.now += 1
    (second,) = desk.ask(CAROL)
    desk.now += 10
    units = [desk.ask(DAVE)[0].unit for _ in range(2)]
    assert units[0] not in {first.unit, second.unit} and units[1] == first.unit
    assert desk.ask(BOB)[0].unit == second.unit


@pytest.mark.parametrize("copy_is_first", [True, False])
def test_of_a_unit_and_its_copy_the_first_result_counts_and_the_later_one_is_thanked_for(
    copy_is_first: bool,
) -> None:
    desk, last = tail()
    desk.now += 1
    (copy,) = desk.ask(BOB)
    early, late = (copy, last) if copy_is_first else (last, copy)
    desk.assimilate(desk.result(early))
    code, text = desk.refusal(late, late.volunteer)
    assert code == "surplus" and text.startswith(f"thank you: unit {last.unit} is complete")
    records = desk.core.state.volunteers
    assert sum(record.accepted for record in records.values()) == desk.core.state.version == 2
    # the copy came to a volunteer in time, the unit before it took too long
    assert (records[late.volunteer].in_flight, records[late.volunteer].expired) == (0, int(copy_is_first))
    desk.now += 1000
    assert desk.expire() == []
    desk.advance()
    assert desk.ask(ALICE)[0].unit.epoch == 2


@pytest.mark.parametrize("gives_back", [False, True])
def test_a_volunteer_that_takes_units_and_never_answers_gets_fewer_and_fewer(gives_back: bool) -> None:
    desk = Desk(subsets=4, max_epochs=20)
    desk.prove(MALLORY := DAVE, BOB)
    held = list[int]()
    while not desk.advance() or not desk.core.state.finished:
        taken = desk.ask(MALLORY, count=4)
        held.append(len(taken))
        if gives_back and len(held) % 2:
            desk.give_back(MALLORY)
        desk.now += 10
        for given in desk.ask(BOB, count=4):
            desk.assimilate(desk.result(given))
    record = desk.core.state.volunteers[MALLORY]
    late = [entry for entry in desk.log if isinstance(entry, state.Expired)]
    assert held[0] == 2 and len(late) == record.expired > 5
    assert not record.proven and record.rests_until > desk.now - 600
    assert sum(held[len(held) // 2 :]) < sum(held[: len(held) // 2]) / 2


def test_while_no_replicas_agree_one_more_is_assigned_until_the_unit_starts_over() -> None:
    desk = Desk(subsets=1, replication=2)
    for number, volunteer in enumerate((ALICE, BOB, CAROL, DAVE, "e" * 64)):
        (given,) = desk.ask(volunteer)
        entries = desk.result(given, value=float(number))
        check_state(desk.core)
    assert [type(entry) for entry in entries] == [Returned] + [Rejected] * 5
    unit = desk.core.state.units[given.unit]
    assert unit.mark == "rejected" and not unit.live()


def test_without_a_plans_deadline_it_follows_the_times_of_units_and_doubles_when_one_expires() -> None:
    desk = Desk(subsets=30, deadline_s=None)
    (given,) = desk.ask(ALICE)
    assert given.deadline == desk.now + FIRST_DEADLINE_S
    desk.now += 10
    desk.result(given)
    (given,) = desk.ask(ALICE)
    assert given.deadline == desk.now + 4 * 10 + 30
    desk.now += 71
    desk.expire()
    (again,) = (one for one in desk.ask(ALICE, count=8) + desk.ask(ALICE, count=40) if one.unit == given.unit)
    assert again.deadline == desk.now + 2 * 70


def test_the_log_of_a_job_with_other_subsets_is_refused() -> None:
    big, small = Desk(subsets=40), Desk(subsets=1)
    entries = [entry for volunteer in (ALICE, BOB, CAROL) for entry in big.ask(volunteer, count=2)]
    with pytest.raises(ValueError, match="not in a job of 1 subsets"):
        small.commit(*entries)
    small.prove(ALICE)
    with pytest.raises(ValueError, match="not in a job of 40 subsets"):
        Desk(subsets=40).commit(*small.ask(ALICE))


def test_a_volunteer_that_keeps_returning_units_waits_ever_longer() -> None:
    """Else the log would grow with every request."""
    desk, given = Desk(), 0
    for _ in range(600):  # one second each
        units = desk.ask(ALICE, count=8)
        given += bool(units)
        desk.now += 0.5
        desk.give_back(ALICE)
        desk.now += 0.5
    assert given == state.FREE_RETURNS + 9  # rests of 2, 4 … 512 s
    assert 60 < desk.core.wait_s(ALICE, now=desk.now) < state.LONGEST_REST_S
    desk.now += state.LONGEST_REST_S
    desk.prove(ALICE)
    for _ in range(state.FREE_RETURNS):
        desk.now += 0.5
        desk.ask(ALICE)
        desk.give_back(ALICE)
    assert desk.ask(ALICE)


@pytest.mark.parametrize("good_between", [0, 1, 2, 3, 5, 20])
def test_more_than_every_fourth_bad_result_leads_to_a_ban_and_lost_units_do_not(good_between: int) -> None:
    bad, lost = state.VolunteerState(), state.VolunteerState()
    for _ in range(100):
        for _ in range(good_between):
            bad.on_accepted()
            lost.on_accepted()
        bad.on_rejected(0.0)
        lost.on_expired(0.0)
    assert (bad.bans > 0) == (good_between < 4) and lost.bans == 0
    assert lost.error_rate == bad.error_rate == pytest.approx(1 / (1 + good_between), abs=0.1)


@pytest.mark.parametrize("hostile", [1, pytest.param(2, marks=pytest.mark.ordeal)])
def test_who_returns_units_at_once_sets_no_deadline_and_gets_no_copies_of_the_others_units(
    hostile: int,
) -> None:
    """Honest units take eight minutes."""
    honest = {volunteer: list[tuple[float, Assigned]]() for volunteer in (ALICE, BOB)}
    desk = Desk(subsets=150, deadline_s=None, max_epochs=100)
    accepted, fired, expired = 0, 0, 0
    for turn in range(3600):
        desk.now += 2.0
        expired += len(desk.expire())
        for volunteer, units in honest.items():
            if len(units) < 2:
                units += [(desk.now + 500.0, given) for given in desk.ask(volunteer)]
            if units and units[0][0] <= desk.now:
                _, given = units.pop(0)
                if desk.refusal(given, volunteer) == ("", ""):
                    desk.assimilate(desk.result(given))
                    accepted += 1
        # it begins when the others have returned their first units
        if turn > 400:
            for number in range(hostile):
                for given in desk.ask(str(number) * 64):
                    fired += 1
                    desk.assimilate(desk.result(given))
    assert fired >= 100 and expired == 0
    # each has two at a time
    assert accepted >= 0.8 * 2 * 2 * 7200 / 500
