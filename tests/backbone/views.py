"""A view of a run in which everything happens at once."""

from __future__ import annotations

import math

from colab_swarm.backbone.keeper import Checkpoint
from colab_swarm.backbone.observer import LossPoint, PeerLine
from colab_swarm.backbone.web import CollaborationView, View

NOW = 1_800_000_000.0
EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
NAMES = ("alice", "bob", "carol", "dave", "erin", "frank")


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
    )


def collaboration(steps: int, evil: str, standing_in: int | None) -> CollaborationView:
    return CollaborationView(
        name=evil,
        step=steps,
        samples_per_s=103.4,
        trainers=5,
        catching_up=1,
        assistants=1,
        points=tuple(_point(step) for step in range(0, steps, max(1, steps // 300))),
        peers=tuple(
            PeerLine(name, chr(97 + i) * 64, "assistant" if i == 5 else "trainer", 2400, 20.0)
            for i, name in enumerate((*NAMES, evil))
        ),
        checkpoints=tuple(Checkpoint(step, NOW - (steps - step) * 3.5, 217_000_000) for step in (0, steps)),
        standing_in=standing_in,
        hub="neuropark/sahajBERT: Step 2000, loss 7.724 pushed",
        hub_failures=2,
    )


def _point(step: int) -> LossPoint:
    loss = 2.0 + 9.0 * math.exp(-step / 3000) + 0.12 * math.sin(step / 23)
    return LossPoint(step, NOW - 9000 + step * 3.6, loss, 5)
