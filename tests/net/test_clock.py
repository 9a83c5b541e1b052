import pytest
from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.net.clock import SwarmClock


def test_two_skewed_peers_meet_in_the_middle_and_a_forgotten_one_no_longer_counts() -> None:
    alice, bob = SwarmClock(), SwarmClock()
    alice.observe("bob", theirs=1300.0, ours=1000.2, rtt_s=0.4)
    bob.observe("alice", theirs=1000.0, ours=1300.2, rtt_s=0.4)
    assert abs(alice.offset_s - 150.0) < 1e-6 and abs(bob.offset_s + 150.0) < 1e-6
    alice.forget("bob")
    assert alice.offset_s == 0.0


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
def test_a_clock_that_agreed_and_is_set_elsewhere_is_told_and_not_followed(step_s: float) -> None:
    clock = SwarmClock()
    assert clock.own(1000.0, 5.0) == 1000.0
    for peer in ("bob", "carol"):
        clock.observe(peer, theirs=1000.0, ours=1000.0, rtt_s=0.0)
    assert clock.own(1010.0 + step_s, 15.0) + clock.offset_s == 1010.0
    assert clock.behind_s == -step_s
    clock.observe("dave", theirs=1010.0, ours=1010.0 + step_s, rtt_s=0.0)
    assert clock.own(1011.0 + step_s, 16.0) == 1011.0
    assert clock.own(1012.0, 17.0) == 1012.0 and clock.behind_s == 0.0


def test_a_clock_that_was_wrong_and_is_set_right_is_followed_also_after_a_sleep() -> None:
    clock = SwarmClock()
    clock.own(1000.0 - 3600.0, 5.0)
    for peer in ("bob", "carol"):
        clock.observe(peer, theirs=1000.0, ours=1000.0 - 3600.0, rtt_s=0.0)
    assert (clock.behind_s, clock.offset_s) == (3600.0, 600.0)
    assert clock.own(1010.0, 15.0) == 1010.0 and clock.offset_s == clock.behind_s == 0.0
    # the monotonic clock stands still in a sleep, and the links are new after it
    for peer in ("bob", "carol"):
        clock.forget(peer)
    clock.own(9000.0, 20.0)
    clock.observe("bob", theirs=9000.0, ours=9000.0, rtt_s=0.0)
    assert clock.own(9001.0, 21.0) == 9001.0 and clock.behind_s == 0.0


@given(st.floats(0.0, 1e11))
def test_one_liar_among_three_honest_peers_moves_nothing(lie: float) -> None:
    clock = SwarmClock()
    for peer in ("bob", "carol", "dave"):
        clock.observe(peer, theirs=5.0, ours=5.0, rtt_s=0.0)
    clock.observe("mallory", theirs=lie, ours=5.0, rtt_s=0.0)
    assert clock.offset_s == 0.0
