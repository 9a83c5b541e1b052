import math

import msgspec
import pytest

from colab_swarm.averaging import group as groups
from colab_swarm.averaging.formation import GroupFormation
from colab_swarm.averaging.group import equal_shares
from colab_swarm.averaging.strategy import adaptive_shares
from colab_swarm.net.peers import Contact, PeerId

ALICE, BOB, CAROL = (PeerId(bytes([i]) * 32) for i in (1, 2, 3))
TERMS = groups.RoundTerms("run", 7, b"lineage", 100, b"schema")
TICKET = groups.Ticket(TERMS, 10.0)
SETTINGS = groups.GroupFormationSettings(window_s=2, slack_s=1, max_window_s=30, call_timeout_s=3)


@pytest.fixture
def g() -> GroupFormation:
    return GroupFormation(TERMS, now=100.0, settings=SETTINGS)


def contact(peer: PeerId) -> Contact:
    return Contact(peer, ("ws://somewhere",))


def test_a_group_closes_when_all_accepted_peers_have_joined(g: GroupFormation) -> None:
    g.expect(BOB, due=101.0, until=103.0)
    assert g.closes_at() == 103.0
    g.on_coming(BOB, 5.0, now=101.0)
    assert g.closes_at() == 107.0
    assert g.on_join(TICKET, contact(BOB), now=101.0) is None
    assert g.closes_at() == -math.inf


def test_a_group_does_not_wait_for_declined_peers_and_gives_silent_ones_the_window(g: GroupFormation) -> None:
    g.expect(BOB, due=101.0, until=103.0)
    g.on_declined(BOB)
    g.expect(CAROL, due=102.0, until=102.0)
    assert g.closes_at() == 102.0


def test_a_quorum_gets_its_group_before_one_of_it_leaves_but_not_before_the_usual_time() -> None:
    for usual_s, patience_s, closes_at in ((0.5, 2.0, 103.0), (4.0, 2.0, 104.0), (math.inf, 2.0, 120.0)):
        g = GroupFormation(TERMS, now=100.0, settings=SETTINGS, usual_s=usual_s)
        g.candidates = [BOB, CAROL]
        g.expect(CAROL, due=101.0, until=120.0)
        g.on_join(TICKET, contact(ALICE), now=101.0)
        assert g.closes_at() == 120.0, "one of three is no quorum"
        g.on_join(TICKET, contact(BOB), patience_s=patience_s, now=101.0)
        assert g.closes_at() == closes_at
        g.on_gave_up(BOB, TICKET)
        assert g.closes_at() == 120.0


@pytest.mark.parametrize(
    ("ready_in_s", "closes_at"), [(1e9, 130.0), (math.inf, 130.0), (-5.0, 101.0), (math.nan, 101.0)]
)
def test_no_peer_is_waited_for_beyond_the_longest_window_and_an_invalid_time_counts_as_now(
    g: GroupFormation, ready_in_s: float, closes_at: float
) -> None:
    g.on_coming(BOB, ready_in_s, now=100.0)
    assert g.closes_at() == closes_at


def test_a_peer_that_joined_and_gave_up_is_no_member(g: GroupFormation) -> None:
    for peer in (ALICE, BOB):
        g.on_join(TICKET, contact(peer), now=101.0)
    g.on_gave_up(BOB, TICKET)
    assert [member.id for member in g.form(bytes(16), equal_shares).members] == [ALICE]


def test_a_peer_that_gave_up_and_joined_again_at_once_is_a_member(g: GroupFormation) -> None:
    again = msgspec.structs.replace(TICKET)
    for ticket in (TICKET, again):
        g.on_join(ticket, contact(ALICE), now=101.0)
    g.on_gave_up(ALICE, TICKET)  # the end of the first stream is noticed late
    assert [member.id for member in g.form(bytes(16), equal_shares).members] == [ALICE]


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf, 1e9, 1e-300])
def test_invalid_weights_are_refused(g: GroupFormation, weight: float) -> None:
    refusal = g.on_join(msgspec.structs.replace(TICKET, weight=weight), contact(ALICE), now=101.0)
    assert refusal is not None and refusal.reason == "invalid" and str(weight) in refusal.text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        *(({"lineage": b"other"}, "resync"), ({"step": 8}, "resync"), ({"numel": 99}, "invalid")),
        *(({"schema": b"other"}, "invalid"), ({"codec": "int8"}, "invalid")),
    ],
)
def test_a_ticket_of_another_run_is_refused(
    g: GroupFormation, change: dict[str, object], reason: str
) -> None:
    refusal = g.on_join(
        groups.Ticket(msgspec.structs.replace(TERMS, **change), 10.0), contact(ALICE), now=101.0
    )
    assert refusal is not None and refusal.reason == reason


def test_members_are_sorted_and_share_equally_unless_in_client_mode(g: GroupFormation) -> None:
    for peer, reduces in ((CAROL, True), (ALICE, True), (BOB, False)):
        g.on_join(msgspec.structs.replace(TICKET, reduces=reduces), contact(peer), now=101.0)
    group = g.form(bytes(16), equal_shares)
    assert [(member.id, member.share) for member in group.members] == [(ALICE, 1), (BOB, 0), (CAROL, 1)]


def test_a_client_alone_reduces_for_itself_but_two_clients_are_no_group(g: GroupFormation) -> None:
    ticket = msgspec.structs.replace(TICKET, reduces=False)
    g.on_join(ticket, contact(ALICE), now=101.0)
    assert g.form(bytes(16), equal_shares).members[0].share == 1.0
    g.on_join(ticket, contact(BOB), now=101.0)
    with pytest.raises(ValueError, match="not all 0"):
        g.form(bytes(16), equal_shares)


def test_an_assistant_reduces_for_several_trainers_but_not_for_one(g: GroupFormation) -> None:
    g.on_join(msgspec.structs.replace(TICKET, weight=0.0, assists=True), contact(CAROL), now=101.0)
    with pytest.raises(ValueError, match="no trainer has joined"):
        g.form(bytes(16), equal_shares)
    g.on_join(msgspec.structs.replace(TICKET, reduces=False), Contact(ALICE), now=101.0)
    assert [member.id for member in g.form(bytes(16), equal_shares).members] == [ALICE]
    g.on_join(msgspec.structs.replace(TICKET, reduces=False), Contact(BOB), now=101.0)
    assert [member.share for member in g.form(bytes(16), equal_shares).members] == [0, 0, 1]


def test_a_group_has_the_forecast_and_explanation_of_its_strategy(g: GroupFormation) -> None:
    for peer, rate_bps in ((ALICE, 1e6), (BOB, 1e6), (CAROL, 1e7)):
        ticket = msgspec.structs.replace(TICKET, upload_bps=rate_bps, download_bps=rate_bps)
        g.on_join(ticket, contact(peer), now=101.0)
    group = g.form(bytes(16), adaptive_shares)
    assert group.predicted_s is not None and "bottleneck" in group.explanation
    assert [member.share for member in group.members] == pytest.approx([0, 0, 1])
