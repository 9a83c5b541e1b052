"""When a peer may start its next forward pass: schedulers of "Elastic Consistency", sections 4.1, 5.

At step t a peer has its own complete gradient, and the arrived parts of the other peers' gradients. A scheduler decides
whether these parts are enough. All gradients of step t - ``max_delay`` must have arrived before step t ends. No
scheduler waits for lost peers. README.md has a table of all schedulers.

B (Table 1) bounds the distance of a peer's view from the global parameter: ``E ||x_t - v_t^i||^2
<= alpha^2 B^2`` (Definition 1). The global parameter x_t has all gradients of the steps before t. The view v_t^i has
the gradients that peer i has applied, and alpha is the learning rate. If two relaxations are combined, their constants
are added.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Literal

from colab_swarm.errors import require

RESOLUTION_S = 1e-3  # least waiting time: because clocks round, a shorter wait could end too early


@dataclass(frozen=True)
class StepFacts:
    peers: int  # p, of the group at its start
    m: float  # M, the root of the gradients' second moment, ``E ||g||^2 <= M^2``
    sigma: float  # the root of their variance, ``E ||g - E g||^2 <= sigma^2``
    gamma: float | None = 0.0  # of the codec, ``||Q(w) - w||^2 <= gamma ||w||^2``; None: unknown
    crashed: int = 0  # number of lost peers
    largest: float = 0.0  # largest norm of a gradient so far, which bounds the gradients that crashes lose


def bounded_staleness(peers: int, tau: int, m: float) -> float:
    """Return ``(p - 1) tau M / p``: message passing with asynchrony bounded by tau (Lemma 15)."""
    return (peers - 1) * tau * m / peers


def substitution(peers: int, count: int, sigma: float) -> float:
    """Return ``c count sigma / p``: the own gradient replaces ``count`` others until they arrive (sections B.3, B.4).

    The paper names no constant here. Lemmas 12 and 16 have c = 3. It holds for a loss with L-Lipschitz gradients if
    alpha <= 1 / (4 L d), where d is the delay in steps, and if each gradient has variance sigma^2. `Meter` averages
    sigma over peers, but two peers may differ by more than the average, at most by ``sqrt(2 (p - 1)) sigma``. So with 6
    peers or more, c is ``sqrt(2 (p - 1))``.
    """
    return max(3.0, math.sqrt(2 * (peers - 1))) * count * sigma / peers


def compression(gamma: float, m: float) -> float:
    """Return ``sqrt((2 - gamma) gamma / (1 - gamma)^3) M``: compression with error feedback (Lemma 18)."""
    return math.sqrt((2 - gamma) * gamma / (1 - gamma) ** 3) * m


@dataclass(frozen=True)
class StepStatus:
    """The open step t at one peer."""

    own_norm: float  # of this peer's gradient
    own_numel: int
    norms: tuple[float, ...]  # of the arrived part of step t's gradient, for each other peer that is not lost
    numels: tuple[int, ...]  # the numbers of values in these parts
    overdue: (
        int  # number of peers, without lost ones, whose step t - max_delay or an earlier one is incomplete
    )
    owed: int  # number of incomplete gradients (of one peer and step, up to t) of peers that are not lost
    lost: int  # number of lost peers
    waited_s: float  # since this peer's backward pass ended

    @property
    def missing(self) -> float:
        """Fraction of the other peers' values of step t that has not arrived."""
        expected = len(self.numels) * self.own_numel
        return 1 - sum(self.numels) / expected if expected else 0.0


