"""What the dashboard shows of a run at one moment: frozen records, the same for page, JSON and Prometheus."""

from __future__ import annotations

import msgspec

from colab_swarm.backbone.curve import LossPoint
from colab_swarm.backbone.observer import RoundRow
from colab_swarm.backbone.roster import PeerLine
from colab_swarm.backbone.vault import Checkpoint

RATE_POINTS = 20
"""Steps over which a rate is taken."""


class Given(msgspec.Struct, frozen=True):
    """What a peer has given to the run, as the others saw it."""

    name: str
    id: str
    samples: float
    reduced_bytes: float
    relayed_bytes: float


class CollaborationView(msgspec.Struct, frozen=True):
    """One model of the run.

    Attributes:
        name: of the collaboration.
        step: global step.
        samples_per_s: of all trainers.
        trainers, catching_up, assistants: how many are here.
        points: the loss, oldest first.
        peers: who was there when.
        rounds: the last that the backbone reduced in, oldest first; ``round_count`` of all.
        checkpoints: history, oldest first.
        standing_in: step of the checkpoint that newcomers get, while nobody trains.
        hub: how pushing goes, in words; empty if nothing is pushed. ``hub_failures``: of all tries.
        reference: the published run to compare with.
    """

    name: str
    step: int
    samples_per_s: float
    trainers: int
    catching_up: int
    assistants: int
    points: tuple[LossPoint, ...]
    peers: tuple[PeerLine, ...]
    rounds: tuple[RoundRow, ...]
    round_count: int
    checkpoints: tuple[Checkpoint, ...]
    standing_in: int | None
    hub: str
    hub_failures: int
    reference: str | None

    @property
    def loss(self) -> float | None:
        """The newest."""
        return self.points[-1].loss if self.points else None

    @property
    def rates(self) -> list[tuple[float, float]]:
        """Step and steps per minute there."""
        apart = min(RATE_POINTS, 1 + len(self.points) // 4)
        spans = zip(self.points, self.points[apart:], strict=False)
        return [
            (end.step, 60 * (end.step - begin.step) / (end.at - begin.at))
            for begin, end in spans
            if end.at > begin.at
        ]


class View(msgspec.Struct, frozen=True):
    """The run.

    Attributes:
        run, backbone: names.
        at: now; ``since``: when the backbone began; seconds since the epoch.
        reached: how others reach the backbone, in words.
        linked: peers linked to it.
        sent_bytes, received_bytes: at the backbone, since it began.
        collaborations: the models.
        contributions: most samples first.
    """

    run: str
    backbone: str
    at: float
    since: float
    reached: str
    linked: int
    sent_bytes: int
    received_bytes: int
    collaborations: tuple[CollaborationView, ...]
    contributions: tuple[Given, ...]
