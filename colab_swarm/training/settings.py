"""Inputs of a collaboration: the peer's services, how to train, and how to stay within a traffic budget.

A peer decides after each round how to save traffic, in the order of the cost to the swarm. First it
stops reducing for others, if another peer reduces and the volume is bounded (a bound on speed makes
its share smaller, see `averaging.strategy`). Then it sends 8 bits a value. Then it requests more
local steps between two rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypedDict

from colab_swarm.averaging.group import Group, GroupFormationSettings
from colab_swarm.averaging.matchmaking import PrefixRouter
from colab_swarm.averaging.round import Averager, RoundResult
from colab_swarm.averaging.strategy import encoded_bytes
from colab_swarm.dht.service import RunServices
from colab_swarm.net.peers import PeerId, Peers
from colab_swarm.tensors.codecs import Precision, mean_codec_for
from colab_swarm.training.progress import MAX_LOCAL_STEPS

ROUNDS_PART = 0.95
"""Part of the budget for rounds; the rest is for all other traffic."""
ROUND_PART = 0.5
"""Longest round at the budget's speed, as a part of the time in which the swarm computes: all peers wait for it."""
SAVING = "int8"


@dataclass(frozen=True)
class TrafficBudget:
    """A limit on a peer's traffic.

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
        """Limit of the links in each direction, bits a second."""
        return None if self.mbit_s is None else self.mbit_s * 1e6

    def volume_ratio(self, total_bytes: float, seconds: float) -> float:
        """Return the traffic in relation to ``gb_per_hour``; up to 1 is within the budget."""
        if self.gb_per_hour is None:
            return 0.0
        return total_bytes / (ROUNDS_PART * self.gb_per_hour * 1e9 * seconds / 3600)

    def pace_ratio(self, sent_bytes: float, received_bytes: float, compute_s: float) -> float:
        """Return a round's time at ``mbit_s`` in relation to its part of the time in which the swarm computes."""
        if self.mbit_s is None:
            return 0.0
        return max(sent_bytes, received_bytes) * 8 / (self.mbit_s * 1e6 * compute_s * ROUND_PART)


@dataclass(frozen=True)
class CommunicationPlan:
    """How a peer stays within its budget."""

    reduces: bool  # for other peers
    precision: str  # of its contributions
    local_steps: int  # that it requests between two rounds
    mbit_s: float  # resulting traffic of its rounds, in the busier direction
    within: bool  # whether that is within the budget

    def like(self, other: CommunicationPlan | None) -> bool:
        """Return True if the plans differ in their traffic at most."""
        return other is not None and replace(other, mbit_s=self.mbit_s) == self

    def __str__(self) -> str:
        reducing = "reduces" if self.reduces else "reduces nothing"
        steps = f", {self.local_steps} local steps" if self.local_steps > 1 else ""
        verdict = "within the budget" if self.within else "OVER the budget: nothing is left to save"
        return f"{reducing}, sends {self.precision}{steps}: {self.mbit_s:.3g} Mbit/s, {verdict}"


