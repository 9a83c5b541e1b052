"""What a peer decides by one look at a bucket, and which manifests stand: pure."""

import random
import sys
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.mailbox import branches, view
from colab_swarm.mailbox.bucket import StoredObject
from colab_swarm.mailbox.contributions import ClosedRound, ReadContribution
from colab_swarm.mailbox.rounds import LEAST_GRACE_S, ManifestEntry, RoundChain
from colab_swarm.net.identity import Identity
from tests.mailbox.board import (
    ALICE,
    BOB,
    CAROL,
    MALLORY,
    MEMBERS,
    MISSING_S,
    PACE_S,
    PATIENCE_S,
    Board,
    Peer,
    contribution_of,
    lying,
)


def unknown(entries: tuple[ManifestEntry, ...]) -> tuple[ManifestEntry, ...]:
    """List a contribution that nobody has."""
    return msgspec.structs.replace(entries[0], digest=b"x" * 32), *entries[1:]


@pytest.fixture
def board() -> Board:
    return Board()


@pytest.fixture
def alice(board: Board) -> Peer:
    """She has followed a round of all three."""
    peer = Peer(board)
    peer.follow(board.round(board.first, *MEMBERS))
    return peer


def test_a_round_is_closed_with_all_that_can_be_read(board: Board, alice: Peer) -> None:
    board.now = 10.0
    for who in MEMBERS:
        board.contribute(who, alice.chain, fault="garbage" if who is BOB else "")
    due_at = alice.chain.late_at + PATIENCE_S
    assert alice.decide(due_at) == alice.decide(due_at)
    action = alice.decide(due_at)
    assert isinstance(action, view.Close)
    assert {entry.member for entry in action.entries} == {ALICE.id, CAROL.id}
    assert (action.path, action.again_at) == (f"{alice.chain.folder}/manifest-00", due_at + MISSING_S)
    assert isinstance(alice.decide(due_at - 1), view.Wait)


def test_no_round_waits_for_a_member_with_a_farewell(board: Board, alice: Peer) -> None:
    for who in (ALICE, BOB):
        board.contribute(who, alice.chain)
    assert isinstance(alice.decide(1.0), view.Wait)
    board.leave(CAROL, alice.chain)
    assert isinstance(alice.decide(1.0), view.Close)


def test_the_pause_is_half_the_time_to_the_likely_end(board: Board, alice: Peer) -> None:
    assert alice.decide(2.0) == view.Wait((PACE_S - 2.0) / 2)
    assert alice.decide(PACE_S) == view.Wait(view.LEAST_PAUSE_S)
    assert alice.decide(1e6) == view.Wait(view.MOST_PAUSE_S)


def test_a_wait_beyond_the_usual_time_names_the_late_members(board: Board, alice: Peer) -> None:
    late_s = LEAST_GRACE_S / 2
    late_at = PACE_S + late_s
    assert alice.decide(late_at) == view.Wait(late_s / 2), "this peer has nothing to close with"
    board.contribute(ALICE, alice.chain)
    early = alice.decide(late_at - 0.1)
    assert isinstance(early, view.Wait) and not early.late_members
    most_s = PACE_S + LEAST_GRACE_S - late_s
    assert alice.decide(late_at) == view.Wait(late_s / 2, frozenset({BOB.id, CAROL.id}), most_s)
    board.contribute(BOB, alice.chain)
    late = alice.decide(late_at)
    assert isinstance(late, view.Wait) and late.late_members == {CAROL.id}
    assert late.most_s == PATIENCE_S


