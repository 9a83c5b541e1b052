"""A search by itself: whatever organizers answer, it ends, asks no peer that it passes over, and goes up the rank."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colab_swarm.averaging.group import (
    Group,
    GroupMember,
    Joined,
    JoinEta,
    RoundRefused,
    RoundTerms,
    Ticket,
    rank,
)
from colab_swarm.averaging.memory import SwarmView
from colab_swarm.averaging.search import PASSED_S, Pause, Question, Search
from colab_swarm.errors import PeerLost
from colab_swarm.net.peers import PeerId
from tests.averaging.cores import PEERS, SETTINGS, TERMS, Book, memory_of

RANKED = rank("run", 7, PEERS)
ALICE = RANKED[2]  # two organize before her, two after
TICKET = Ticket(TERMS, 10.0)
BEGAN = 1000.0


class Owner(SwarmView):
    """It expects that a peer comes within two seconds, and never comes itself."""

    async def expected(self, step: int, lineage: bytes) -> list[PeerId]:
        return []

    def on_called(self, terms: RoundTerms, caller: PeerId) -> float | None:
        return None

    def believed_s(self, peer: PeerId) -> float:
        return 2.0


def search_of(me: PeerId = ALICE, *, clients: tuple[PeerId, ...] = ()) -> Search:
    """A search for the group of step 7 that has just begun; all peers are candidates."""
    search = Search(Book(me, clients), Owner(), memory_of(me), SETTINGS, TERMS.key)
    search.begin(TICKET, PEERS, PEERS, BEGAN)
    return search


def group_of(*members: PeerId) -> Group:
    entries = tuple(GroupMember(peer, (), 10.0, 1.0) for peer in sorted(members))
    return Group(bytes(16), TERMS, entries)


def question_of(search: Search, now: float = BEGAN) -> Question:
    question = search.next_ask(now)
    assert isinstance(question, Question)
    return question


ANSWERS = {
    "all": Joined(group_of(*PEERS)),
    "alone": Joined(group_of(ALICE)),
    "without her": Joined(group_of(*(peer for peer in PEERS if peer != ALICE))),
    "invalid": Joined(Group(b"short", TERMS, ())),
    "late": Joined(reason="late"),
    "resync": Joined(reason="resync"),
    "unreachable": Joined(reason="unreachable"),
    "nothing": Joined(),
    **{f"redirect to {number}": Joined(organizer=Book(peer).contact) for number, peer in enumerate(RANKED)},
}
outcomes = st.tuples(st.sampled_from([*ANSWERS, "timeout", "failed"]), st.floats(0.0, 5.0), st.booleans())


@given(st.lists(outcomes, min_size=1, max_size=12))
@settings(max_examples=500, deadline=None)
def test_a_search_ends_and_neither_asks_a_passed_over_peer_nor_goes_in_circles(
    script: list[tuple[str, float, bool]],
) -> None:
    search = search_of()
    now = BEGAN
    asked: list[PeerId] = []
    passed: dict[PeerId, float] = {}
    for turn in range(10_000):
        what, took_s, promises = script[turn % len(script)]
        try:
            question = search.next_ask(now)
            if isinstance(question, Pause):
                now += question.seconds
                asked.clear()
                continue
            organizer = question.organizer
            assert now >= passed.get(organizer, now)
            if question.contact is not None:
                assert RANKED.index(organizer) < RANKED.index(asked[-1])
            asked.append(organizer)
            assert len(asked) <= len(PEERS) * (len(PEERS) + 1) / 2, "each redirect leads up"
            if promises:
                search.on_eta(organizer, TERMS.key, JoinEta(0.0))
            now += took_s
            if what == "timeout" and organizer != ALICE:
                search.on_timeout(now)
            elif what == "failed" and organizer != ALICE:
                search.on_failed(PeerLost("gone"), now)
            elif search.on_answer(ANSWERS.get(what, Joined()), now) is not None:
                assert what == "all" or (what == "alone" and organizer == ALICE)
                return
            if what == "timeout" and organizer != ALICE:
                passed[organizer] = now + PASSED_S
        except RoundRefused:
            return
        if now > BEGAN + 180.0:
            # The deadline of `Matchmaker.join`: only timeouts, and what it answers itself.
            return
    raise AssertionError("it searches for ever")


def test_candidates_are_asked_in_their_rank_and_the_peer_itself_where_it_stands() -> None:
    search = search_of()
    asked = []
    for _ in PEERS:
        question = question_of(search)
        asked.append(question.organizer)
        search.on_answer(Joined(), BEGAN)
    assert asked == RANKED
    assert isinstance(search.next_ask(BEGAN), Pause)


def test_a_client_organizes_last_and_only_once_no_peer_has_answered_for_the_window() -> None:
    others = [peer for peer in RANKED if peer != ALICE]
    for after_s, order in ((0.0, others), (2.1, [*others, ALICE])):
        search = search_of(clients=(ALICE,))
        asked = []
        now = BEGAN + after_s
        while not isinstance(question := search.next_ask(now), Pause):
            asked.append(question.organizer)
            search.on_failed(PeerLost("gone"), now)
        assert asked == order


def test_an_organizer_that_was_silent_is_asked_again_after_its_time() -> None:
    search = search_of()
    first = question_of(search)
    search.on_timeout(BEGAN + 3.0)
    for after_s, usable in ((3.0, False), (2.9 + PASSED_S, False), (3.1 + PASSED_S, True)):
        assert search.candidates.is_usable(first.organizer, BEGAN + after_s) is usable


def test_a_silence_in_which_this_peer_slept_itself_costs_the_organizer_nothing() -> None:
    for beyond_s, costs in ((0.5, True), (60.0, False)):
        memory = memory_of(ALICE)
        search = Search(Book(ALICE), Owner(), memory, SETTINGS, TERMS.key)
        search.begin(TICKET, PEERS, PEERS, BEGAN)
        question = question_of(search)
        full_s = memory.standing.credit_s(question.organizer)
        search.on_timeout(BEGAN + question.limit_s + beyond_s)
        assert (memory.standing.credit_s(question.organizer) < full_s) is costs


def test_an_answer_before_which_this_peer_slept_does_not_say_what_is_usual() -> None:
    for took_s, learns in ((1.0, True), (60.0, False)):
        memory = memory_of(ALICE)
        search = Search(Book(ALICE), Owner(), memory, SETTINGS, TERMS.key)
        search.begin(TICKET, PEERS, PEERS, BEGAN)
        question_of(search)
        search.on_answer(ANSWERS["all"], BEGAN + took_s)
        assert (memory.forming.seconds < math.inf) is learns


def test_a_group_counts_by_the_candidates_that_are_in_it_and_not_by_strangers() -> None:
    bob, carol, dave, erin = (peer for peer in PEERS if peer != ALICE)
    strangers = [PeerId(bytes([number]) * 32) for number in range(10, 20)]
    # The records of bob and carol are late: by these only dave and erin are at the step.
    for members, awaited, stands in (
        ([bob, carol], [dave, erin], True),
        ([bob, carol], PEERS, True),
        ([bob], [dave, erin], False),
        (strangers, PEERS, False),
    ):
        search = search_of()
        search.begin(TICKET, PEERS, awaited, BEGAN)
        question_of(search)
        joined = Joined(group_of(ALICE, *members))
        if stands:
            assert search.on_answer(joined, BEGAN) == joined.group
            continue
        with pytest.raises(RoundRefused, match="are not in the group"):
            search.on_answer(joined, BEGAN)


def test_a_peer_passes_no_group_on_that_it_has_refused() -> None:
    for name in ("alone", "without her"):
        memory = memory_of(ALICE)
        search = Search(Book(ALICE), Owner(), memory, SETTINGS, TERMS.key)
        search.begin(TICKET, PEERS, PEERS, BEGAN)
        question_of(search)
        joined = ANSWERS[name]
        assert joined.group is not None
        memory.keep(joined.group, BEGAN)
        with pytest.raises(RoundRefused):
            search.on_answer(joined, BEGAN)
        assert memory.group_of(*TERMS.key, BEGAN) is None


@pytest.mark.parametrize("reason", ["late", "resync", "invalid"])
def test_an_organizer_that_refuses_is_passed_over_the_second_time(reason: str) -> None:
    search = search_of()
    for attempt, usable in enumerate((True, False)):
        now = BEGAN + attempt
        search.begin(TICKET, PEERS, PEERS, now)
        question = question_of(search, now)
        with pytest.raises(RoundRefused):
            search.on_answer(Joined(reason=reason), now)
        assert search.candidates.is_usable(question.organizer, now) is usable


def test_a_heartbeat_puts_off_the_end_of_the_patience_and_a_caller_brings_it_forward() -> None:
    search = search_of()
    question = question_of(search)
    bob, *_ = (peer for peer in PEERS if peer not in (ALICE, question.organizer))
    assert question.expect_heartbeat(0.0, (), BEGAN) == BEGAN + 1.0 + question.patience_s
    assert search.on_called(question.organizer, 0.0, BEGAN) == 0.0, "this peer waits for the caller itself"
    assert search.on_called(bob, 0.0, BEGAN) == 1.0 == question.silent_at - BEGAN
    question.silent_at = None
    assert search.on_called(bob, 0.25, BEGAN) == 0.25, "no heartbeat is due"
    assert question.expect_heartbeat(0.0, {bob}, BEGAN) == BEGAN + 1.0
