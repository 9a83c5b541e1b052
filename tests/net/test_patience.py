"""How long to wait, and the rule for leaving out who is late or failed: how it grows, when it is forgiven."""

import pytest

from colab_swarm.net.patience import MAX_KEYS, MAX_LEFT_OUT, LeftOut, Patience


def test_failures_count_once_until_they_are_forgiven_and_each_change_has_its_version() -> None:
    left_out = LeftOut[str](5.0, 300.0)
    left_out.forgive("bob")
    assert left_out.version == 0 and not left_out.ends(0.0)
    assert [left_out.fail("bob", now) for now in (0.0, 1.0, 5.0)] == [5.0, None, 10.0]
    left_out.fail("carol", 5.0)
    assert left_out.version == 3 and left_out.ends(6.0) == {"bob": 15.0, "carol": 10.0}
    left_out.forgive("bob")
    assert left_out.version == 4
    assert not left_out.holds("bob", 6.0) and left_out.holds("carol", 6.0)
    assert left_out.fail("bob", 7.0) == 5.0 and not left_out.ends(12.0)


def test_memory_is_bounded_and_a_long_time_without_failures_resets_the_count() -> None:
    left_out = LeftOut[int](5.0, 300.0)
    for peer in range(MAX_LEFT_OUT + 10):
        left_out.fail(peer, 0.0)
    assert left_out.ends(0.0).keys() == set(range(10, MAX_LEFT_OUT + 10))
    assert left_out.fail(20, 305.0) == 5.0 and left_out.ends(0.0).keys() == {20}


@pytest.mark.parametrize(
    ("times_s", "limit_s"),
    [
        *(([], 5.0), ([0.1] * 3, 2.0), ([4.0] * 3, 8.0)),
        *(([4.0, 6.0, 8.0], 16.0), ([4.0] * 31 + [900.0], 8.0), ([900.0, *[4.0] * 32], 8.0)),
    ],
)
def test_the_limit_follows_what_a_peer_has_shown(times_s: list[float], limit_s: float) -> None:
    patience = Patience[str](60.0)
    for time_s in times_s:
        patience.learn("bob", time_s)
    assert patience.limit_s("bob") == limit_s and patience.limit_s("carol") == 5.0


def test_who_is_late_is_left_out_for_longer_each_time_until_a_contribution_counts() -> None:
    patience, now, everyone = Patience[str](60.0), 0.0, ["alice", "bob", "carol"]
    for left_out_s in (60.0, 120.0, 240.0, 480.0, 960.0, 1800.0, 1800.0):
        assert patience.on_late(["bob"], everyone, now) == {"bob": left_out_s}
        assert not patience.on_late(["bob"], everyone, now), "it is left out already"
        assert not patience.is_awaited("bob", now + left_out_s - 0.1) and patience.is_awaited("carol", now)
        now += left_out_s
        assert patience.is_awaited("bob", now)
    patience.on_late(["bob"], everyone, now)
    patience.on_counted("bob")
    assert patience.is_awaited("bob", now)
    assert patience.on_late(["bob"], everyone, now) == {"bob": 60.0}


def test_nobody_is_left_out_where_more_than_half_are_late() -> None:
    patience = Patience[str](60.0)
    assert not patience.on_late(["bob", "carol"], ["alice", "bob", "carol"], 0.0)
    assert patience.is_awaited("bob", 0.0)
    assert patience.on_late(["bob"], ["alice", "bob"], 0.0) == {"bob": 60.0}


def test_the_last_keys_are_remembered_and_one_that_has_become_slow_begins_anew() -> None:
    patience = Patience[int](60.0)
    for key in range(MAX_KEYS + 1):
        patience.learn(key, 1.0)
    patience.learn(1, 10.0)
    patience.learn(0, 10.0)
    assert (patience.limit_s(0), patience.limit_s(2), patience.limit_s(3)) == (20.0, 5.0, 2.0)
    patience.on_late([3, 4], [3, 4, 5], 0.0)
    assert patience.limit_s(3) == 5.0