class TrafficBudgetPolicy:
    """Chooses one peer's `CommunicationPlan`.

    Args:
        settings: with a budget.
    """

    def __init__(self, settings: TrainingSettings, me: PeerId) -> None:
        assert settings.budget is not None
        self._budget, self._me = settings.budget, me
        self._precision, self._auto_steps = settings.compression, settings.auto_steps
        self._began_at: float | None = None
        self._ended_at = 0.0
        self._total_bytes = 0.0
        self._step_s: float | None = None

    def on_round(self, sent_bytes: float, received_bytes: float, steps: int, *, now: float) -> None:
        """Count a round that ended after ``steps`` steps of the swarm."""
        if self._began_at is None:
            self._began_at = self._ended_at = now
            return
        self._total_bytes += sent_bytes + received_bytes
        step_s = (now - self._ended_at) / steps
        self._step_s = step_s if self._step_s is None else (step_s + self._step_s) / 2
        self._ended_at = now

    def choose(self, group: Group, compute_s: float) -> CommunicationPlan | None:
        """Return the plan after a round of ``group``; None while the time of a step is unknown.

        Args:
            compute_s: time in which the swarm computes a target batch.
        """
        if self._step_s is None:
            return None
        reduces, precision, steps = True, self._precision, 1
        others_reduce = any(member.share > 0 for member in group.members if member.id != self._me)
        if others_reduce and self._volume_ratio(self._traffic(group, reduces, precision)) > 1:
            reduces = False  # a slow link gets a smaller share by the strategy, which does not save volume
        over = self._ratio(self._traffic(group, reduces, precision), compute_s)
        numel = group.terms.numel
        smaller = encoded_bytes(SAVING, numel) < encoded_bytes(self._precision, numel)
        if smaller and over > 1:
            precision = SAVING
            over = self._ratio(self._traffic(group, reduces, precision), compute_s)
        if over > 1 and self._auto_steps:
            steps = min(math.ceil(over), MAX_LOCAL_STEPS)
        mbit_s = max(self._traffic(group, reduces, precision)) * 8e-6 / (steps * self._step_s)
        return CommunicationPlan(reduces, precision, steps, mbit_s, over <= steps)

    def _ratio(self, traffic: tuple[float, float], compute_s: float) -> float:
        return max(self._volume_ratio(traffic), self._budget.pace_ratio(*traffic, compute_s))

    def _volume_ratio(self, traffic: tuple[float, float]) -> float:
        """Return a round's volume in relation to the budget, and more if the traffic so far was over it."""
        seconds = self._ended_at - (self._began_at or self._ended_at)
        overdrawn = self._budget.volume_ratio(self._total_bytes, seconds) if seconds else 0.0
        step_s = max(self._step_s or 0.0, 1e-6)
        return self._budget.volume_ratio(sum(traffic), step_s) * max(1.0, overdrawn)

    def _traffic(self, group: Group, reduces: bool, precision: str) -> tuple[float, float]:
        """Return the bytes that this peer sends and receives in a round."""
        others = len(group.members) - 1
        total = sum(member.share for member in group.members)
        planned = sum(member.share for member in group.members if member.id == self._me) / total
        share = (planned or 1 / len(group.members)) if reduces else 0.0
        mine, mean = (
            encoded_bytes(precision, group.terms.numel),
            encoded_bytes(group.terms.mean_codec, group.terms.numel),
        )
        theirs = encoded_bytes(group.terms.codec, group.terms.numel)
        sent = (1 - share) * mine + share * others * mean
        received = (1 - share) * mean + share * others * theirs
        return sent, received


MEASURABLE_BYTES = 1 << 18
"""A round that moved less says nothing about bandwidth."""
KEPT_PER_ROUND = 0.98
ROUNDS = 4
"""Number of rounds before their best counts: a single round may have waited for anything."""


class Rate:
    """Bandwidth of one direction, bits per second, from links and from rounds.

    Rounds are often shorter than the second over which links measure. The best round counts for
    long but decays, because bandwidth changes.
    """

    def __init__(self) -> None:
        self._best_bps = 0.0
        self._rounds = 0

    def on_round(self, size_bytes: int, seconds: float) -> None:
        """Count the traffic of a round."""
        self._best_bps *= KEPT_PER_ROUND
        if size_bytes >= MEASURABLE_BYTES and seconds > 0:
            self._best_bps = max(self._best_bps, 8 * size_bytes / seconds)
            self._rounds += 1

    def known(self, measured_bps: float | None, most_bps: float | None = None) -> float | None:
        """Return the best rate of links and rounds, bounded by ``most_bps``; None if there is no measurement."""
        seen_bps = self._best_bps if self._rounds >= ROUNDS else 0.0
        best_bps = max(measured_bps or 0.0, seen_bps)
        return min(best_bps, most_bps or best_bps) if best_bps else most_bps


