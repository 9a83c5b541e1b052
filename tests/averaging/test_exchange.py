"""The trace of a round: which members were slow or lost, and why; and the pace of its contributions."""

import random

from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.averaging.exchange import LEAD, STALL_S, Pace
from colab_swarm.averaging.group import Group, GroupMember, RoundTerms
from colab_swarm.averaging.result import LEFT_OUT, RoundTrace
from colab_swarm.events import MemberTrace
from colab_swarm.net.peers import PeerId
from tests.averaging.swarm import NAMES, Outcome, contribution, run_round


def seen_by(outcome: Outcome, name: str) -> dict[str, MemberTrace]:
    """The traces that ``name`` has of the members, by their names."""
    spans = outcome.spans
    by_place = sorted(spans, key=lambda one: spans[one].start)
    return dict(zip(by_place, outcome.results[name].members, strict=True))


def test_each_member_has_sent_received_and_answered_in_that_order() -> None:
    outcome = run_round()
    for name in NAMES[:4]:
        total_s = outcome.results[name].seconds
        for other, trace in seen_by(outcome, name).items():
            assert trace.dropped == "" and trace.means is not None
            assert 0 <= trace.means[0] <= trace.means[1] <= total_s
            if other != name:
                assert trace.sent is not None and trace.received is not None
                assert trace.sent[0] <= trace.means[0] and trace.received[1] <= total_s
        assert sum(trace.share for trace in outcome.results[name].members) == 1


def test_a_crashed_peer_shows_why_it_is_missing() -> None:
    outcome = run_round(script=lambda n: n.when(contribution, receiver="bob", nth=4).crash("bob"))
    assert [fault.name for fault in outcome.fired] == ["crash"]
    for name in ("alice", "carol", "dave"):
        traces = seen_by(outcome, name)
        assert traces["bob"].dropped == f"the link to {traces['bob'].peer[:8]} is lost: bob crashed"
        assert [other for other in traces if traces[other].dropped] == ["bob"]


def test_members_missing_elsewhere_are_reported_unless_the_reason_is_known_here() -> None:
    members = tuple(GroupMember(PeerId(bytes([n]) * 32), (), 1.0, 1.0) for n in range(3))
    trace = RoundTrace(Group(bytes(16), RoundTerms("", 7, b"", 10), members), now=5.0)
    trace.on_dropped(2, "the link is lost")
    trace.on_traffic("received", 1, 6.0)
    trace.on_traffic("received", 1, 7.5)
    first, second, third = trace.members({1, 2})
    assert first.dropped == "" and third.dropped == "the link is lost"
    assert second.dropped == LEFT_OUT
    assert second.received == (1.0, 2.5) and second.sent is None


def test_a_silent_reducer_is_waited_for_a_moment_and_one_that_is_gone_not_at_all() -> None:
    pace = Pace({1: 100, 2: 100, 3: 0}, now=0.0)
    for index in range(6):
        pace.on_chunk(1, index, now=0.0)
    assert not pace.may_send(1, now=0.0) and pace.may_send(1, now=STALL_S)
    pace.on_over(2)
    assert pace.may_send(1, now=0.0)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(0, 1 << 32))
def test_one_stream_may_always_send_and_none_runs_ahead(counts: list[int], seed: int) -> None:
    rng, sent = random.Random(seed), dict.fromkeys(range(len(counts)), 0)
    pace = Pace(dict(enumerate(counts)), now=0.0)
    while unfinished := [reducer for reducer, index in sent.items() if index < counts[reducer]]:
        allowed = [reducer for reducer in unfinished if pace.may_send(reducer, now=0.0)]
        reducer = rng.choice(allowed)  # an empty list would raise: deadlock
        pace.on_chunk(reducer, sent[reducer], now=0.0)
        sent[reducer] += 1
        ahead = sent[reducer] / counts[reducer] - min(sent[other] / counts[other] for other in sent)
        assert ahead <= LEAD + (1 + reducer / len(counts) / 3) / counts[reducer] + 1e-9
