"""When a peer may start its next forward pass: schedulers of "Elastic Consistency", sections 4.1, 5.

At step t a peer has its own complete gradient, and the parts of the others' that have arrived. A
scheduler decides whether that is enough. All of step t - ``max_delay`` must have arrived before
step t ends. No scheduler waits for lost peers. README.md has a table of all.

B (Table 1) bounds the distance of a peer's view from the global parameter: ``E ||x_t - v_t^i||^2
<= alpha^2 B^2`` (Definition 1). x_t has every gradient generated before step t, v_t^i those that
peer i has applied, and alpha is the learning rate. The constants of two relaxations add up.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Literal

from colab_swarm.errors import require

RESOLUTION_S = 1e-3  # least waiting time: clocks round, a shorter one could end too early


@dataclass(frozen=True)
class StepFacts:
    peers: int  # p, of the group at its start
    m: float  # M, the root of the gradients' second moment, ``E ||g||^2 <= M^2``
    sigma: float  # the root of their variance, ``E ||g - E g||^2 <= sigma^2``
    gamma: float | None = 0.0  # of the codec, ``||Q(w) - w||^2 <= gamma ||w||^2``; None: unknown
    crashed: int = 0  # number of lost peers
    largest: float = 0.0  # norm of a gradient so far, which bounds what crashes lose


def bounded_staleness(peers: int, tau: int, m: float) -> float:
    """``(p - 1) tau M / p``: message passing, tau-bounded asynchrony (Lemma 15)."""
    return (peers - 1) * tau * m / peers


def substitution(peers: int, count: int, sigma: float) -> float:
    """``c count sigma / p``: the own gradient replaces ``count`` others until they arrive (sections B.3, B.4).

    The paper names no constant here; c = 3 is that of Lemmas 12 and 16. It holds for a loss with
    L-Lipschitz gradients if alpha <= 1 / (4 L d), d the delay in steps, and every gradient has
    variance sigma^2. `Meter` averages sigma over peers, and two may differ by more than the
    rest: by ``sqrt(2 (p - 1)) sigma`` at most. So with 6 peers or more, that is c.
    """
    return max(3.0, math.sqrt(2 * (peers - 1))) * count * sigma / peers


def compression(gamma: float, m: float) -> float:
    """``sqrt((2 - gamma) gamma / (1 - gamma)^3) M``: compression with error feedback (Lemma 18)."""
    return math.sqrt((2 - gamma) * gamma / (1 - gamma) ** 3) * m


@dataclass(frozen=True)
class StepStatus:
    """The open step t at one peer."""

    own_norm: float  # of its own gradient
    own_numel: int
    norms: tuple[float, ...]  # of the arrived part of step t's gradient, by other peer that is not lost
    numels: tuple[int, ...]  # the number of these values
    overdue: int  # peers, not lost, that still owe something of step t - max_delay or earlier
    owed: int  # incomplete gradients (of one peer and step, up to t) of peers that are not lost
    lost: int  # number of lost peers
    waited_s: float  # since its own backward pass ended

    @property
    def missing(self) -> float:
        """Share of the others' values of step t that has not arrived."""
        expected = len(self.numels) * self.own_numel
        return 1 - sum(self.numels) / expected if expected else 0.0


