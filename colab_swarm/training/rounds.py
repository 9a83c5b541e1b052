"""The seam between a trainer and its way of averaging: `Rounds` over links, in a bucket, or in a test.

Three things pass it. A *contribution* (a vector, its weight and samples) goes in, and outcomes come
back: each a mean to apply. The *state* of the model is given to late joiners, and taken from the
others. The *members* are known by their records, in `Progress`.
"""

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from colab_swarm.averaging.result import RoundResult
from colab_swarm.dht.service import BackgroundTasks
from colab_swarm.errors import StateError
from colab_swarm.events import Notice, PeerRefused
from colab_swarm.net.peers import PeerId
from colab_swarm.runtime import loop_now, wait_until
from colab_swarm.tensors.chunks import Snapshot
from colab_swarm.training.communication import elected_agreement
from colab_swarm.training.comparison import Comparison
from colab_swarm.training.forecast import ThroughputEstimator
from colab_swarm.training.progress import Progress
from colab_swarm.training.records import Agreement, Mean, ProgressRecord, StepTaken, differing
from colab_swarm.training.settings import PeerServices, RoundInput, TrainingSettings

logger = logging.getLogger(__name__)

_STATE_BYTES = 12  # of a value: itself and the two of Adam, in float32
# Of the bytes of rounds, compressed ones or not, those of states against drift, at most.
_DRIFT_TRAFFIC = 0.1
_FLOAT32_DRIFT_TRAFFIC = 0.01
_TELL_S = 2.0  # of a wait for peers, before a word on it


CaughtUp: TypeAlias = tuple[Snapshot, Iterable[Mean]]
"""A state, and the means since, in order."""


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
    """A way of averaging for one trainer; ``own`` is its first record. It runs on the runtime's event loop."""

    def __init__(
        self, services: PeerServices, settings: TrainingSettings, own: ProgressRecord, model: TrainedModel
    ) -> None:
        self.services = services
        self.settings = settings
        self.model = model
        round_samples = settings.target_batch_size * settings.local_steps
        self.progress = Progress(services.peers.id, own, settings.prefix, round_samples=round_samples)
        # `Collaboration` writes these two: the trainer's speed, and when it waits no longer.
        self.throughput = ThroughputEstimator(loop_now())
        self.until = math.inf
        self.computed = 0.0  # samples of this process so far
        traffic = _DRIFT_TRAFFIC
        if settings.compression == "float32":
            traffic = _FLOAT32_DRIFT_TRAFFIC
        drift_bytes = _STATE_BYTES * model.numel / traffic
        self.comparison = Comparison(self.progress, model.tolerance, services.events, drift_bytes=drift_bytes)
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
        known = self.progress.known
        others = {peer: record for peer, record in known.all.items() if peer != known.me}
        elected = elected_agreement(others)
        return other_settings(differing(elected, agreement)) if elected else ""

    @property
    @abstractmethod
    def behind(self) -> bool:
        """True if the swarm moved on without this peer."""

    @property
    def enough_peers(self) -> bool:
        """True if so many peers train that the first step may be taken."""
        known = self.progress.known
        return len(known.training) >= known.min_peers

    async def wait_for_peers(self, deadline: float) -> None:
        """Wait until there are `enough_peers`, or the ``deadline``."""
        known = self.progress.known
        tell_at = loop_now() + _TELL_S
        while not self.enough_peers and loop_now() < deadline:
            if loop_now() >= tell_at:
                self.tell_begin(known.min_peers, known.training)
            known.news.clear()
            await wait_until(min(deadline, loop_now() + _TELL_S), known.news)

    def tell_begin(self, count: int, training: Sequence[str]) -> None:
        """Say once for whom the first step waits."""
        if self._told_of_peers:
            return
        self._told_of_peers = True
        text = f"the first step waits until {count} peers train; now {', '.join(training)}"
        logger.warning("%s", text)
        self.services.events.emit(Notice(loop_now(), text, logged=True))

    def on_batch(self, samples: float) -> None:
        """The trainer has computed a micro-batch, which its record counts."""
        self.computed += samples

    @abstractmethod
    def samples(self, now: float, *, aside: bool) -> float:
        """Return the samples of all peers since the last round; ``aside``: one runs beside the trainer."""

    @abstractmethod
    def round_due(self, now: float, *, waiting: bool) -> bool:
        """Return True if this peer should contribute now; ``waiting``: it has no more data for a while."""

    @abstractmethod
    def contribute(self, contribution: RoundInput) -> AsyncGenerator[RoundOutcome, None]:
        """Yield the means that follow from a contribution; none if there was no round.

        The trainer applies each one, and calls `on_applied`, before it asks for the next.
        """

    @abstractmethod
    async def on_applied(self, outcome: RoundOutcome, taken: StepTaken) -> None:
        """The trainer took a step with the mean, and its record has advanced."""

    @abstractmethod
    async def take_state(self, *, has_state: bool) -> CaughtUp | None:
        """Return the swarm's state, or None if this peer's own state counts.

        Raises `StateError` if the state is not to be had, and this peer has none.
        """

    @abstractmethod
    def on_loaded(self, donors: tuple[PeerId, ...]) -> None:
        """The trainer has loaded the state that `take_state` returned, of these donors."""

    async def distrust(self, donors: Sequence[PeerId]) -> None:
        """Take the vote of peers that gave a state which does not load."""
        now = loop_now()
        self.progress.election.distrust(donors, now=now)
        for donor in donors:
            self.services.events.emit(PeerRefused(now, donor.hex(), "a state", "it does not load"))

    async def state_digest(self) -> str:
        """Return a digest of the state for the history; empty with local steps, which make every state different."""
        with suppress(StateError):
            if self.settings.local_steps == 1:
                return (await asyncio.to_thread(self.model.snapshot)).manifest.root.hex()
        return ""

    def adopt(self, step: int, lineage: bytes, *, syncing: bool = False) -> None:
        """Move this peer's record to a state that it has loaded or, ``syncing``, still needs."""
        self.progress.leap(step, lineage, syncing=syncing)
        self.progress.known.urgent.set()
