"""The seam between a trainer and its way of averaging: `Rounds` over links, in a bucket, or in a test.

Two things pass it in each step. This peer's *share* says how many samples are granted to it, and is what it counts.
Once that is used up, `ready` waits until the peer should *contribute* a vector, and outcomes come back: each a mean to
apply. Beside that, the state of the model is given to late joiners, and taken from the others.
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

_STATE_BYTES = 12  # of a value: itself and the two of Adam, in float32
# Of the bytes of rounds, compressed ones or not, those of states against drift, at most.
_DRIFT_TRAFFIC = 0.1
_FLOAT32_DRIFT_TRAFFIC = 0.01


CaughtUp: TypeAlias = tuple[Snapshot, Iterable[Mean]]
"""A state, and the means since, in order."""


class Ready(Enum):
    """What `Rounds.ready` waited for."""

    CONTRIBUTE = "contribute now"
    COMPUTE = "more is granted"
    FOLLOW = "the others took steps without this peer"
    CATCH_UP = "this peer needs the swarm's state"
    NOTHING = "the deadline"


@dataclass(frozen=True)
class TrainedModel:
    """The trained model, as the rounds see it: they never see a tensor.

    Attributes:
        numel: values of a contribution.
        schema: digest of the vector's layout and of what the peers agree on.
        snapshot: copies the current training state, off the event loop; may raise `StateError`.
        tolerance: of sketches of it, in norms.
        loss: the mean loss of the samples for the next step, or None; may wait for a GPU.
    """

    numel: int
    schema: bytes
    snapshot: Callable[[], Snapshot]
    tolerance: float
    loss: Callable[[], float | None]


def other_settings(differs: str) -> str:
    """Return the text of an error for settings that differ from the run's; empty if none do."""
    if not differs:
        return ""
    text = f"the run trains this model with other settings: {differs}."
    return f"{text} Use the run's, or pass another name=… to swarm.optimizer(…)"


@dataclass(frozen=True)
class RoundOutcome:
    """A mean that this peer must apply now, and how its round went.

    Attributes:
        result: the members, what was lost, bytes and seconds.
        counted: the mean has this peer's contribution.
        over: no further mean follows from the contribution.
    """

    mean: Mean
    result: RoundResult
    counted: bool = True
    over: bool = True


class Rounds(ABC):
    """A way of averaging for one trainer; ``own`` is its first record. It runs on the runtime's event loop.

    Attributes:
        share: this peer's part of the present step; the trainer's thread counts there.
        view: what is known of the others, and this peer's own record.
        until: loop time after which the trainer waits no longer; the trainer sets it.
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
        self._told_of_peers = False  # whether a word on the wait for the first step was said
        self._tasks = BackgroundTasks("progress", services.events, services.rng)

    @property
    def bucket_bytes(self) -> tuple[int, int]:
        """Bytes sent and received that went over no link."""
        return 0, 0

    @property
    def line_bps(self) -> tuple[float | None, float | None]:
        """Upload and download of this peer, bits per second; None where not measured."""
        links = self.services.peers.statistics()
        return links.upload_bps, links.download_bps

    @abstractmethod
    async def start(self) -> None:
        """Enter the run; raises `MismatchError` if it trains with other settings."""

    @abstractmethod
    async def stop(self) -> None:
        """Serve the last round to its end, then leave."""

    @abstractmethod
    def kill(self) -> None:
        """Leave without notice."""

    @abstractmethod
    async def refresh(self) -> None:
        """Read the members' records now."""

    @abstractmethod
    def check(self) -> None:
        """Raise what keeps this peer from training, such as `MismatchError`."""

    def refusal_of(self, agreement: Agreement) -> str:
        """Return why the run would not let this peer train by another ``agreement`` than its own, or nothing."""
        elected = elected_agreement(self.view.others)
        return other_settings(differing(elected, agreement)) if elected else ""

    def tell_begin(self, count: int, training: Sequence[str]) -> None:
        """Say once for whom the first step waits."""
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
        """This peer was paused, or goes on."""
        self.view.update(paused=self.services.gate.closed)

    @property
    @abstractmethod
    def behind(self) -> bool:
        """True if this peer needs the swarm's state. Thread-safe."""

    @abstractmethod
    async def ready(
        self, offer: StepOffer, deadline: float = math.inf, *, idle: bool = False, final: bool = False
    ) -> Ready:
        """Wait, with the share used up, until it is clear what the trainer does next.

        ``idle``: it has no more data for now, whatever is granted. ``final``: it computes on, for the next step.
        """

    def depart(self) -> None:
        """The contribution is complete, and the trainer computes on for the next step."""
        self.share.depart()

    @abstractmethod
    def contribute(self, contribution: RoundInput) -> AsyncGenerator[RoundOutcome, None]:
        """Yield the means that follow from a contribution; none if there was no round.

        The trainer applies each one, and calls `on_applied`, before it asks for the next.
        """

    async def on_applied(self, outcome: RoundOutcome, taken: StepTaken) -> None:
        """The trainer took a step with the mean."""
        self.view.advance(taken.lineage, taken.rates)
        samples = outcome.result.samples
        self.view.on_step(samples, now=loop_now(), swarm_now=self.services.peers.time())

    @property
    def parted(self) -> bool:
        """True if the others take or took a step without this peer: what it computes now is dropped. Thread-safe."""
        return False

    def missed(self) -> list[Mean]:
        """Return the means of the steps that the others took without this peer, in order; they are to be applied."""
        return []

    async def on_followed(self, taken: Sequence[StepTaken]) -> None:
        """The trainer took the steps of `missed`."""
        for one in taken:
            self.view.advance(one.lineage, one.rates)

    @abstractmethod
    async def take_state(self, *, has_state: bool) -> CaughtUp | None:
        """Return the swarm's state, or None if this peer's own state counts.

        Raises `StateError` if the state is not to be had, and this peer has none.
        """

    def on_loaded(self, step: int, lineage: bytes, donors: tuple[PeerId, ...]) -> None:
        """The trainer has loaded the state that `take_state` returned, of these donors, and is at this step."""
        self.view.leap(step, lineage, syncing=False)
        self.comparison.on_loaded(donors)

    async def distrust(self, donors: Sequence[PeerId]) -> None:
        """Ask the peers that gave a state which does not load no more."""
        now = loop_now()
        self.view.distrust(donors, now=now)
        for donor in donors:
            self.services.events.emit(PeerRefused(now, donor.hex(), "a state", "it does not load"))

    def adopt(self, step: int, lineage: bytes, *, syncing: bool = False) -> None:
        """Move this peer's record to a state of a checkpoint or, ``syncing``, to one that does not count."""
        self.view.leap(step, lineage, syncing=syncing)