def test_a_manifest_is_followed_with_its_contributions(board: Board, alice: Peer) -> None:
    board.now = alice.chain.late_at
    closed = board.round(alice.chain, ALICE, BOB)
    board.round(closed.after, ALICE, BOB)
    alice.read.clear()
    action = alice.decide(board.now)
    assert isinstance(action, view.Follow) and action.closed.place == closed.place
    assert len(action.closed.contributions) == 2
    assert {place.folder for place in alice.read} == {alice.chain.folder}, "later rounds are read later"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lying, "not those of the contributions"),
        (lambda entries: entries[:1], "leaves out"),
        (lambda entries: (*entries, entries[-1]), "twice"),
    ],
)
def test_another_manifest_closes_the_round_at_once_if_the_first_one_lies(
    board: Board,
    alice: Peer,
    change: Callable[[tuple[ManifestEntry, ...]], tuple[ManifestEntry, ...]],
    fault: str,
) -> None:
    contributions = [board.contribute(who, alice.chain) for who in MEMBERS]
    lie = board.close(alice.chain, contributions, change=change)
    action = alice.decide(1.0)
    assert isinstance(action, view.Close) and action.path.endswith("manifest-01")
    assert fault in alice.readings.faults[lie.place]
    stands = board.close(alice.chain, contributions, 1)
    action = alice.decide(1.0)
    assert isinstance(action, view.Follow) and action.closed.place == stands.place


def test_a_manifest_that_cannot_be_followed_is_replaced_after_a_while(board: Board, alice: Peer) -> None:
    board.now = 20.0
    contributions = [board.contribute(who, alice.chain) for who in MEMBERS]
    board.close(alice.chain, contributions, change=unknown)
    assert isinstance(alice.decide(20.0 + MISSING_S - 1), view.Wait)
    assert isinstance(alice.decide(20.0 + MISSING_S), view.Close)
    board.now = 20.0 + MISSING_S
    second = board.close(alice.chain, contributions, 1)
    action = alice.decide(board.now)
    assert isinstance(action, view.Follow) and action.closed.place == second.place
    board.round(second.after, *MEMBERS)
    assert isinstance(alice.decide(1e6), view.Follow)


def test_a_manifest_that_others_follow_is_never_replaced(board: Board, alice: Peer) -> None:
    contributions = [board.contribute(who, alice.chain) for who in MEMBERS]
    first = board.close(alice.chain, contributions, change=unknown)
    board.round(first.after, *MEMBERS)
    assert alice.decide(1e6) == view.Wait(view.MOST_PAUSE_S)
    assert alice.decide(1e6, later_state=True) == view.LoadState()


def test_who_contributed_before_another_manifest_has_not_followed_it(board: Board, alice: Peer) -> None:
    board.now = alice.chain.deadline
    contributions = [board.contribute(who, alice.chain) for who in MEMBERS]
    ghost = board.close(alice.chain, contributions[:1], change=unknown)
    board.now = ghost.after.deadline
    board.close(ghost.after, contributions[1:])
    assert isinstance(alice.decide(1e6), view.Close)


def test_of_two_manifests_the_first_stands_unless_the_next_round_was_built_on_the_other(
    board: Board, alice: Peer
) -> None:
    board.now = alice.chain.late_at
    contributions = [board.contribute(who, alice.chain) for who in MEMBERS]
    first = board.close(alice.chain, contributions)
    board.now += MISSING_S
    second = board.close(alice.chain, contributions[:2], 1)
    action = alice.decide(100.0)
    assert isinstance(action, view.Follow) and action.closed.place == first.place
    board.round(second.after, *contributed(second))
    action = alice.decide(100.0)
    assert isinstance(action, view.Follow) and action.closed.place == second.place
    board.now = first.after.deadline
    board.round(first.after, CAROL)
    action = alice.decide(100.0)
    assert isinstance(action, view.Follow) and action.closed.place == second.place, "most members built on it"
    alice.follow(first)
    assert alice.decide(100.0) == view.LoadState()
    alice.follow(second)
    assert isinstance(alice.decide(100.0), view.Follow)


