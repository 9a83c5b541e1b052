"""The organizer's plan, by a model of its peers: times, latencies and faults of a step, without a socket."""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colab_swarm.averaging.grants import REPORT_S, Batch, Participant, Worker, plan
from colab_swarm.averaging.group import RoundTerms, StepReport, Ticket
from colab_swarm.net.patience import Patience
from colab_swarm.net.peers import PeerId

TERMS = RoundTerms("run/model", 0, b"", 1)


@given(
    st.lists(st.tuples(st.floats(0, 9), st.floats(0.01, 9), st.integers(1, 64)), min_size=1, max_size=12),
    st.integers(1, 2000),
)
def test_a_plan_has_the_samples_and_nothing_that_could_be_left_away(
    rows: list[tuple[float, float, int]], samples: int
) -> None:
    workers = [Worker(*row, order=bytes([index])) for index, row in enumerate(rows)]
    counts = plan(workers, samples)
    computed = sum(count * worker.samples for count, worker in zip(counts, workers, strict=True))
    assert computed >= samples
    used = [worker.samples for count, worker in zip(counts, workers, strict=True) if count]
    assert computed - min(used) < samples


def test_a_plan_ends_soonest_and_leaves_nobody_out_that_ends_with_the_others() -> None:
    fast, slow = Worker(0.0, 0.025, 4), Worker(0.0, 1.0, 4)
    assert plan([slow, slow, fast], 1024) == [6, 6, 244]
    assert plan([Worker(0.0, 1.0, 1), Worker(0.0, 1.15, 1), Worker(0.0, 0.5, 1)], 3) == [1, 1, 1]


@dataclass
class Peer:
    """A trainer of the model: a micro-batch of ``samples`` takes ``seconds``, a message half of ``trip``."""

    seconds: float
    samples: float
    trip: float = 0.06
    granted: float = 0.0
    counted: float = 0.0
    begun: float | None = None
    took: float = 0.0
    gone: bool = False


@dataclass
class Step:
    """One step of peers; ``faults``: at a time, of a peer, its new seconds a micro-batch, infinite: it freezes."""

    peers: Sequence[Peer]
    target: float
    faults: Sequence[tuple[float, int, float]] = ()
    events: list[tuple[float, int, str, int, object]] = field(default_factory=list)
    fired: int = 0

    def at(self, time: float, kind: str, peer: int, what: object = None) -> None:
        heapq.heappush(self.events, (time, len(self.events) + self.fired, kind, peer, what))
        self.fired += 1

    def report(self, index: int, now: float) -> None:
        peer = self.peers[index]
        ticket = None
        if peer.begun is None and peer.counted >= peer.granted:
            ticket = Ticket(TERMS, peer.counted, samples=peer.counted)
        age_s = 0.0 if peer.begun is None else now - peer.begun
        said = StepReport(0, b"", peer.counted, peer.granted, peer.samples, peer.took, age_s, ticket=ticket)
        self.at(now + peer.trip / 2, "report", index, said)

    def go_on(self, index: int, now: float) -> None:
        peer = self.peers[index]
        if peer.gone or peer.begun is not None:
            return
        if peer.counted < peer.granted:
            peer.begun = now
            self.at(now + peer.seconds, "ended", index)
        self.report(index, now)

    def run(self, *, known: bool = True) -> tuple[float, float]:
        """Return when the batch is full, and its samples."""
        batch = Batch(self.target, b"key", Patience[PeerId](60.0), 0.0)
        for index, peer in enumerate(self.peers):
            one = Participant(
                PeerId(bytes([index])), seconds=peer.seconds if known else 0.0, samples=peer.samples
            )
            batch.participants[one.peer] = one
            peer.took = one.seconds
        shares = batch.next_shares(0.0) if known else {}
        for index, peer in enumerate(self.peers):
            one = batch.participants[PeerId(bytes([index]))]
            peer.granted = one.granted = one.obeys = shares.get(one.peer, 0.0)
            peer.counted = 0.0 if known else peer.samples  # who joins has computed one micro-batch
            self.go_on(index, peer.trip / 2)
            self.at(peer.trip / 2 + REPORT_S, "tick", index)
        for time, index, seconds in self.faults:
            self.at(time, "fault", index, seconds)
        while True:
            now, _, kind, index, what = heapq.heappop(self.events)
            assert now < 3600, "the step does not end"
            self._happen(batch, kind, index, what, now)
            for peer_id, granted in batch.next_grants(now).items():
                self.at(now + self.peers[peer_id[0]].trip / 2, "grant", peer_id[0], granted)
            if batch.full:
                return now, batch.ready_samples
            if (look_at := batch.look_at(now)) < math.inf:
                self.at(max(look_at, now) + 1e-3, "look", 0)

    def _happen(self, batch: Batch, kind: str, index: int, what: object, now: float) -> None:
        peer = self.peers[index]
        if kind == "report":
            assert isinstance(what, StepReport)
            batch.on_report(PeerId(bytes([index])), what, now)
        elif kind == "fault":
            assert isinstance(what, int | float)
            peer.seconds = what
            peer.gone = math.isinf(what)
        elif peer.gone:
            return
        elif kind == "grant":
            assert isinstance(what, int | float)
            peer.granted = what
            self.report(index, now) if peer.begun is not None else self.go_on(index, now)
        elif kind == "ended":
            peer.took = peer.seconds
            peer.begun = None
            peer.counted += peer.samples
            self.go_on(index, now)
        elif kind == "tick":
            if peer.begun is not None:
                self.report(index, now)
            self.at(now + REPORT_S, "tick", index)


