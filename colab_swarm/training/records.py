"""What trainers and assistants publish in the DHT about themselves, and where."""

import asyncio
from dataclasses import dataclass
from typing import Annotated

import msgspec
from blake3 import blake3

from colab_swarm.averaging.group import MAX_STEP, MAX_TEXT
from colab_swarm.dht.service import DHT, Found
from colab_swarm.markup import plain
from colab_swarm.net.peers import Message, PeerId, Role
from colab_swarm.tensors.vector import Vector
from colab_swarm.training.sketch import StateSketch

LINEAGE_BYTES = 16
Figure = Annotated[float, msgspec.Meta(ge=0, lt=1e12)]
MAX_PAIR_TEXT = 100
_Text = Annotated[str, msgspec.Meta(max_length=MAX_PAIR_TEXT)]
MOST_MIN_PEERS = 256
_FewPeers = Annotated[int, msgspec.Meta(ge=0, le=MOST_MIN_PEERS)]
MAX_RATES = 8
Rates = Annotated[tuple[float, ...], msgspec.Meta(max_length=MAX_RATES)]
Agreement = Annotated[tuple[tuple[_Text, _Text], ...], msgspec.Meta(max_length=16)]


def differing(there: Agreement, here: Agreement) -> str:
    """Return the settings that differ, with both values, or nothing."""
    theirs = dict(there)
    mine = dict(here)
    differs = [name for name in (*mine, *theirs) if mine.get(name) != theirs.get(name)]
    texts = (f"{name}: {theirs.get(name, 'none')} there, {mine.get(name, 'none')} here" for name in differs)
    return plain("; ".join(dict.fromkeys(texts)), MAX_TEXT)


class ProgressRecord(Message, frozen=True):
    """A peer's progress, published in the DHT."""

    step: Annotated[int, msgspec.Meta(ge=0, lt=MAX_STEP)]  # updates applied to its parameters
    lineage: Annotated[bytes, msgspec.Meta(max_length=LINEAGE_BYTES)]  # names the branch of its parameters
    samples: Figure  # accumulated for the next step
    samples_per_s: Figure  # its own speed
    syncing: bool  # it has no state yet; it takes part with weight 0 and reduces nothing
    reduces: bool  # other peers can reach it, and it takes a share of the averaging
    name: str  # for people
    addresses: tuple[str, ...] = ()  # where it can be dialled
    loss: float | None = None  # mean loss of the samples, if reported
    upload_bps: Figure | None = None  # measured bandwidth of its links; None: not measured yet
    download_bps: Figure | None = None
    paused: bool = False  # it computes nothing for now; no round waits for it, but it gives its state
    batch_s: Figure = 0.0  # what one micro-batch takes; nobody waits longer for it
    sketch: StateSketch | None = None  # of its state a few steps ago
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
    """Return the records of trainers and of assistants, and the role and voucher of each.

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
