"""`Rounds`, the interface between a trainer and its way of averaging: over links, in a bucket, or in a test.

In each step, the trainer counts its samples in this peer's *share* of the batch. The share has the number of samples
that the organizer has granted. Once the share is used up, `ready` waits until the peer should *contribute* a vector.
`contribute` then yields outcomes, each with a mean to apply. In addition, `Rounds` gives the model's state to late
joiners, and takes the state from other peers.
"""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from colab_swarm.averaging.result import RoundResult
from colab_swarm.averaging.share import Share
from colab_swarm.events import Notice, PeerRefused
from colab_swarm.net.peers import PeerId
from colab_swarm.runtime import BackgroundTasks, loop_now
from colab_swarm.tensors.chunks import Snapshot
from colab_swarm.training.communication import elected_agreement
from colab_swarm.training.comparison import Comparison
from colab_swarm.training.records import Agreement, Mean, ProgressRecord, StepTaken, differing
from colab_swarm.training.settings import PeerServices, RoundInput, StepOffer, TrainingSettings
from colab_swarm.training.view import SwarmView

logger = logging.getLogger(__name__)

_STATE_BYTES = 12  # for each parameter: its value and Adam's two, in float32
# Downloads of states against drift may cost at most this part of the rounds' bytes: compressed rounds, and float32.
_DRIFT_TRAFFIC = 0.1
_FLOAT32_DRIFT_TRAFFIC = 0.01


CaughtUp: TypeAlias = tuple[Snapshot, Iterable[Mean]]
"""A state, and the means of the rounds since then, in order."""


class Ready(Enum):
    """The trainer's next action after `Rounds.ready`; the value is the reason."""

    CONTRIBUTE = "contribute now"
    COMPUTE = "more is granted"
    FOLLOW = "the others took steps without this peer"
    CATCH_UP = "this peer needs the swarm's state"
    NOTHING = "the deadline"


@dataclass(frozen=True)
class TrainedModel:
    """The trained model, as `Rounds` knows it; `Rounds` never handles a tensor of it.

    Attributes:
        numel: number of values in a contribution.
        schema: digest of the vector's layout and of the settings that the peers agree on.
        snapshot: returns a copy of the training state. Call it outside the event loop; it may raise `StateError`.
        tolerance: maximum distance of the sketches of equal states, relative to the norm.
        loss: returns the mean loss of the samples for the next step, or None; may wait for a GPU.
    """

    numel: int
    schema: bytes
    snapshot: Callable[[], Snapshot]
    tolerance: float
    loss: Callable[[], float | None]


def other_settings(differs: str) -> str:
    """Return the text of an error for settings that differ from the run's; empty if ``differs`` is empty."""
    if not differs:
        return ""
    text = f"the run trains this model with other settings: {differs}."
    return f"{text} Use the run's, or pass another name=… to swarm.optimizer(…)"


@dataclass(frozen=True)
class RoundOutcome:
    """A mean that this peer must apply now, and the result of its round.

    Attributes:
        mean: the mean.
        result: the members of the round, lost spans, bytes and seconds.
        counted: True if the mean includes this peer's contribution.
        over: True if this is the last outcome of the contribution. In a bucket, rounds that closed without the
            contribution may come first.
    """

    mean: Mean
    result: RoundResult
    counted: bool = True
    over: bool = True


