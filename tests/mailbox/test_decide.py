"""What a peer decides from what it has read of a bucket: pure, without a socket."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.mailbox import decide as module
from colab_swarm.mailbox.bucket import StoredObject
from colab_swarm.mailbox.chain import RoundChain
from colab_swarm.mailbox.decide import Close, Follow, LoadState, Wait
from colab_swarm.mailbox.objects import MANIFEST
from colab_swarm.net.identity import Identity
from tests.mailbox.board import ALICE, BOB, CAROL, DAVE, NAMES, PACE_S, PATIENCE_S, Board, changed

GRACE_S = 6.0  # of short rounds
LATE_AT = PACE_S + GRACE_S / 2
DEADLINE = 2 * PACE_S + GRACE_S


@pytest.fixture
def board() -> Board:
    return Board()


def listed(action: object) -> list[str]:
    """Return the members that a new manifest lists."""
    assert isinstance(action, Close)
    return [NAMES[entry.member] for entry in sorted(action.entries, key=lambda entry: NAMES[entry.member])]


@pytest.mark.parametrize(
    ("present", "gone", "left_out", "due_at"),
    [
        ([ALICE, BOB, CAROL], [], [], 0.0),
        ([ALICE, BOB], [CAROL], [], 0.0),
        ([ALICE, DAVE], [BOB, CAROL], [], 0.0),
        ([ALICE, BOB], [], [CAROL], LATE_AT),
        ([ALICE, BOB], [], [], LATE_AT + PATIENCE_S),
        ([ALICE], [], [], DEADLINE),
    ],
)
def test_whom_a_round_waits_for(
    board: Board, present: list[Identity], gone: list[Identity], left_out: list[Identity], due_at: float
) -> None:
    chain = board.first
    for who in gone:
        board.leave(who, chain)
    for who in present:
        board.contribute(who, chain)
    late = {who.id for who in left_out}
    board.now = due_at - 0.1
    assert isinstance(board.decide(chain, left_out=late), Wait) is (due_at > 0.0)
    board.now = due_at
    assert listed(board.decide(chain, left_out=late)) == sorted(NAMES[who.id] for who in present)


def test_a_contribution_that_was_left_out_counts_in_the_next_two_rounds(board: Board) -> None:
    chain = board.first
    board.contribute(CAROL, chain)
    for counts in (True, True, False):
        chain = board.round(chain, ALICE, BOB)
        board.contribute(ALICE, chain)
        board.leave(BOB, chain)
        assert ("carol" in listed(board.decide(chain))) is counts
        board.delete(board.seen.contributions[board.places[-2]])


LIES: dict[str, tuple[str, Any]] = {
    "twice": ("it lists a member twice", lambda entries: (*entries, entries[-1])),
    "unknown": ("cannot be read", lambda entries: (changed(entries[0], digest=b"x" * 32), *entries[1:])),
    "heavier": ("not those of", lambda entries: (changed(entries[0], weight=9.0), *entries[1:])),
    "renamed": ("not those of", lambda entries: (*entries[:-1], changed(entries[-1], member=b"\xff" * 32))),
    "old": ("too old", lambda entries: (changed(entries[0], round=7), *entries[1:])),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_unsound_manifest_is_skipped_by_the_next_number_after_a_grace(board: Board, lie: str) -> None:
    chain = board.first
    contributions = [board.contribute(who, chain) for who in (ALICE, BOB, CAROL)]
    entries = sorted((each.entry for each in contributions), key=lambda entry: entry.member)
    fault, change = LIES[lie]
    place = board.close(chain, *change(entries))
    assert board.standing(chain) is None
    board.now = GRACE_S - 0.1
    assert isinstance(board.decide(chain), Wait)
    board.now = GRACE_S
    action = board.decide(chain)
    assert isinstance(action, Close) and fault in action.faults[place]
    second = board.close(chain, *action.entries, number=1)
    closed = board.standing(chain)
    assert closed is not None and closed.place == second


def test_beside_contributions_of_zeros_none_is_absurdly_long(board: Board) -> None:
    for who, value in ((ALICE, 0.0), (BOB, 0.0), (CAROL, 1.0)):
        board.contribute(who, board.first, value=value)
    assert listed(board.decide(board.first)) == ["alice", "bob", "carol"]


def test_of_two_sound_manifests_the_first_stands_unless_more_members_built_on_the_second(
    board: Board,
) -> None:
    """A synced folder may show the two of them to all, and each of them first to some."""
    chain = board.first
    contributions = [board.contribute(who, chain) for who in (ALICE, BOB, CAROL)]
    first = board.close(chain, *[each.entry for each in contributions])
    second = board.close(chain, *[each.entry for each in contributions[1:]], number=1)
    closed = board.standing(chain)
    assert closed is not None and closed.place == first
    manifest, digest = board.seen.manifests[second]
    other = chain.after(manifest, digest, closed_at=0.0)
    board.now = PACE_S
    board.contribute(BOB, other)
    board.contribute(CAROL, other)
    action = board.decide(chain)
    assert isinstance(action, Follow) and action.closed.place == second
    # alice has followed the first one, and contributed
    board.contribute(ALICE, closed.after)
    assert isinstance(board.decide(closed.after), Wait)
    board.now += GRACE_S
    assert board.decide(closed.after) == LoadState()
    assert not isinstance(board.decide(closed.after, may_leave=False), LoadState)
    assert not isinstance(board.decide(other, BOB), LoadState), "bob is with the majority"


@pytest.mark.parametrize(("mine", "theirs", "leaves"), [(3, 5, True), (5, 3, False)])
def test_of_two_branches_with_as_many_members_the_one_that_is_further_stands(
    board: Board, mine: int, theirs: int, leaves: bool
) -> None:
    """A laptop trained alone on a journey, and its folder is synced again."""
    chains = {ALICE: board.first, BOB: board.first}
    branch = dict(board.first.folders)
    for round in range(5):
        board.now += PACE_S
        for number, (who, rounds) in enumerate(((ALICE, mine), (BOB, theirs))):
            if round < rounds:
                chains[who] = board.round(chains[who], who, number=number)
                if who is ALICE:
                    branch |= chains[ALICE].folders
    board.now += GRACE_S
    action = board.decide(chains[ALICE], branch=branch)
    assert isinstance(action, LoadState) is leaves


def test_a_peer_that_slept_leaves_its_round_though_its_clock_is_behind(board: Board) -> None:
    chain = board.round(board.first, ALICE, BOB, CAROL)
    board.contribute(ALICE, chain)
    later = RoundChain(40, {40: b"x" * 32}, 1000.0, PACE_S, (BOB.id, CAROL.id))
    board.now = 1000.0
    board.round(later, BOB)
    board.now = 1020.0
    board.contribute(CAROL, later)
    board.now = 1.0
    assert board.decide(chain) == LoadState()


steps = st.tuples(
    st.sampled_from(["contribute", "contribute", "close", "close", "leave", "garbage", "look"]),
    st.sampled_from([ALICE, BOB, CAROL]),
    st.sampled_from([0.0, 1.0, PACE_S, GRACE_S, 200.0]),
    st.sampled_from(["", "", *LIES]),
)


@pytest.mark.slow
@given(st.lists(steps, max_size=40))
def test_in_any_history_a_peer_decides_and_no_contribution_counts_twice(history: list[Any]) -> None:
    board = Board()
    chain = board.first
    written: set[str] = set()
    counted: list[tuple[bytes, int]] = []
    for what, who, wait_s, lie in history:
        board.now += wait_s
        path = f"{chain.folder}/{who.id.hex()}"
        action = board.decide(chain)
        if isinstance(action, Follow):
            entries = action.closed.manifest.entries
            counted += [(entry.member, entry.round) for entry in entries]
            chain = action.closed.after
            board.seen.forget(chain)
        elif what == "contribute" and path not in written:
            written.add(path)
            board.contribute(who, chain)
        elif what == "leave":
            board.leave(who, chain)
        elif what == "garbage" and path not in written:
            written.add(path)
            board.garbage(path)
        elif what == "close" and isinstance(action, Close) and action.path not in written:
            written.add(action.path)
            entries = sorted(action.entries, key=lambda entry: entry.member)
            if lie:
                entries = LIES[lie][1](entries)
            board.close(chain, *entries, number=int(action.path[-2:]))
        else:
            assert not isinstance(action, Wait) or action.pause_s <= module.MOST_PAUSE_S
    assert len(counted) == len(set(counted))


def test_the_listing_names_what_is_there_and_nothing_else(board: Board) -> None:
    folder = board.first.folder
    paths = [f"{folder}/{ALICE.id.hex()}", f"{folder}/{MANIFEST}100", f"{folder}/{MANIFEST}99", "rounds/x"]
    paths += [f"{folder}/{ALICE.id.hex()} (conflicted copy)", f"{folder}/{BOB.id.hex()}-left"]
    listing = module.RoundListing.of(StoredObject(path, 1, 0.0) for path in paths)
    assert [place.path for place in listing.manifests[folder]] == paths[2:0:-1]
    assert listing.next_manifest(folder) == f"{folder}/{MANIFEST}101"
    assert list(listing.farewells) == paths[-1:] and listing.at(paths[0]) and listing.latest == 0
