"""Whom a peer passes over as organizer, and for how long."""

from __future__ import annotations

from colab_swarm.averaging.matchmaking import BARRED_S, REFUSALS_S, Bars
from colab_swarm.net.peers import PeerId

ALICE = PeerId(bytes(32))


def test_nonsense_bars_for_a_while() -> None:
    bars = Bars()
    bars.bar(ALICE, now=10.0)
    assert bars.barred(ALICE, now=10.0 + BARRED_S - 1) and not bars.barred(ALICE, now=10.0 + BARRED_S)


def test_refusing_one_step_for_too_long_bars() -> None:
    bars = Bars()
    assert not bars.on_refusal(ALICE, 7, now=0.0)
    assert not bars.on_refusal(ALICE, 7, now=REFUSALS_S - 1)
    assert bars.on_refusal(ALICE, 7, now=REFUSALS_S) and bars.barred(ALICE, now=REFUSALS_S)


def test_refusing_each_step_once_is_honest() -> None:
    bars = Bars()
    assert not any(bars.on_refusal(ALICE, step, now=step * REFUSALS_S) for step in range(5))
    assert not bars.barred(ALICE, now=5 * REFUSALS_S)
