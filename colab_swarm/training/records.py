"""The records that trainers and assistants publish in the DHT, the means that trainers apply, and state sketches."""

import asyncio
import math
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
from blake3 import blake3

from colab_swarm.averaging.group import MAX_STEP, MAX_TEXT
from colab_swarm.dht.service import DHT, Found
from colab_swarm.markup import plain
from colab_swarm.net.peers import Message, PeerId, Role
from colab_swarm.tensors.vector import Vector

LINEAGE_BYTES = 16
Figure = Annotated[float, msgspec.Meta(ge=0, lt=1e12)]
MAX_PAIR_TEXT = 100
_Text = Annotated[str, msgspec.Meta(max_length=MAX_PAIR_TEXT)]
MOST_MIN_PEERS = 256
_FewPeers = Annotated[int, msgspec.Meta(ge=0, le=MOST_MIN_PEERS)]
MAX_RATES = 8
Rates = Annotated[tuple[float, ...], msgspec.Meta(max_length=MAX_RATES)]
SKETCH_STEPS = 10
PROJECTIONS = 4
# Maximum distance of the sketches of equal states, relative to their norm: for parameters in float32, and in 16 bits.
TOLERANCE = 1e-3
HALF_TOLERANCE = 2e-2
_LEAST_NORM = 1e-30
Agreement = Annotated[tuple[tuple[_Text, _Text], ...], msgspec.Meta(max_length=16)]


def differing(there: Agreement, here: Agreement) -> str:
    """Return a text on the settings that differ, with both values; empty if all are equal."""
    theirs = dict(there)
    mine = dict(here)
    differs = {name: "" for name in (*mine, *theirs) if mine.get(name) != theirs.get(name)}
    # the options of two different optimizer classes cannot be compared
    if "optimizer" in differs:
        differs.pop("optimizer options", None)
    texts = (f"{name}: {theirs.get(name, 'none')} there, {mine.get(name, 'none')} here" for name in differs)
    return plain("; ".join(texts), MAX_TEXT)


class StateSketch(Message, frozen=True):
    """The norm of the parameters and of each kind of optimizer state, each with `PROJECTIONS` relative projections."""

    step: int
    lineage: Annotated[bytes, msgspec.Meta(max_length=LINEAGE_BYTES)]
    values: Annotated[tuple[float, ...], msgspec.Meta(max_length=12 * (1 + PROJECTIONS))]

    def is_of_step(self, other: "StateSketch") -> bool:
        return (self.step, self.lineage) == (other.step, other.lineage)

    def distance(self, other: "StateSketch") -> float:
        """Return the distance of two sketches of one step, relative to the norm; infinite if they are not comparable.

        The mean square of the projections' differences estimates the squared distance of the states (Johnson and
        Lindenstrauss).
        """
        if len(self.values) != len(other.values) or len(self.values) % (1 + PROJECTIONS):
            return math.inf
        mine = np.array(self.values).reshape(-1, 1 + PROJECTIONS)
        theirs = np.array(other.values).reshape(-1, 1 + PROJECTIONS)
        with np.errstate(invalid="ignore"):
            difference = np.abs(mine - theirs)
        difference[:, 0] /= np.maximum(np.minimum(np.abs(mine[:, 0]), np.abs(theirs[:, 0])), _LEAST_NORM)
        # Equal infinities, and NaN in both, count as equal: both models diverged in the same way.
        difference[np.isclose(mine, theirs, rtol=0.0, atol=0.0, equal_nan=True)] = 0.0
        if not np.isfinite(difference).all():
            return math.inf
        projected = np.sqrt(np.square(difference[:, 1:]).mean(axis=1))
        return float(np.maximum(difference[:, 0], projected).max(initial=0.0))