def test_a_peer_without_most_members_follows_the_later_manifest(board: Board, alice: Peer) -> None:
    board.now = alice.chain.late_at
    contributions = [board.contribute(who, alice.chain) for who in MEMBERS]
    first = board.close(alice.chain, contributions)
    board.now += MISSING_S
    board.close(alice.chain, contributions[:2], 1)
    alice.follow(first)
    board.contribute(ALICE, first.after)
    deadline = first.after.deadline
    assert isinstance(alice.decide(deadline - 1), view.Wait)
    assert alice.decide(deadline) == view.LoadState()
    assert "later manifest" in alice.readings.faults[first.place]
    assert alice.decide(deadline) == view.LoadState()
    alice.readings.faults.clear()
    board.contribute(BOB, first.after)
    assert isinstance(alice.decide(deadline), view.Close)


def test_a_manifest_that_leaves_a_member_out_stands_if_the_next_round_was_built_on_it(board: Board) -> None:
    """Whenever a peer looked: alice saw it before anybody built on it, bob comes later."""
    alice = Peer(board)
    contributions = [board.contribute(who, alice.chain) for who in (ALICE, BOB)]
    board.now = PACE_S
    closed = board.close(alice.chain, contributions[1:], author=BOB)
    action = alice.decide(board.now)
    assert isinstance(action, view.Close) and "leaves out" in alice.readings.passed_over[closed.place]
    board.now += 200.0
    board.round(closed.after, BOB)
    bob = Peer(board)
    assert [each.place for each in alice.catch_up()][:1] == [closed.place]
    assert bob.catch_up() and bob.last == alice.last


def test_who_passed_a_manifest_over_and_followed_another_one_does_not_go_back(
    board: Board, alice: Peer
) -> None:
    """Two of three build on it first."""
    chain = alice.chain
    contributions = [board.contribute(who, chain) for who in MEMBERS]
    board.now = chain.late_at + chain.settled_s
    unfair = board.close(chain, contributions[1:], author=BOB)
    assert isinstance(alice.decide(board.now), view.Close)
    alice.follow(board.close(chain, contributions, 1))
    board.now = unfair.after.late_at
    board.round(unfair.after, BOB, CAROL)
    assert unfair.place in alice.readings.passed_over, "the attack fired"
    assert isinstance(alice.decide(board.now), view.Wait)


def test_an_own_contribution_that_was_overwritten_is_spoilt(board: Board, alice: Peer) -> None:
    board.contribute(ALICE, alice.chain, fault="it is another member's")
    (own,) = (place for place in board.objects if place.folder == alice.chain.folder)
    look = view.RoundView(alice.chain, alice.look(), alice.last, own)
    assert isinstance(alice.answer(lambda: look.next_action(1.0)), view.Wait)
    assert own in alice.readings.faults and not look.open_places


def test_an_author_has_two_candidates_at_most(board: Board) -> None:
    peer = Peer(board)
    contributions = [board.contribute(ALICE, peer.chain)]
    # the last path is the oldest one
    places = []
    for attempt, at in enumerate([4.0, 3.0, 2.0, 1.0, 0.0]):
        board.now = at
        places.append(board.close(peer.chain, contributions, attempt).place)

    def candidates() -> list[StoredObject]:
        return [candidate.place for candidate in look.candidates(peer.chain)]

    look = peer.look()
    assert peer.answer(candidates) == [places[4], places[3]]
    # a faulty one is none, and its author has no more for it
    peer.readings.faults[places[4]] = "it lies"
    look = peer.look()
    assert peer.answer(candidates) == [places[3]]
    assert look.listing.next_attempt(peer.chain.folder) == f"{peer.chain.folder}/manifest-05"


def many_in_a_round(board: Board, chain: RoundChain, count: int) -> list[ReadContribution]:
    """Mallory's contributions, in as many places."""
    contributions = []
    for number in range(count):
        contribution = contribution_of(MALLORY, chain, samples=1.0 + number)
        board.write(f"{chain.folder}/{MALLORY.id.hex()}-{number:08x}", contribution)
        contributions.append(contribution)
    return contributions