class Rounds(ABC):
    """A way of averaging for one trainer, whose first record is ``own``. It runs on the runtime's event loop.

    Attributes:
        share: this peer's part of the present step, in which the trainer's thread counts its samples.
        view: the records of the other peers, and this peer's own record.
        until: loop time until which the trainer waits; the trainer sets it.
    """

    def __init__(
        self, services: PeerServices, settings: TrainingSettings, own: ProgressRecord, model: TrainedModel
    ) -> None:
        self.services = services
        self.settings = settings
        self.model = model
        round_samples = settings.target_batch_size * settings.communication.local_steps
        self.view = SwarmView(services.peers.id, own, settings.prefix, round_samples=round_samples)
        self.share = Share()
        self.until = math.inf
        traffic = _DRIFT_TRAFFIC
        if settings.communication.compression == "float32":
            traffic = _FLOAT32_DRIFT_TRAFFIC
        drift_bytes = _STATE_BYTES * model.numel / traffic
        self.comparison = Comparison(self.view, model.tolerance, services.events, drift_bytes=drift_bytes)
        self._told_of_peers = False  # whether the user was told for whom the first step waits
        self._tasks = BackgroundTasks("progress", services.events, services.rng)

    @property
    def bucket_bytes(self) -> tuple[int, int]:
        """Bytes sent to and received from a bucket, which go over no link."""
        return 0, 0

    @property
    def line_bps(self) -> tuple[float | None, float | None]:
        """Upload and download bandwidth of this peer, bits per second; None where not measured."""
        links = self.services.peers.statistics()
        return links.upload_bps, links.download_bps

    @abstractmethod
    async def start(self) -> None:
        """Enter the run; raises `MismatchError` if the run trains with other settings."""

    @abstractmethod
    async def stop(self) -> None:
        """Finish this peer's part in the last round, then leave."""

    @abstractmethod
    def kill(self) -> None:
        """Leave without telling other peers."""

    @abstractmethod
    async def refresh(self) -> None:
        """Read the members' records now."""

    @abstractmethod
    def check(self) -> None:
        """Raise the error that keeps this peer from training, such as `MismatchError`; return if there is none."""

    def refusal_of(self, agreement: Agreement) -> str:
        """Return why the run would refuse this peer with this ``agreement``; empty if it would accept it."""
        elected = elected_agreement(self.view.others)
        return other_settings(differing(elected, agreement)) if elected else ""

    def tell_begin(self, count: int, training: Sequence[str]) -> None:
        """Tell the user, once, that the first step waits for ``count`` peers, and which ones train now."""
        if self._told_of_peers:
            return
        self._told_of_peers = True
        text = f"the first step waits until {count} peers train; now {', '.join(training)}"
        logger.warning("%s", text)
        self.services.events.emit(Notice(loop_now(), text, logged=True))

    def count(self, samples: float, now: float) -> None:
        """Count a micro-batch in the share. Thread-safe."""
        self.share.count(samples, now)

    def on_gate(self) -> None:
        """Note in the record that this peer was paused, or goes on."""
        self.view.update(paused=self.services.gate.closed)

    @property
    @abstractmethod
    def behind(self) -> bool:
        """True if this peer needs the swarm's state. Thread-safe."""

    @abstractmethod
    async def ready(
        self, offer: StepOffer, deadline: float = math.inf, *, idle: bool = False, final: bool = False
    ) -> Ready:
        """Wait, with the share used up, until the trainer's next action is clear; return this action.

        ``idle``: the trainer has no more data for now, even if the organizer grants more. ``final``: this contribution
        does not grow any more, because the trainer computes on for the next step.
        """

    def depart(self) -> None:
        """Note that the contribution is complete, and that the trainer computes on for the next step."""
        self.share.depart()

    @abstractmethod
    def contribute(self, contribution: RoundInput) -> AsyncGenerator[RoundOutcome, None]:
        """Yield the means that follow from a contribution; no mean if there was no round.

        The trainer applies each mean, and calls `on_applied`, before it asks for the next mean.
        """

    async def on_applied(self, outcome: RoundOutcome, taken: StepTaken) -> None:
        """Note that the trainer took a step with the mean of ``outcome``."""
        self.view.advance(taken.lineage, taken.rates)
        samples = outcome.result.samples
        self.view.on_step(samples, now=loop_now(), swarm_now=self.services.peers.time())

    @property
    def parted(self) -> bool:
        """True if others take or took a step without this peer, so that its present samples are lost. Thread-safe."""
        return False

    def missed(self) -> list[Mean]:
        """Return the means of the steps that others took without this peer, in order, for the trainer to apply."""
        return []

    async def on_followed(self, taken: Sequence[StepTaken]) -> None:
        """Note that the trainer took the steps of `missed`."""
        for one in taken:
            self.view.advance(one.lineage, one.rates)

    @abstractmethod
    async def take_state(self, *, has_state: bool) -> CaughtUp | None:
        """Return the swarm's state, or None if this peer's own state counts.

        ``has_state`` is False while this peer's record says that it needs the state. Raises `StateError` if no other
        peer gives the state.
        """

    def on_loaded(self, step: int, lineage: bytes, donors: tuple[PeerId, ...]) -> None:
        """Note that the trainer has loaded the state of `take_state` from these donors, and is at this step now."""
        self.view.leap(step, lineage, syncing=False)
        self.comparison.on_loaded(donors)

    async def distrust(self, donors: Sequence[PeerId]) -> None:
        """For some time, ask these peers for no state, because they gave a state that does not load."""
        now = loop_now()
        self.view.distrust(donors, now=now)
        for donor in donors:
            self.services.events.emit(PeerRefused(now, donor.hex(), "a state", "it does not load"))

    def adopt(self, step: int, lineage: bytes, *, syncing: bool = False) -> None:
        """Set this peer's record to the state of a checkpoint or, with ``syncing``, to a state that does not count."""
        self.view.leap(step, lineage, syncing=syncing)
