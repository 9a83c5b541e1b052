"""A clock that is off is told once, with what to do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.trust.member import ClockWatch


def test_half_a_minute_is_not_worth_a_word() -> None:
    assert ClockWatch().on_skew(30.0) is None


def test_a_compensated_skew_is_reported_once() -> None:
    watch = ClockWatch()
    assert watch.on_skew(240.0) == (
        "this machine's clock is 4 minutes behind the other peers': compensated, you need to do nothing"
    )
    assert watch.on_skew(241.0) is None


def test_a_skew_of_more_than_ten_minutes_comes_with_the_fix() -> None:
    watch = ClockWatch()
    watch.on_skew(-590.0)
    text = watch.on_skew(-7200.0)
    assert text is not None
    assert text.startswith("this machine's clock is 2 hours ahead of the other peers': beyond 10 minutes")
    assert "sudo timedatectl set-ntp true" in text and "restart the runtime" in text


def test_the_end_of_a_skew_is_reported() -> None:
    watch = ClockWatch()
    watch.on_skew(100.0)
    assert watch.on_skew(20.0) is None  # not yet clearly
    assert watch.on_skew(1.0) == "this machine's clock is right again"
    assert watch.on_skew(2.0) is None


@given(st.lists(st.floats(-1e9, 1e9), max_size=30))
def test_the_same_skew_is_never_reported_twice(skews: list[float]) -> None:
    watch = ClockWatch()
    for skew in skews:
        watch.on_skew(skew)
        assert watch.on_skew(skew) is None
