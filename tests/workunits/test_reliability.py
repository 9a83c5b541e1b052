"""Who is trusted, who is banned."""

from __future__ import annotations

import pytest

from colab_swarm.workunits.state import FIRST_BAN_S, LONGEST_BAN_S, Reliability


def test_a_volunteer_is_proven_by_its_first_result_and_not_any_more_when_units_get_lost() -> None:
    standing = Reliability()
    assert not standing.proven
    standing.on_accepted()
    assert standing.proven
    for _ in range(4):  # at once, when a notebook is killed
        standing.on_expired()
    assert standing.proven
    for _ in range(4):
        standing.on_expired()
    assert not standing.proven
    for _ in range(3):
        standing.on_accepted()
    assert standing.proven


def test_losing_every_third_unit_is_no_reason_to_ban() -> None:
    standing = Reliability()
    for _ in range(100):
        standing.on_accepted()
        standing.on_accepted()
        standing.on_expired()
    assert standing.bans == 0
    assert standing.reliability == pytest.approx(2 / 3, abs=0.06)


@pytest.mark.parametrize(
    ("good_between", "banned"), [(0, True), (1, True), (3, True), (5, False), (20, False)]
)
def test_more_than_every_fourth_bad_result_leads_to_a_ban(good_between: int, banned: bool) -> None:
    standing = Reliability()
    for _ in range(50):
        for _ in range(good_between):
            standing.on_accepted()
        standing.on_rejected(0.0)
    assert (standing.bans > 0) == banned


def test_bans_start_with_the_third_bad_result_and_double_up_to_a_day() -> None:
    standing, lengths = Reliability(), []
    for _ in range(14):
        standing.on_rejected(1000.0)
        lengths.append(standing.banned_until - 1000.0)
    assert lengths[1] < 0
    assert lengths[2:5] == [FIRST_BAN_S, 2 * FIRST_BAN_S, 4 * FIRST_BAN_S]
    assert lengths[-1] == LONGEST_BAN_S
