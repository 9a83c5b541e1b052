"""What trainers and assistants say of themselves, to all in the DHT or in a ticket, and where."""

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
# By how much sketches of equal states may differ, in norms: parameters in float32, and those of half the bits.
TOLERANCE = 1e-3
HALF_TOLERANCE = 2e-2
_LEAST_NORM = 1e-30
Agreement = Annotated[tuple[tuple[_Text, _Text], ...], msgspec.Meta(max_length=16)]


def differing(there: Agreement, here: Agreement) -> str:
    """Return the settings that differ, with both values, or nothing."""
    theirs = dict(there)
    mine = dict(here)
    differs = {name: "" for name in (*mine, *theirs) if mine.get(name) != theirs.get(name)}
    # options of two kinds of optimizers have nothing to compare
    if "optimizer" in differs:
        differs.pop("optimizer options", None)
    texts = (f"{name}: {theirs.get(name, 'none')} there, {mine.get(name, 'none')} here" for name in differs)
    return plain("; ".join(texts), MAX_TEXT)


class StateSketch(Message, frozen=True):
    """For parameters and each kind of optimizer state its norm, and `PROJECTIONS` projections in norms."""

    step: int
    lineage: Annotated[bytes, msgspec.Meta(max_length=LINEAGE_BYTES)]
    values: Annotated[tuple[float, ...], msgspec.Meta(max_length=12 * (1 + PROJECTIONS))]

    def is_of_step(self, other: "StateSketch") -> bool:
        return (self.step, self.lineage) == (other.step, other.lineage)

    def distance(self, other: "StateSketch") -> float:
        """Return by how much two sketches of one step differ, in norms; infinite if they are not comparable.

        The mean square of the projections' differences is that of the states (Johnson and Lindenstrauss).
        """
        if len(self.values) != len(other.values) or len(self.values) % (1 + PROJECTIONS):
            return math.inf
        mine = np.array(self.values).reshape(-1, 1 + PROJECTIONS)
        theirs = np.array(other.values).reshape(-1, 1 + PROJECTIONS)
        with np.errstate(invalid="ignore"):
            difference = np.abs(mine - theirs)
        difference[:, 0] /= np.maximum(np.minimum(np.abs(mine[:, 0]), np.abs(theirs[:, 0])), _LEAST_NORM)
        # Models that have diverged alike are alike.
        difference[np.isclose(mine, theirs, rtol=0.0, atol=0.0, equal_nan=True)] = 0.0
        if not np.isfinite(difference).all():
            return math.inf
        projected = np.sqrt(np.square(difference[:, 1:]).mean(axis=1))
        return float(np.maximum(difference[:, 0], projected).max(initial=0.0))


class ProgressRecord(Message, frozen=True):
    """A peer's progress, published in the DHT."""

    step: Annotated[int, msgspec.Meta(ge=0, lt=MAX_STEP)]  # updates applied to its parameters
    lineage: Annotated[bytes, msgspec.Meta(max_length=LINEAGE_BYTES)]  # names the branch of its parameters
    samples: Figure  # accumulated for the next step
    samples_per_s: Figure  # its own speed
    syncing: bool  # it has no state yet; it takes part with weight 0 and reduces nothing
    name: str  # for people
    addresses: tuple[str, ...] = ()  # where it can be dialled
    loss: float | None = None  # mean loss of the samples, if reported
    upload_bps: Figure | None = None  # measured bandwidth of its links; None: not measured yet
    download_bps: Figure | None = None
    paused: bool = False  # it computes nothing for now; no round waits for it, but it gives its state
    rates: Rates = ()  # the learning rates of its next step, highest first; empty: not known yet
    min_peers: _FewPeers = 0  # that must train before its first step; 0: it does not say
    joined_at: float = 0.0  # its swarm time; of two peers that disagree, the later one yields
    changed: bool = False  # by its own account, its parameters changed outside a step since it took a state
    agreement: Agreement = ()  # what must be equal at all peers, by name
    organizer: PeerId = PeerId(b"")  # at whom it stands
    told_at: float = 0.0  # its swarm time

    @property
    def computes(self) -> bool:
        """True if the peer has the state and computes."""
        return not (self.syncing or self.paused)


@dataclass(frozen=True)
class Mean:
    """What a trainer applies in a step.

    Attributes:
        vector: its values.
        digest: of these as they came, equal at all peers that apply them.
        unused: the bits of the tensors for which nobody had a gradient.
        loss: the swarm's; None: nobody sent one.
        samples: that others computed, of a step that this peer only follows.
        ends_chain: the digest stands for all steps before this one, too, and is the lineage after it.
    """

    vector: Vector
    digest: bytes
    unused: bytes = b""
    loss: float | None = None
    ends_chain: bool = False
    samples: float = 0.0

    def lineage_after(self, lineage: bytes) -> bytes:
        """Return the lineage of the parameters after this step, from theirs before it."""
        if self.ends_chain:
            return self.digest[:LINEAGE_BYTES]
        return blake3(lineage + self.digest).digest(LINEAGE_BYTES)


@dataclass(frozen=True)
class StepTaken:
    """What a trainer says of a step: its new lineage, the next step's learning rates, now and then a sketch."""

    lineage: bytes
    rates: Rates = ()
    sketch: StateSketch | None = None


class AssistantRecord(Message, frozen=True):
    """A peer that reduces, and passes on the state, for a run's collaborations; published in the DHT."""

    name: str  # for people
    addresses: tuple[str, ...]  # where it can be dialled
    collaboration: str  # prefix of the only one that it helps; empty: any of the run
    told_at: float  # its swarm time; a record that is not newer is no sign of life


def progress_key(prefix: str) -> str:
    return f"{prefix}/progress"


def assistants_key(prefix: str) -> str:
    """Return the DHT key of a run's assistants; ``prefix`` is that of any of its collaborations."""
    return f"{prefix.partition('/')[0]}/assistants"


async def read_participants(
    dht: DHT, prefix: str
) -> tuple[dict[PeerId, ProgressRecord], dict[PeerId, AssistantRecord], dict[PeerId, Found]]:
    """Return the records of trainers and of assistants, and the role of each.

    The record of a peer that may only reduce counts as a trainer's while no worker trains.
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