class Scheduler(ABC):
    """Decides when a peer continues with its next step. Has no I/O."""

    stand_in = False  # whether this peer's gradient replaces missing values until they arrive
    single_steps = False  # whether each gradient is a separate update, not divided by p (equation 10)

    @property
    @abstractmethod
    def max_delay(self) -> int:
        """A step ends only after all gradients that are this many steps old have arrived."""

    def may_go_on(self, status: StepStatus) -> bool:
        """Return True if the next forward pass may begin."""
        return not status.overdue and self._enough(status)

    def _enough(self, status: StepStatus) -> bool:
        return True

    def ask_again_s(self, status: StepStatus) -> float | None:
        """Return the seconds until `may_go_on` becomes true without another event.

        Returns None if only the arrival of a gradient, or the loss of a peer, can make it true.
        """
        timeout_s: float = getattr(self, "timeout_s", 0.0)
        waits = status.waited_s < timeout_s and not self.may_go_on(status)
        if waits and self.may_go_on(replace(status, waited_s=timeout_s)):
            return max(RESOLUTION_S, timeout_s - status.waited_s)
        return None

    def bound(self, facts: StepFacts) -> float | None:
        """Return B, including the effects of codec and crashes; None if it is unknown for this codec."""
        if facts.gamma is None or facts.gamma >= 1:
            return None
        faults = self._faults(facts) * max(facts.m, facts.largest) / facts.peers  # Lemmas 13 and 14
        total = self._relaxed(facts) + faults + compression(facts.gamma, facts.m)
        if self.single_steps:
            # nothing is divided by p, and the last peer's view lacks the p - 1 gradients of the others in its step
            total = facts.peers * total + (facts.peers - 1) * facts.m
        return total

    def _faults(self, facts: StepFacts) -> int:
        if self.stand_in:
            # a stand-in is not corrected, and no peer knows whether the lost peer had computed that gradient
            return facts.crashed * (self.max_delay + 1)
        return facts.crashed

    def _relaxed(self, facts: StepFacts) -> float:
        return 0.0


@dataclass(frozen=True)
class Synchronous(Scheduler):
    """Perfectly consistent: waits for every gradient of the step."""

    max_delay = 0


@dataclass(frozen=True)
class NormBounded(Scheduler):
    """Continues when the norm received from each other peer is at least ``beta`` times this peer's norm (section 5).

    The paper is less strict: it compares the norm of all received gradients with this peer's norm. With ``beta=0`` the
    scheduler never waits for gradients of this step. With ``beta=1`` it waits for all of them. A small part of a
    gradient may have a large norm, so for each beta below 1, B is the bound of one step of delay. The measure ``l0``
    compares numbers of values instead of norms, as in the paper's relaxed variant.
    """

    beta: float
    measure: Literal["l2", "l0"] = "l2"

    max_delay = 1

    def __post_init__(self) -> None:
        require(0 <= self.beta <= 1, f"beta={self.beta}: choose 0 (never wait) to 1 (always wait)")
        require(
            self.measure in ("l2", "l0"),
            f"measure={self.measure!r} is unknown: choose 'l2' (norm) or 'l0' (count of values)",
        )

    def _enough(self, status: StepStatus) -> bool:
        own = status.own_norm
        arrived = status.norms
        if self.measure == "l0":
            own = status.own_numel
            arrived = status.numels
        for measured, numel in zip(arrived, status.numels, strict=True):
            is_whole = numel == status.own_numel
            suffices = self.beta < 1 and measured >= self.beta * own
            if not (is_whole or suffices):
                return False
        return True

    def _relaxed(self, facts: StepFacts) -> float:
        if self.beta == 1:
            return 0.0
        return bounded_staleness(facts.peers, 1, facts.m)


@dataclass(frozen=True)
class VarianceBounded(Scheduler):
    """Replaces late gradients by this peer's gradient; the next step corrects the difference (section 5)."""

    timeout_s: float  # how long to wait for missing gradients after this peer's backward pass

    max_delay = 1
    stand_in = True

    def __post_init__(self) -> None:
        _check_timeout(self.timeout_s)

    def _enough(self, status: StepStatus) -> bool:
        return status.waited_s >= self.timeout_s or not status.missing

    def _relaxed(self, facts: StepFacts) -> float:
        return 3 * facts.sigma  # Lemma 16


@dataclass(frozen=True)
class BoundedStaleness(Scheduler):
    """Waits only for gradients that are ``tau`` steps old; ``tau`` is at least 1 (section 4.1 c).

    With ``stand_in``, this peer's gradient replaces a late gradient until that gradient arrives. B is then a multiple
    of sigma instead of M. This is less if the gradients of all peers are similar (section B.4, `substitution`).

    With ``single_steps``, each gradient is a separate update, not divided by p, in the order of steps and peers
    (equation 10). So p peers need a p times lower learning rate. A gradient that arrives in two parts makes two
    updates. B is then ``(p - 1) (tau + 1) M``: the bound of Lemma 15, plus the other peers' gradients of the step.
    """

    tau: int
    stand_in: bool = field(default=False, kw_only=True)
    single_steps: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        require(self.tau >= 1, f"tau={self.tau} allows no delay: choose at least 1, or use Synchronous()")
        require(
            not (self.stand_in and self.single_steps),
            "stand_in=True needs parallel steps: the paper has no bound in sigma for single ones. Choose one of both",
        )

    @property
    def max_delay(self) -> int:
        return self.tau

    def _relaxed(self, facts: StepFacts) -> float:
        if self.stand_in:
            return substitution(facts.peers, (facts.peers - 1) * self.tau, facts.sigma)
        return bounded_staleness(facts.peers, self.tau, facts.m)