class ProgressRecord(Message, frozen=True):
    """A trainer's progress, published in the DHT."""

    step: Annotated[int, msgspec.Meta(ge=0, lt=MAX_STEP)]  # number of updates applied to its parameters
    lineage: Annotated[bytes, msgspec.Meta(max_length=LINEAGE_BYTES)]  # digest chain of its parameters
    samples: Figure  # accumulated for the next step
    samples_per_s: Figure  # this peer's speed of computing
    syncing: bool  # it has no state yet; it takes part with weight 0 and reduces nothing
    name: str  # for people
    addresses: tuple[str, ...] = ()  # where other peers can dial it
    loss: float | None = None  # mean loss of the samples, if reported
    upload_bps: Figure | None = None  # measured bandwidth of its links; None: not measured yet
    download_bps: Figure | None = None
    paused: bool = False  # it computes nothing for now; no round waits for it, but it gives its state
    rates: Rates = ()  # the learning rates of its next step, highest first; empty: not known yet
    min_peers: _FewPeers = 0  # number of peers that must train before its first step; 0: not set
    joined_at: float = 0.0  # swarm time at which it joined; at first, the earliest peer organizes
    changed: bool = False  # it reports that its parameters changed outside a step
    agreement: Agreement = ()  # settings that must be equal at all peers, by name
    organizer: PeerId = PeerId(b"")  # the organizer that it reports to
    told_at: float = 0.0  # swarm time at which it wrote this record

    @property
    def computes(self) -> bool:
        """True if the peer has the state and computes."""
        return not (self.syncing or self.paused)


@dataclass(frozen=True)
class Mean:
    """The mean of a round, which a trainer applies in a step.

    Attributes:
        vector: the values of the mean.
        digest: digest of these values as they were received, equal at all peers that apply them.
        unused: a bit for each tensor, set if no peer had a gradient for it.
        loss: the swarm's mean loss, or None if no peer sent one.
        samples: samples that other peers computed, in a step that this peer only follows.
        ends_chain: True if the digest also covers all steps before this step; then it is the lineage after this step.
    """

    vector: Vector
    digest: bytes
    unused: bytes = b""
    loss: float | None = None
    ends_chain: bool = False
    samples: float = 0.0

    def lineage_after(self, lineage: bytes) -> bytes:
        """Return the lineage of the parameters after this step; ``lineage`` is the lineage before the step."""
        if self.ends_chain:
            return self.digest[:LINEAGE_BYTES]
        return blake3(lineage + self.digest).digest(LINEAGE_BYTES)


@dataclass(frozen=True)
class StepTaken:
    """A trainer's report after a step: its new lineage, the next learning rates and, in some steps, a sketch."""

    lineage: bytes
    rates: Rates = ()
    sketch: StateSketch | None = None


class AssistantRecord(Message, frozen=True):
    """An assistant, which reduces and forwards the state for a run's collaborations. Published in the DHT."""

    name: str  # for people
    addresses: tuple[str, ...]  # where other peers can dial it
    collaboration: str  # prefix of the only collaboration that it helps; empty: all of the run
    told_at: float  # swarm time at which it wrote this record; only a newer record shows that it lives


def progress_key(prefix: str) -> str:
    return f"{prefix}/progress"


def assistants_key(prefix: str) -> str:
    """Return the DHT key of a run's assistants; ``prefix`` may be the prefix of any collaboration of the run."""
    return f"{prefix.partition('/')[0]}/assistants"


async def read_participants(
    dht: DHT, prefix: str
) -> tuple[dict[PeerId, ProgressRecord], dict[PeerId, AssistantRecord], dict[PeerId, Found]]:
    """Return the records of trainers and of assistants, and the role of each peer.

    While no peer with the role of a worker trains, the records of peers that may only reduce count as trainers'.
    """
    found, assistants = await asyncio.gather(
        dht.found(progress_key(prefix), ProgressRecord), dht.found(assistants_key(prefix), AssistantRecord)
    )
    training = any(one.role >= Role.WORKER and not record.syncing for record, one in found.values())
    least = Role.WORKER if training else Role.REDUCER
    found = {peer: one for peer, one in found.items() if one[1].role >= least}
    standing = {peer: one for peer, (_, one) in (*assistants.items(), *found.items())}
    trainers = {peer: record for peer, (record, _) in found.items()}
    return trainers, {peer: record for peer, (record, _) in assistants.items()}, standing