def copies(board: Board, chain: RoundChain, count: int) -> list[ReadContribution]:
    """Mallory's contributions, each of them in ten places."""
    contributions = many_in_a_round(board, chain, count)
    for number in range(10 * count):
        place = f"{chain.folder}/{MALLORY.id.hex()}-{count + number:08x}"
        board.write(place, contributions[number % count])
    return contributions


def some_in_each_round(board: Board, chain: RoundChain, count: int) -> list[ReadContribution]:
    """Mallory's contributions to all rounds that are open."""
    for round, base in chain.digests.items():
        earlier = msgspec.structs.replace(chain, round=round, digests={round: base})
        many_in_a_round(board, earlier, count)
    return many_in_a_round(board, chain, count)


@pytest.mark.parametrize("write", [many_in_a_round, copies, some_in_each_round])
@pytest.mark.parametrize("listed", [0, 7, 19])
def test_of_an_author_with_many_contributions_one_is_held_and_any_may_count(
    board: Board, alice: Peer, write: Callable[[Board, RoundChain, int], list[ReadContribution]], listed: int
) -> None:
    chain = alice.chain
    extra = write(board, chain, 20)
    contributions = [board.contribute(who, chain) for who in MEMBERS]
    assert isinstance(alice.decide(1.0), view.Close)
    assert len(alice.readings.offers) >= len(MEMBERS) + len(extra), "the attack fired"
    assert len(alice.readings.contributions) == len(MEMBERS) + 1
    closed = board.close(chain, [*contributions, extra[listed]])
    action = alice.decide(1.0)
    assert isinstance(action, view.Follow) and action.closed.place == closed.place
    assert action.closed.contributions[extra[listed].digest] == extra[listed]
    assert len(alice.readings.contributions) == len(MEMBERS) + 1
    alice.follow(action.closed)
    assert not set(alice.readings.contributions).intersection(who.id for who in MEMBERS)


def contributed(closed: ClosedRound) -> list[Identity]:
    """Return the members that a round lists."""
    listed = {entry.member for entry in closed.manifest.entries}
    return [who for who in MEMBERS if who.id in listed]


