"""What a swarm shows of itself."""

import pytest

import colab_swarm as cs
from colab_swarm import events
from colab_swarm.events import BatchDropped, Event, Fault, PeerJoined, PeerLeft, StateReceived, StepFinished
from colab_swarm.snapshot import describe
from tests.notebook.test_rounds import GONE, ROUND

BOB = "b0b00000" * 8


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (PeerJoined(1.0, BOB), "b0b00000 is linked"),
        (PeerLeft(1.0, BOB, "its link broke"), "b0b00000 is gone: its link broke"),
        (StepFinished(1.0, 7, 96.0, None), "step 7: 96 samples"),
        (StepFinished(1.0, 7, 96.0, 0.5), "step 7: loss 0.5000, 96 samples"),
        (StateReceived(1.0, 7, (BOB,), 3_200_000, 0.5), "state of step 7: 3.2 MB from 1 donor"),
        (BatchDropped(1.0, "not finite"), "batch dropped: not finite"),
        (Fault(1.0, "progress", "ValueError"), "fault in progress: ValueError"),
        (events.Waited(1.0, BOB, "its mean", 2.5), "waited 2.5 s for b0b00000: its mean"),
        (events.PeerRefused(1.0, BOB, "a group", "its shares"), "refused a group of b0b00000: its shares"),
        (events.ReachabilityChanged(1.0, "direct"), "peers connect to you: direct"),
        (events.Notice(1.0, "it is off"), "it is off"),
        (events.ExpertHosted(1.0, "ffn.0", 3, False), "hosting ffn.0"),
        (events.ExpertHosted(1.0, "ffn.0", 3, True), "hosting ffn.0, taken over at step 3"),
        (events.ExpertBanned(1.0, "ffn.0", "nan", 60), "ffn.0 failed and is left out for 60 s: nan"),
    ],
)
def test_an_event_is_a_line_for_people(event: Event, line: str) -> None:
    assert describe(event) == line


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (PeerLeft(1.0, BOB, "it left"), "bob is gone: it left"),
        (events.Waited(1.0, BOB, "its mean", 2.5), "waited 2.5 s for bob: its mean"),
        (events.PeerRefused(1.0, BOB, "a state", "it lies"), "refused a state of bob: it lies"),
        (
            events.Notice(1.0, "b0b00000 and peer-b0b00000 are one, 1b0b00000 is not"),
            "bob and bob are one, 1b0b00000 is not",
        ),
        (ROUND, "round 12: 3 peers, 2.00 s, 1 span lost; carol: the link to carol is lost"),
    ],
)
def test_a_line_names_its_peer(event: Event, line: str) -> None:
    assert describe(event, {BOB[:8]: "bob", GONE.peer[:8]: "carol"}) == line


def test_a_peer_shows_whom_it_is_linked_to_before_they_train() -> None:
    with cs.simulate(peers=2) as simulation:
        alice = simulation.swarms["alice"]
        me, other = alice.snapshot().peers
        assert (me.name, me.me, me.reachable) == ("alice", True, True)
        assert (other.name, other.me, other.reachable) == (f"peer-{other.id}", False, None)
        assert repr(alice) == "Swarm(simulation, alice, 1 peer linked)"
