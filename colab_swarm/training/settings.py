"""What a collaboration is given: the peer's services, and how to train.

How a peer keeps within its traffic budget: what it can save, in the order of what that costs the swarm.

Pure decisions, looked at after each round: first it reduces nothing for the others (if others do, and the volume is
bounded; a bound on speed makes its share smaller, see `averaging.strategy`), then it sends 8 bits a value, then it asks
for more local steps between two rounds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, TypedDict

from colab_swarm.averaging.group import Group
from colab_swarm.averaging.matchmaking import PrefixRouter
from colab_swarm.averaging.round import Averager
from colab_swarm.dht.service import DHT
from colab_swarm.events import EventLog
from colab_swarm.net.peers import PeerId, Peers
from colab_swarm.runtime import PauseGate
from colab_swarm.tensors.codecs import Precision, mean_codec_for
from colab_swarm.training.progress import MAX_LOCAL_STEPS

SECONDS_PER_HOUR = 3600

KEPT = 0.95

"""Part of the budget that rounds may use; the rest is for all that is not a round."""

ROUND_PART = 0.5

"""Of the time in which the swarm computes; a round may take that long at the speed of the budget, for all wait."""

SAVING = "int8"


@dataclass(frozen=True)
class TrafficBudget:
    """What a peer's traffic may be.

    Attributes:
        gb_per_hour: 10^9 bytes an hour, both directions together.
        mbit_s: 10^6 bits a second in each direction; links never go faster.
    """

    gb_per_hour: float | None = None
    mbit_s: float | None = None

    def __post_init__(self) -> None:
        given = [limit for limit in (self.gb_per_hour, self.mbit_s) if limit is not None]
        if not given or not all(0 < limit < math.inf for limit in given):
            raise ValueError(f"{self}: give gb_per_hour, mbit_s or both, each over 0")

    @property
    def rate_bps(self) -> float | None:
        """The most that links may carry in each direction, bits a second."""
        return None if self.mbit_s is None else self.mbit_s * 1e6

    def times_over_volume(self, sent_bytes: float, received_bytes: float, seconds: float) -> float:
        """How many times over ``gb_per_hour`` so much traffic in so much time is; up to 1 is within."""
        if self.gb_per_hour is None:
            return 0.0
        return (sent_bytes + received_bytes) / (KEPT * self.gb_per_hour * 1e9 * seconds / SECONDS_PER_HOUR)

    def times_over_pace(self, sent_bytes: float, received_bytes: float, compute_s: float) -> float:
        """How many times too long a round takes at ``mbit_s``, beside the time in which the swarm computes."""
        if self.mbit_s is None:
            return 0.0
        return max(sent_bytes, received_bytes) * 8 / (self.mbit_s * 1e6 * compute_s * ROUND_PART)


@dataclass(frozen=True)
class CommunicationPlan:
    """What a peer does to keep within its budget.

    Attributes:
        reduces: for the others.
        precision: of its contributions.
        local_steps: that it asks for between two rounds.
        mbit_s: that its rounds take then, in the busier direction.
        within: whether that is within the budget.
    """

    reduces: bool
    precision: str
    local_steps: int
    mbit_s: float
    within: bool

    def like(self, other: CommunicationPlan | None) -> bool:
        """Whether it differs from another in its traffic at most."""
        return other is not None and replace(other, mbit_s=self.mbit_s) == self

    def __str__(self) -> str:
        reducing = "reduces" if self.reduces else "reduces nothing"
        steps = f", {self.local_steps} local steps" if self.local_steps > 1 else ""
        verdict = "within the budget" if self.within else "OVER the budget: nothing is left to save"
        return f"{reducing}, sends {self.precision}{steps}: {self.mbit_s:.3g} Mbit/s, {verdict}"


class TrafficBudgetPolicy:
    """Chooses for one peer.

    Args:
        precision: that the group has agreed on.
        auto_steps: whether it may ask for local steps.
    """

    def __init__(self, budget: TrafficBudget, me: PeerId, *, precision: str, auto_steps: bool) -> None:
        self._budget, self._me = budget, me
        self._precision, self._auto_steps = precision, auto_steps
        self._began_at: float | None = None
        self._ended_at = 0.0
        self._sent = self._received = 0.0
        self._step_s: float | None = None

    def on_round(self, sent_bytes: float, received_bytes: float, steps: int, *, now: float) -> None:
        """A round ended that came after so many steps of the swarm."""
        if self._began_at is None:
            self._began_at = self._ended_at = now
            return
        self._sent += sent_bytes
        self._received += received_bytes
        step_s = (now - self._ended_at) / steps
        self._step_s = step_s if self._step_s is None else (step_s + self._step_s) / 2
        self._ended_at = now

    def choose(self, group: Group, compute_s: float) -> CommunicationPlan | None:
        """What to do after a round of ``group``; None while it is not known how long a step takes.

        Args:
            compute_s: that the swarm needs to compute a target batch.
        """
        if self._step_s is None:
            return None
        reduces, precision, steps = True, self._precision, 1
        others_reduce = any(member.share > 0 for member in group.members if member.id != self._me)
        if others_reduce and self._volume(group, reduces, precision) > 1:
            reduces = False  # a slow line gets a smaller share by the strategy; volume is saved by none
        narrow = self._bytes(SAVING, group) < self._bytes(self._precision, group)
        if narrow and self._over(group, reduces, precision, compute_s) > 1:
            precision = SAVING
        over = self._over(group, reduces, precision, compute_s)
        if over > 1 and self._auto_steps:
            steps = min(math.ceil(over), MAX_LOCAL_STEPS)
        sent, received = self._traffic(group, reduces=reduces, precision=precision)
        mbit_s = max(sent, received) * 8e-6 / (steps * self._step_s)
        return CommunicationPlan(reduces, precision, steps, mbit_s, over <= steps)

    def _volume(self, group: Group, reduces: bool, precision: str) -> float:
        sent, received = self._traffic(group, reduces=reduces, precision=precision)
        step_s = max(self._step_s or 0.0, 1e-6)
        return self._budget.times_over_volume(sent, received, step_s) * self._overdrawn()

    def _over(self, group: Group, reduces: bool, precision: str, compute_s: float) -> float:
        traffic = self._traffic(group, reduces=reduces, precision=precision)
        pace = self._budget.times_over_pace(*traffic, compute_s)
        return max(self._volume(group, reduces, precision), pace)

    def _overdrawn(self) -> float:
        """How many times over the budget the traffic was until now; at least 1."""
        seconds = self._ended_at - (self._began_at or self._ended_at)
        return (
            max(1.0, self._budget.times_over_volume(self._sent, self._received, seconds)) if seconds else 1.0
        )

    def _traffic(self, group: Group, *, reduces: bool, precision: str) -> tuple[float, float]:
        """Bytes that a round makes this peer send and receive."""
        others = len(group.members) - 1
        total = sum(member.share for member in group.members)
        planned = sum(member.share for member in group.members if member.id == self._me) / total
        share = (planned or 1 / len(group.members)) if reduces else 0.0
        mine, mean = self._bytes(precision, group), self._bytes(group.mean_codec, group)
        theirs = self._bytes(group.codec, group)
        sent = (1 - share) * mine + share * others * mean
        received = (1 - share) * mean + share * others * theirs
        return sent, received

    @staticmethod
    def _bytes(precision: str, group: Group) -> int:
        return Precision(precision, fine=0).at(0).encoded_bytes(group.numel)


@dataclass(frozen=True)
class PeerServices:
    """What a peer's services share.

    Attributes:
        pace: ``pace(samples)`` is the compute time that a simulated peer takes, seconds.
        gate: closed while this peer's background work is to stand still.
    """

    peers: Peers
    rooms: PrefixRouter
    dht: DHT
    averager: Averager
    events: EventLog
    rng: random.Random
    pace: Callable[[float], float] | None = None
    gate: PauseGate = field(default_factory=PauseGate)


class AveragingOptions(TypedDict, total=False):
    """How peers average; what `Swarm.optimizer` takes besides.

    Attributes:
        compression: of gradients on the wire: float32, float16, bfloat16, int8, adaptive (int8; small tensors
            float16), onebit, or topk and a share, as in topk:0.01. Warning: onebit and topk are biased without
            ``error_feedback``, and train a worse model.
        mean_compression: of averaged gradients; by default the same, but float16 with onebit and topk, because no
            peer feeds back what they would cut off a mean.
        error_feedback: what compression cut off a gradient is added to the next; costs two vectors of memory.
        overlap: updates come exactly one round late (DeDLOC, section 3.2; ZeRO-Offload): averaging and the optimizer's
            step, on copies in main memory, run while this peer computes on.
        local_steps: of ``target_batch_size`` samples each, that every peer takes alone before the swarm averages where
            they led (DiLoCo): so many times less traffic; "auto": as many as the peers' budgets need.
        matchmaking_timeout_s: how long a round waits for peers that are slow to come.
    """

    compression: str
    mean_compression: str
    error_feedback: bool
    overlap: bool
    local_steps: int | Literal["auto"]
    matchmaking_timeout_s: float


@dataclass(frozen=True)
class TrainingSettings:
    """How a collaboration trains.

    Attributes:
        prefix: names the collaboration within the run; peers of one prefix train one model.
        target_batch_size: samples of all peers together for one global step.
        compression, mean_compression: of gradients and their means (see `colab_swarm.tensors.codecs.Precision`).
        local_steps: between two rounds, at least (DiLoCo); 1: every step is the swarm's; "auto": as the budget needs.
        budget: for this peer's traffic.
        error_feedback: what compression cut off a gradient is added to the next.
        matchmaking_timeout_s: how long a round waits for peers that do not answer at all.
        max_matchmaking_s: how long it waits for peers that said they are finishing a batch.
        round_timeout_s: bound on matchmaking and averaging of one round together.
        max_report_s: longest time between two progress records of a peer; one that vanished without its links
            breaking is forgotten after four times as long.
        max_replay_bytes: memory for the means a newcomer keeps while it downloads the state.
    """

    prefix: str
    target_batch_size: float
    compression: str = "float32"
    mean_compression: str = "float32"
    error_feedback: bool = False
    local_steps: int | Literal["auto"] = 1
    budget: TrafficBudget | None = None
    matchmaking_timeout_s: float = 5.0
    max_matchmaking_s: float = 60.0
    round_timeout_s: float = 180.0
    max_report_s: float = 60.0
    max_replay_bytes: int = 1 << 30

    @classmethod
    def of(
        cls, prefix: str, target_batch_size: float, budget: TrafficBudget | None, options: AveragingOptions
    ) -> TrainingSettings:
        """From what a user gives.

        Raises:
            ValueError, TypeError: a setting is not usable, or is none.
        """
        given = {"mean_compression": mean_codec_for(options.get("compression", "float32")), **options}
        overlap = given.pop("overlap", False)
        settings = cls(prefix, target_batch_size, budget=budget, **given)  # type: ignore[arg-type]
        if settings.local_steps != 1 and (overlap or settings.error_feedback):
            raise ValueError("local_steps go neither with overlap nor with error_feedback: choose one")
        return settings

    def __post_init__(self) -> None:
        size, steps = self.target_batch_size, self.local_steps
        if not size > 0:
            raise ValueError(f"target_batch_size={size}: pass the samples per global step, such as 4096")
        Precision(self.compression), Precision(self.mean_compression)
        if steps != "auto" and not (isinstance(steps, int) and 1 <= steps <= MAX_LOCAL_STEPS):
            raise ValueError(f"local_steps={steps!r}: pass 1 to {MAX_LOCAL_STEPS}, or 'auto'")

    @property
    def auto_steps(self) -> bool:
        """Whether the number of local steps follows the budget."""
        return self.local_steps == "auto"