def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rounds of all chains that are looked up from now on."""
    rounds: list[int] = []

    def base(chain: RoundChain) -> bytes:
        rounds.append(chain.round)
        return chain.digests[chain.round]

    monkeypatch.setattr(RoundChain, "base", property(base))
    return rounds


@pytest.mark.slow
@pytest.mark.parametrize("stands", [0, 1])
def test_a_long_chain_of_forks_is_followed_by_a_loop(
    board: Board, monkeypatch: pytest.MonkeyPatch, stands: int
) -> None:
    """Each round has two manifests, one of them a dead end."""
    rounds = 2 * sys.getrecursionlimit()
    chain = board.first
    for _ in range(rounds):
        contributions = [board.contribute(ALICE, chain)]
        ends = [board.close(chain, contributions, 0)]
        board.now += MISSING_S
        ends.append(board.close(chain, contributions, 1))
        chain = ends[stands].after
    work = looked_up(monkeypatch)
    peer = Peer(board)
    followed = peer.catch_up()
    assert [closed.after.round for closed in followed] == list(range(1, rounds + 1))
    assert all(closed.place.path.endswith(f"-{stands:02d}") for closed in followed[:-1])
    # the values of the round after this one were read before it was settled, and then those of this one again
    assert len(set(peer.read)) == 3 * rounds and len(peer.read) <= 4 * rounds
    assert len(work) < 40 * rounds


@pytest.mark.slow
def test_thousands_of_manifests_that_lie_are_passed_over_by_a_loop(
    board: Board, alice: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lies = 2 * sys.getrecursionlimit()
    contributions = [board.contribute(who, alice.chain) for who in MEMBERS]
    for attempt in range(lies):
        board.close(alice.chain, contributions, attempt, change=lying, author=CAROL)
    board.now = 1.0
    stands = board.close(alice.chain, contributions, lies)
    work = looked_up(monkeypatch)
    action = alice.decide(1.0)
    assert isinstance(action, view.Follow) and action.closed.place == stands.place
    assert len(alice.readings.faults) == branches.CANDIDATES and len(work) < 30 * lies


Event = Callable[[Board, list[RoundChain]], None]
CHANGES = {
    "whole": tuple,
    "lying": lying,
    "unknown": unknown,
    "twice": lambda entries: (*entries, entries[-1]),
}


@st.composite
def events(draw: st.DrawFn, *, farewells: bool = True) -> Event:
    """What a member writes: honest or not, to a chain that it knows, some time after the event before."""
    kinds = ["contribute", "contribute", "close", "close", "leave"][: 5 if farewells else 4]
    kind = draw(st.sampled_from(kinds))
    who = draw(st.sampled_from(MEMBERS))
    age = draw(st.integers(0, 3))
    wait_s = draw(st.sampled_from([0.0, 1.0, PACE_S, MISSING_S, 200.0]))
    fault = draw(st.sampled_from(["", "", "", "garbage"]))
    change = draw(st.sampled_from(["whole", "whole", *CHANGES]))
    left_out = draw(st.sets(st.sampled_from(MEMBERS), max_size=2))
    attempt = draw(st.integers(0, 9))
    author = draw(st.sampled_from(MEMBERS))

    def write(board: Board, chains: list[RoundChain]) -> None:
        board.now += wait_s
        chain = chains[-1 - age % len(chains)]
        if kind == "contribute":
            board.contribute(who, chain, samples=1.0 + attempt, fault=fault)
        elif kind == "leave":
            board.leave(who, chain, fault=fault)
        else:
            contributions = board.open_contributions(chain, left_out)
            if contributions:
                closed = board.close(
                    chain, contributions, attempt, change=CHANGES[change], fault=fault, author=author
                )
                chains.append(closed.after)

    return write


@pytest.mark.slow
@given(st.lists(events(), max_size=40), st.sampled_from([0.0, 30.0, 1e5]))
def test_in_any_order_of_objects_a_peer_decides_and_no_contribution_counts_twice(
    history: list[Event], ahead_s: float
) -> None:
    board = Board()
    chains = [board.first]
    alice = Peer(board)
    followed: list[ClosedRound] = []
    for event in history:
        event(board, chains)
        alice.read.clear()
        action = alice.decide(board.now + ahead_s)
        assert max(Counter(alice.read).values(), default=0) <= 2, "a second time for the mean alone"
        if isinstance(action, view.Follow):
            alice.follow(action.closed)
            followed.append(action.closed)
        elif isinstance(action, view.LoadState):
            alice.chain = board.first
            followed = alice.catch_up()
        elif isinstance(action, view.Close):
            chains.append(board.write_manifest(action.path, alice.chain, action.entries).after)
        else:
            assert isinstance(action, view.Wait)
            assert view.LEAST_PAUSE_S <= action.pause_s <= view.MOST_PAUSE_S
        counted = [(entry.member, entry.round) for one in followed for entry in one.manifest.entries]
        assert len(counted) == len(set(counted))


@pytest.mark.slow
@given(st.lists(events(farewells=False), max_size=40), st.randoms())
def test_peers_that_see_the_same_objects_follow_the_same_manifests(
    history: list[Event], rng: random.Random
) -> None:
    """Whenever they looked before. Farewells aside: a manifest may be unsound to a peer that saw it before them."""
    board = Board()
    chains = [board.first]
    alice = Peer(board)
    for event in history:
        event(board, chains)
        if rng.random() < 0.5:
            alice.chain = rng.choice(chains)
            alice.last = None
            alice.decide(board.now + rng.choice([0.0, 1e5]))
    alice.chain = board.first
    bob = Peer(board)
    assert alice.catch_up() == bob.catch_up()
