"""The organizers that a peer leaves out, and for how long."""

from __future__ import annotations

from colab_swarm.averaging.matchmaking import REFUSALS_S, SKIPPED_S, SkippedOrganizers
from colab_swarm.net.peers import PeerId

ALICE = PeerId(bytes(32))


def test_an_invalid_group_leaves_its_organizer_out_for_a_while() -> None:
    organizers = SkippedOrganizers()
    organizers.skip(ALICE, now=10.0)
    assert organizers.skipped(ALICE, now=10.0 + SKIPPED_S - 1) and not organizers.skipped(
        ALICE, now=10.0 + SKIPPED_S
    )


def test_refusing_one_step_for_too_long_leaves_an_organizer_out() -> None:
    organizers = SkippedOrganizers()
    assert not organizers.on_refusal(ALICE, 7, now=0.0)
    assert not organizers.on_refusal(ALICE, 7, now=REFUSALS_S - 1)
    assert organizers.on_refusal(ALICE, 7, now=REFUSALS_S) and organizers.skipped(ALICE, now=REFUSALS_S)


def test_refusing_each_step_once_is_honest() -> None:
    organizers = SkippedOrganizers()
    assert not any(organizers.on_refusal(ALICE, step, now=step * REFUSALS_S) for step in range(5))
    assert not organizers.skipped(ALICE, now=5 * REFUSALS_S)
