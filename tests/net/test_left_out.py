"""The one rule for leaving out what failed: how long, how it grows, when it is forgiven, how much is remembered."""

import pytest

from colab_swarm.net.patience import MAX_LEFT_OUT, LeftOut


@pytest.mark.parametrize(
    ("first_s", "expected"),
    [(5.0, [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0]), (300.0, [300.0, 300.0, 300.0])],
)
def test_each_failure_in_a_row_doubles_the_time(first_s: float, expected: list[float]) -> None:
    left_out, now, times = LeftOut[str](first_s, 300.0), 0.0, []
    for _ in expected:
        seconds = left_out.fail("bob", now)
        assert seconds is not None and left_out.holds("bob", now + seconds - 0.1)
        now += seconds
        assert not left_out.holds("bob", now)
        times.append(seconds)
    assert times == expected


def test_failures_meanwhile_count_once_and_concern_nobody_else() -> None:
    left_out = LeftOut[str](5.0, 300.0)
    assert [left_out.fail("bob", now) for now in (0.0, 1.0, 5.0)] == [5.0, None, 10.0]
    assert left_out.holds("bob", 6.0) and not left_out.holds("carol", 6.0)


def test_what_is_forgiven_starts_anew_and_each_change_has_its_version() -> None:
    left_out = LeftOut[str](5.0, 300.0)
    left_out.forgive("bob")
    assert left_out.version == 0 and not left_out.ends(0.0)
    for peer in ("bob", "carol"):
        left_out.fail(peer, 0.0)
    assert left_out.version == 2 and left_out.ends(1.0) == {"bob": 5.0, "carol": 5.0}
    assert not left_out.ends(5.0)
    left_out.forgive("bob")
    assert left_out.version == 3
    assert not left_out.holds("bob", 0.0) and left_out.holds("carol", 0.0)
    assert left_out.fail("bob", 1.0) == 5.0


def test_a_long_time_without_failures_resets_the_count_and_frees_memory() -> None:
    left_out = LeftOut[int](5.0, 300.0)
    for peer in range(100):
        left_out.fail(peer, 0.0)
    assert left_out.fail(0, 305.0) == 5.0 and left_out.ends(0.0).keys() == {0}


def test_memory_is_bounded_and_the_last_failures_count() -> None:
    left_out = LeftOut[int](5.0, 300.0)
    for peer in range(MAX_LEFT_OUT + 10):
        left_out.fail(peer, 0.0)
    assert left_out.ends(0.0).keys() == set(range(10, MAX_LEFT_OUT + 10))