def ideal_s(peers: Sequence[Peer], target: float) -> float:
    return target / sum(peer.samples / peer.seconds for peer in peers)


MIXES = {
    "equal": [Peer(0.1, 32) for _ in range(2)],
    "one 40 times as fast": [*(Peer(1.0, 4) for _ in range(4)), Peer(0.025, 4)],
    "one 100 times as fast": [*(Peer(1.0, 4) for _ in range(3)), Peer(0.01, 4)],
    "unlike": [Peer(4 / speed, 4) for speed in (2, 4, 6, 8, 12, 16, 30, 40)],
    "many": [Peer(0.5 + index % 8 * 0.5, 4, 0.15) for index in range(24)],
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("known", [True, False])
def test_a_batch_is_full_and_soon_whatever_the_speeds_are(mix: str, known: bool) -> None:
    peers = [Peer(one.seconds, one.samples, one.trip) for one in MIXES[mix]]
    target = 1024.0
    seconds, samples = Step(peers, target).run(known=known)
    assert target <= samples <= 1.03 * target
    assert seconds <= (1.25 if known else 1.8) * ideal_s(peers, target) + 1.0


@pytest.mark.parametrize("slower", [3.0, 10.0, math.inf])
def test_what_a_peer_that_slows_down_or_freezes_had_left_is_computed_by_the_others(slower: float) -> None:
    peers = [Peer(0.4, 4) for _ in range(8)]
    step = Step(peers, 1024.0, [(4.0, 0, 0.4 * slower)])
    ideal = ideal_s(peers, 1024.0)
    seconds, samples = step.run()
    assert peers[0].seconds == 0.4 * slower  # it fired
    assert samples >= 1024 and seconds <= 1.6 * ideal


def test_a_peer_that_is_gone_is_made_up_for_at_once() -> None:
    batch = Batch(64.0, b"", Patience[PeerId](60.0), 0.0)
    for index in range(2):
        one = Participant(PeerId(bytes([index])), 32.0, 32.0, seconds=0.1, samples=4.0)
        batch.participants[one.peer] = one
    batch.on_lost(PeerId(b"\0"))
    assert batch.next_grants(1.0) == {PeerId(b"\1"): 64.0}


def test_a_ticket_of_which_more_is_granted_stands_no_more() -> None:
    batch = Batch(64.0, b"", Patience[PeerId](60.0), 0.0)
    said = StepReport(0, b"", 32.0, 32.0, 4.0, 0.1, ticket=Ticket(TERMS, 32.0, samples=32.0))
    batch.on_report(PeerId(b"\0"), said, 0.0)
    assert batch.ready_samples == 32.0
    assert batch.next_grants(0.0) == {PeerId(b"\0"): 64.0} and not batch.ready_samples


def test_tickets_of_peers_that_compute_on_are_a_batch_when_nobody_is_left() -> None:
    batch = Batch(64.0, b"", Patience[PeerId](60.0), 0.0)
    ticket = Ticket(TERMS, 32.0, samples=32.0)
    batch.on_report(PeerId(b"\0"), StepReport(0, b"", 32.0, 32.0, 4.0, 0.1, final=True, ticket=ticket), 0.0)
    assert batch.full
    batch.on_report(PeerId(b"\1"), StepReport(0, b"", 4.0, 32.0, 4.0, 0.1), 0.0)
    assert not batch.full


def test_an_assistant_forms_no_group_before_a_trainer_says_what_a_batch_is() -> None:
    assert not Batch(0.0, b"", Patience[PeerId](60.0), 0.0).full
