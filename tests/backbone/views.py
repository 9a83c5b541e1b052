"""A view of a run in which everything happens at once."""

from __future__ import annotations

import math

from colab_swarm.backbone.keeper import Checkpoint
from colab_swarm.backbone.observer import LossPoint, PeerLine, PeerSpan, RoundRow
from colab_swarm.backbone.web import CollaborationView, ContributionView, View

NOW = 1_800_000_000.0
EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
NAMES = ("alice", "bob", "carol", "dave", "erin", "frank", EVIL)


def view(*, steps: int = 2400, evil: str = EVIL, standing_in: int | None = None) -> View:
    """What a dashboard shows after so many steps; one peer has an evil name."""
    return View(
        run="sahajbert",
        backbone="backbone",
        at=NOW,
        since=NOW - 9000,
        reached=f"direct {evil}",
        linked=6,
        sent_bytes=12_300_000_000,
        received_bytes=9_870_000_000,
        collaborations=(collaboration(steps, evil, standing_in),),
        contributions=tuple(
            ContributionView(name, chr(97 + i) * 64, 90_000.0 / (i + 1), 2e9 / (i + 1), 1e6 * i)
            for i, name in enumerate((*NAMES[:-1], evil))
        ),
    )


def collaboration(steps: int, evil: str, standing_in: int | None) -> CollaborationView:
    names = (*NAMES[:-1], evil)
    return CollaborationView(
        name=evil,
        step=steps,
        samples_per_s=103.4,
        trainers=5,
        catching_up=1,
        assistants=1,
        points=tuple(map(_point, range(0, steps, max(1, steps // 300)))),
        peers=tuple(_line(i, name) for i, name in enumerate(names)),
        rounds=tuple(_round(steps - 12 + i) for i in range(12)),
        round_count=steps,
        checkpoints=tuple(
            Checkpoint(step, _loss(step), NOW - (steps - step) * 3.5, 217_000_000, f"step-{step}")
            for step in range(0, steps, 400)
        ),
        standing_in=standing_in,
        hub="neuropark/sahajBERT: Step 2000, loss 7.724 pushed",
        hub_failures=2,
    )


def _loss(step: int) -> float:
    return 2.0 + 9.0 * math.exp(-step / 3000)


def _point(step: int) -> LossPoint:
    wave = 0.12 * math.sin(step / 23) + 0.08 * math.sin(step / 5)
    loss = _loss(step) + wave
    return LossPoint(step, NOW - 9000 + step * 3.6 + 60 * wave, loss, loss - 0.15, loss + 0.2, 5, 100.0)


def _line(index: int, name: str) -> PeerLine:
    begin = NOW - 8800 + 900 * index
    role = "assistant" if index == 5 else "trainer"
    spans = [PeerSpan("catching up", begin, begin + 240), PeerSpan(role, begin + 240, NOW - 120 * index)]
    if index == 2:
        spans += [PeerSpan("catching up", NOW - 200, NOW - 90), PeerSpan(role, NOW - 90, NOW)]
    return PeerLine(name, chr(97 + index) * 64, index < 6, 2400, 20.0 if index < 5 else 0.0, tuple(spans))


def _round(step: int) -> RoundRow:
    slow = step % 5 == 0
    return RoundRow(
        step, NOW - 40, 1.1 + step % 3, 4.2, 1.8 if slow else 0.0, 6, 5, 4096.0, int(slow), 61_000_000
    )
