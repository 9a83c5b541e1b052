from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.net.linker import SwarmClock


def test_two_skewed_peers_meet_in_the_middle_and_a_forgotten_one_no_longer_counts() -> None:
    alice, bob = SwarmClock(), SwarmClock()
    alice.observe("bob", theirs=1300.0, ours=1000.2, rtt_s=0.4)
    bob.observe("alice", theirs=1000.0, ours=1300.2, rtt_s=0.4)
    assert abs(alice.offset_s - 150.0) < 1e-6 and abs(bob.offset_s + 150.0) < 1e-6
    alice.forget("bob")
    assert alice.offset_s == 0.0


def test_a_skewed_clock_is_reported_in_full_and_moved_by_ten_minutes_at_most() -> None:
    clock = SwarmClock()
    for peer in ("bob", "carol"):
        clock.observe(peer, theirs=7200.0, ours=0.0, rtt_s=0.0)
    assert clock.behind_s == 7200.0 and clock.offset_s == 600.0


@given(st.floats(0.0, 1e11))
def test_one_liar_among_three_honest_peers_moves_nothing(lie: float) -> None:
    clock = SwarmClock()
    for peer in ("bob", "carol", "dave"):
        clock.observe(peer, theirs=5.0, ours=5.0, rtt_s=0.0)
    clock.observe("mallory", theirs=lie, ours=5.0, rtt_s=0.0)
    assert clock.offset_s == 0.0