class LinkBandwidth:
    """Measured bandwidth of a peer's links in both directions, within its budget."""

    def __init__(self, peers: Peers, budget: TrafficBudget | None = None) -> None:
        self._peers = peers
        self._most_bps = None if budget is None else budget.rate_bps
        self._upload, self._download = Rate(), Rate()
        if self._most_bps is not None:
            peers.limit(self._most_bps)

    def on_round(self, result: RoundResult) -> None:
        """Count the traffic of a round."""
        seconds = result.seconds["exchange"]
        self._upload.on_round(result.sent_bytes, seconds)
        self._download.on_round(result.received_bytes, seconds)

    def known(self) -> tuple[float | None, float | None]:
        """Return upload and download, bits per second; None where not measured."""
        links = self._peers.statistics()
        upload_bps = self._upload.known(links.upload_bps, self._most_bps)
        return upload_bps, self._download.known(links.download_bps, self._most_bps)


@dataclass(frozen=True, kw_only=True)
class PeerServices(RunServices):
    """The services of a peer that may train.

    Attributes:
        pace: ``pace(samples)`` is the compute time of a simulated peer, seconds.
    """

    router: PrefixRouter
    averager: Averager
    pace: Callable[[float], float] | None = None


class AveragingOptions(TypedDict, total=False):
    """How peers average: further options of `Swarm.optimizer`.

    Attributes:
        compression: of gradients on the wire: float32, float16, bfloat16, int8, adaptive (int8;
            small tensors float16), onebit, or topk and a share, as in topk:0.01. Warning: onebit
            and topk are biased without ``error_feedback``, and train a worse model.
        mean_compression: of averaged gradients; by default the same, but float16 with onebit and
            topk, because a mean has no error feedback.
        error_feedback: add what compression cut off a gradient to the next one; costs two vectors of memory.
        overlap: average, and take the optimizer's step on copies in main memory, while this peer
            computes on. Updates come exactly one round late (DeDLOC, section 3.2; ZeRO-Offload).
        local_steps: steps of ``target_batch_size`` samples that every peer takes alone before the swarm averages the
            resulting parameters (DiLoCo), for as many times less traffic; "auto": as many as the peers' budgets need.
        matchmaking_timeout_s: how long a round waits for slow peers.
    """

    compression: str
    mean_compression: str
    error_feedback: bool
    overlap: bool
    local_steps: int | Literal["auto"]
    matchmaking_timeout_s: float


@dataclass(frozen=True)
class TrainingSettings:
    """How a collaboration trains; see `AveragingOptions` for the fields that are not listed.

    Attributes:
        max_report_s: longest time between two progress records of a peer; one that vanished without
            its links breaking is forgotten after four times as long.
        max_replay_bytes: memory for the means that a late joiner collects while it downloads the state.
    """

    prefix: str  # names the collaboration within the run; peers of one prefix train one model
    target_batch_size: float  # samples of all peers together for one global step
    compression: str = "float32"
    mean_compression: str = "float32"
    error_feedback: bool = False
    local_steps: int | Literal["auto"] = 1
    budget: TrafficBudget | None = None  # for this peer's traffic
    matchmaking_timeout_s: float = 5.0
    max_matchmaking_s: float = 60.0  # how long a round waits for peers that announced to finish a batch
    round_timeout_s: float = 180.0  # bound on matchmaking and averaging of one round together
    max_report_s: float = 60.0
    max_replay_bytes: int = 1 << 30

    @classmethod
    def of(
        cls, prefix: str, target_batch_size: float, budget: TrafficBudget | None, options: AveragingOptions
    ) -> TrainingSettings:
        """Return the settings for a user's options.

        Raises:
            ValueError, TypeError: an option is unknown or not usable.
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
    def formation(self) -> GroupFormationSettings:
        """How long a round waits for its members."""
        slack_s = self.matchmaking_timeout_s
        return GroupFormationSettings(window_s=slack_s, slack_s=slack_s, max_window_s=self.max_matchmaking_s)

    @property
    def auto_steps(self) -> bool:
        """True if the number of local steps follows the budget."""
        return self.local_steps == "auto"
