"""The checker finds what is wrong in histories, also of planted bugs; storms leave none that is wrong."""

from collections.abc import Callable
from itertools import count

import pytest
import torch
from blake3 import blake3

from colab_swarm.averaging.reducer import SpanReducer
from colab_swarm.averaging.share import Share
from colab_swarm.tensors.chunks import Snapshot
from colab_swarm.tensors.codecs import Floats
from colab_swarm.training.link_rounds import LinkRounds
from colab_swarm.training.records import LINEAGE_BYTES, Mean
from colab_swarm.training.replica import Replica
from tests.sim.histories import check
from tests.sim.storm import Fault, Storm, assert_consistent, endure, reports_of

STORM = Storm(
    seed=1,
    spells=(
        (16.0, (Fault("kill", "bob"),)),
        (24.0, (Fault("freeze", "carol"),)),
        (40.0, (Fault("partition", "carol", 0, 100),)),
    ),
)
KEPT = [
    # A minority that met late joiners while it was cut off must not take itself for the majority.
    Storm(
        73,
        (
            (24.0, (Fault("slow", "bob", 13, 88),)),
            (24.0, (Fault("slow", "bob", 27, 87), Fault("freeze", "carol", 40, 66))),
        ),
        peers=3,
        late=2,
        network="home",
    ),
    # Two pairs that knew nobody else, and a late joiner between their steps.
    Storm(
        15,
        (
            (24.0, (Fault("partition", "bob", 16, 67), Fault("partition", "dave", 44, 87))),
            (40.0, (Fault("kill", "bob", 2, 60),)),
        ),
        late=2,
    ),
    # A peer that froze in the only micro-batch that was measured got no part any more.
    Storm(52, ((12.0, (Fault("freeze", "alice", 3, 60), Fault("freeze", "alice", 0, 60))),), peers=3),
    # An organizer that had been cut off did not wait for those who had been silent to it then.
    Storm(
        304,
        ((24.0, (Fault("freeze", "alice", 23, 99),)), (24.0, (Fault("freeze", "alice", 0, 92),))),
        peers=3,
        late=2,
        network="home",
    ),
    Storm(509, ((40.0, (Fault("slow", "carol", 40, 74),)),), peers=3, network="home"),
    # The organizer was lost while it told a group: the others gave it to each other for ever.
    Storm(260, ((24.0, (Fault("lose", "carol", 30, 73),)),), peers=3, late=1),
    # A peer that had organized for itself came back with its grant of the whole batch.
    Storm(
        211,
        ((40.0, (Fault("partition", "frank", 36, 97), Fault("leave", "carol", 26, 87))),),
        peers=8,
        late=1,
    ),
    # The next organizer had not got the first group, by which the others stood at it.
    Storm(
        371,
        (
            (12.0, (Fault("lose", "bob", 15, 80), Fault("freeze", "dave", 39, 96))),
            (12.0, (Fault("leave", "dave", 48, 90),)),
        ),
        peers=8,
    ),
]
"""Storms that once ended in a violation."""
MANY = Storm(
    5,
    (
        (
            24.0,
            (Fault("kill", "bob"), Fault("freeze", "carol"), Fault("slow", "dave"), Fault("lose", "erin")),
        ),
        (24.0, (Fault("partition", "grace"), Fault("leave", "heidi"), Fault("kill", "frank"))),
    ),
    peers=12,
    late=2,
)


def a_contribution_that_counts_twice(patch: pytest.MonkeyPatch) -> None:
    on_chunk = SpanReducer.on_chunk

    def wrong(reducer: SpanReducer, member: int, chunk: int, values: Floats) -> bool:
        return on_chunk(reducer, member, chunk, values * 2 if member == 0 else values)

    patch.setattr(SpanReducer, "on_chunk", wrong)


def samples_that_stay_after_a_round(patch: pytest.MonkeyPatch) -> None:
    begin = Share.begin

    def wrong(share: Share, granted: float) -> None:
        counted = share.counted / 2
        begin(share, granted)
        share.counted = counted

    patch.setattr(Share, "begin", wrong)


def a_state_that_is_not_loaded_as_it_was(patch: pytest.MonkeyPatch) -> None:
    load = Replica.load_snapshot

    def wrong(replica: Replica, snapshot: Snapshot) -> None:
        load(replica, snapshot)
        with torch.no_grad():
            replica.parameters[0].mul_(1.001)

    patch.setattr(Replica, "load_snapshot", wrong)


def a_lineage_of_each_peers_own(patch: pytest.MonkeyPatch) -> None:
    lines = count()

    def wrong(mean: Mean, lineage: bytes) -> bytes:
        return blake3(lineage + bytes([next(lines) % 251])).digest(LINEAGE_BYTES)

    patch.setattr(Mean, "lineage_after", wrong)


def a_peer_that_never_catches_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LinkRounds, "behind", property(lambda rounds: False))


BUGS = [
    ("sum", a_contribution_that_counts_twice),
    ("once", samples_that_stay_after_a_round),
    ("state", a_state_that_is_not_loaded_as_it_was),
    ("fork", a_lineage_of_each_peers_own),
    ("progress", a_peer_that_never_catches_up),
]


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "plant"), BUGS)
def test_a_planted_bug_is_found(
    rule: str, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert rule in {violation.rule for violation in check(endure(STORM))}


@pytest.mark.slow
@pytest.mark.parametrize("storm", [STORM, MANY, *KEPT], ids=lambda storm: str(storm.seed))
def test_a_storm_leaves_consistent_histories(storm: Storm) -> None:
    assert_consistent(storm)


@pytest.mark.slow
@pytest.mark.ordeal
def test_five_hundred_storms_leave_consistent_histories() -> None:
    assert not reports_of(range(500))