class Scheduler(ABC):
    """Decides when a peer continues with its next step. Has no I/O."""

    stand_in = False  # whether the own gradient replaces missing values until they arrive
    single_steps = False  # whether each gradient is an update of its own, not divided by p (equation 10)

    @property
    @abstractmethod
    def max_delay(self) -> int:
        """A step ends only after all gradients of this age, in steps, have arrived."""

    def may_go_on(self, status: StepStatus) -> bool:
        """True if the next forward pass may begin."""
        return not status.overdue and self._enough(status)

    def _enough(self, status: StepStatus) -> bool:
        return True

    def ask_again_s(self, status: StepStatus) -> float | None:
        """Seconds until `may_go_on` is true without another event; None: only an arrival or a loss changes it."""
        timeout_s: float = getattr(self, "timeout_s", 0.0)
        waits = status.waited_s < timeout_s and not self.may_go_on(status)
        if waits and self.may_go_on(replace(status, waited_s=timeout_s)):
            return max(RESOLUTION_S, timeout_s - status.waited_s)
        return None

    def bound(self, facts: StepFacts) -> float | None:
        """Return B, codec and crashes included; None: unknown for this codec."""
        if facts.gamma is None or facts.gamma >= 1:
            return None
        faults = self._faults(facts) * max(facts.m, facts.largest) / facts.peers  # Lemmas 13 and 14
        total = self._relaxed(facts) + faults + compression(facts.gamma, facts.m)
        if self.single_steps:
            # nothing is divided by p, and the last peer's view lacks its step's p - 1 gradients of the others
            total = facts.peers * total + (facts.peers - 1) * facts.m
        return total

    def _faults(self, facts: StepFacts) -> int:
        if self.stand_in:
            # a stand-in stays, and no peer knows whether the lost one computed that gradient, or for whom
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
    """Continues when the received norm of every other peer is at least ``beta`` times the own norm (section 5).

    This is stricter than the paper, which compares the norm of all that was received with the own.
    With ``beta=0`` it never waits for this step's gradients, with 1 for everything. The bound has
    one step of delay for every beta below 1: a small part of a gradient may have a large norm. The
    measure ``l0`` is the count of values, the paper's relaxed variant.
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
    """The own gradient replaces what is late, and is corrected in the next step (section 5)."""

    timeout_s: float  # how long to wait for missing gradients after the own backward pass

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
    """Waits only for gradients that are ``tau`` steps old, at least 1 (section 4.1 c).

    With ``stand_in`` the own gradient replaces what is late, and is corrected when that arrives: then
    B is in sigma, which is less where all gradients are alike (section B.4, `substitution`). With
    ``single_steps`` each gradient is an update of its own, in full, in the order of steps and
    peers (equation 10); one that arrives in two parts is two. So p peers need a p times lower
    learning rate. B is then ``(p - 1) (tau + 1) M``: Lemma 15, and the others' gradients of the step.
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
    """Synchronous, but ``f`` gradients may be missing: of lost peers at once, of slow ones after a timeout.

    Late gradients are applied when they arrive: Lemma 14 bounds what is missing at any one time. Lost peers use up the
    allowance. If more than f are lost, the others continue with a larger bound, and wait for slow peers.

    With ``stand_in`` the own gradient replaces what is missing, and is corrected when that arrives
    (Algorithm 1, section B.3): B is ``3 f sigma / p`` (`substitution`). It holds for delays, and for a
    peer that crashes while it sends a gradient. Other crashes leave a stand-in for a gradient
    that was never computed. Once a peer is lost, B allows for that: ``(f + 1) M / p`` more.
    """

    f: int  # at least 1
    timeout_s: float  # how long to wait for a peer that is not lost
    stand_in: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        require(self.f >= 1, f"f={self.f} tolerates nothing: choose at least 1, or use Synchronous()")
        _check_timeout(self.timeout_s)

    @property
    def max_delay(self) -> int:
        """f: streams keep their order, so a gradient that late is not the only one missing."""
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


GAIN = 0.05  # change of beta after a step whose squared distance is off by the square of the target
MARGIN = 0.7  # mean squared distance to aim at, as a share of the target's square
MOST = 2.0  # limit of the integrated beta: beyond 1, many steps wait after a large distance


@dataclass(eq=False)
class AdaptiveBeta(Scheduler):
    """`NormBounded`, with the smallest beta that keeps the measured distance under ``max_inconsistency``.

    That is the target of the root mean square of ``||x_t - v_t^i|| / alpha``, in the unit of
    gradients (`Meter.measured`). Bounds are on the mean square, and gradients arrive in few, large
    buckets. So ``beta``, at first 1, integrates the deviation of the squared distance from its target:
    where no constant beta fits, it oscillates and the mean fits. The bound has one step of delay.
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