@dataclass(frozen=True)
class CrashTolerant(Scheduler):
    """Synchronous, except that ``f`` gradients may be missing after a timeout.

    The scheduler never waits for a lost peer. It applies late gradients when they arrive, because Lemma 14 bounds the
    gradients that are missing at any one time. Each lost peer reduces the number of gradients of slow peers that may be
    missing. If more than f peers are lost, the other peers continue with a larger bound, and wait for slow peers.

    With ``stand_in``, this peer's gradient replaces a missing gradient until that gradient arrives (Algorithm 1,
    section B.3). B is then ``c f sigma / p`` (`substitution`). This bound holds for delays, and for a peer that crashes
    while it sends a gradient. After other crashes, the stand-in replaces a gradient that was never computed. Therefore
    each lost peer makes B ``(f + 1) G / p`` larger, where G is the largest norm of a gradient so far.
    """

    f: int  # at least 1
    timeout_s: float  # how long to wait for a peer that is not lost
    stand_in: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        require(self.f >= 1, f"f={self.f} tolerates nothing: choose at least 1, or use Synchronous()")
        _check_timeout(self.timeout_s)

    @property
    def max_delay(self) -> int:
        """f. Streams keep their order, so a peer whose gradient is f steps late also owes the f later gradients."""
        return self.f

    def _enough(self, status: StepStatus) -> bool:
        tolerable = status.owed + status.lost <= self.f and status.waited_s >= self.timeout_s
        return not status.owed or tolerable

    def _relaxed(self, facts: StepFacts) -> float:
        return substitution(facts.peers, self.f, facts.sigma) if self.stand_in else 0.0

    def _faults(self, facts: StepFacts) -> int:
        return super()._faults(facts) if self.stand_in else max(self.f, facts.crashed)


def _check_timeout(timeout_s: float) -> None:
    require(timeout_s >= 0, f"timeout_s={timeout_s} is invalid: choose seconds, 0 or more")


GAIN = 0.05  # change of beta after a step whose squared distance differs by the square of the target
MARGIN = 0.7  # the mean squared distance to aim at, relative to the square of the target
MOST = 2.0  # limit of the integrated beta; while it is above 1, after a large distance, many steps wait


@dataclass(eq=False)
class AdaptiveBeta(Scheduler):
    """`NormBounded`, with the smallest beta that keeps the measured distance under ``max_inconsistency``.

    ``max_inconsistency`` limits the root mean square of ``||x_t - v_t^i|| / alpha``, in the unit of
    gradients (`Meter.measured`). The limit is on a mean square, and gradients arrive in few, large buckets. So
    ``beta``, which starts at 1, integrates the deviation of the squared distance from its target. If no constant beta
    gives the target, beta oscillates, and the mean distance meets the target. B is the bound of one step of delay.
    """

    max_inconsistency: float
    measure: Literal["l2", "l0"] = field(default="l2", kw_only=True)
    _level: float = field(default=1.0, init=False, repr=False)

    max_delay = 1

    def __post_init__(self) -> None:
        require(
            self.max_inconsistency > 0,
            f"max_inconsistency={self.max_inconsistency} allows no delay: use Synchronous()",
        )

    @property
    def beta(self) -> float:
        return min(1.0, self._level)

    def on_measured(self, distance: float) -> None:
        off = (distance / self.max_inconsistency) ** 2 - MARGIN
        self._level = min(max(self._level + GAIN * off, 0.0), MOST)

    def _enough(self, status: StepStatus) -> bool:
        return NormBounded(self.beta, self.measure)._enough(status)

    def _relaxed(self, facts: StepFacts) -> float:
        return bounded_staleness(facts.peers, 1, facts.m)
