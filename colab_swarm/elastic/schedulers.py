"""When a peer may start its next forward pass: the schedulers of "Elastic Consistency", sections 4.1 and 5.

At step t a peer has its own gradient whole, and of the others' what has arrived. A scheduler says whether that is
enough. None lets a peer run further ahead than ``max_delay`` steps: at its default of one step, all of step t - 1
must have arrived before step t ends. Peers that are lost are waited for by none.

    ==================  ==================================================  =========  =====================
    scheduler           goes on from step t when                            max_delay  B (Table 1)
    ==================  ==================================================  =========  =====================
    Synchronous         everything arrived                                  0          0
    NormBounded         a beta-fraction of one's own norm arrived           1          (p - 1) M / p
    VarianceBounded     everything arrived, or timeout_s passed             1          3 sigma
    BoundedStaleness    everything up to step t - tau arrived               tau        (p - 1) tau M / p
    CrashTolerant       as Synchronous; after timeout_s f gradients may     f          f M / p
                        be missing
    ==================  ==================================================  =========  =====================

How far a peer's view may be from the global parameter: the constants B of "Elastic Consistency", Table 1.

A view satisfies ``E ||x_t - v_t^i||^2 <= alpha^2 B^2`` (Definition 1). x_t holds every gradient that was generated
before step t, v_t^i what peer i has applied of them, alpha is the learning rate. Where two relaxations meet, their
constants add up (triangle inequality).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True)
class StepFacts:
    """What is known of a run.

    Attributes:
        peers: p, of the group at its start.
        m: M, the root of the gradients' second moment, ``E ||g||^2 <= M^2``.
        sigma: the root of their variance, ``E ||g - E g||^2 <= sigma^2``.
        gamma: of the codec, ``||Q(w) - w||^2 <= gamma ||w||^2``; its residuals are fed back. None: nothing is known.
        crashed: peers that were lost.
        largest: norm of any gradient so far. What crashes lose is lost for good, and too little to take a mean of: it
            is bounded by this.
    """

    peers: int
    m: float
    sigma: float
    gamma: float | None = 0.0
    crashed: int = 0
    largest: float = 0.0


def bounded_staleness(peers: int, tau: int, m: float) -> float:
    """``(p - 1) tau M / p``: message passing, tau-bounded asynchrony (Lemma 15)."""
    return (peers - 1) * tau * m / peers


def faults(peers: int, f: int, m: float) -> float:
    """``f M / p``: synchronous, at most f crashes, or f messages that have not come (Lemmas 13 and 14)."""
    return f * m / peers


def variance_bounded(sigma: float) -> float:
    """``3 sigma``: the variance-bounded elastic scheduler (Lemma 16)."""
    return 3 * sigma


def compression(gamma: float, m: float) -> float:
    """``sqrt((2 - gamma) gamma / (1 - gamma)^3) M``: compression with error feedback (Lemma 18)."""
    return math.sqrt((2 - gamma) * gamma / (1 - gamma) ** 3) * m


RESOLUTION_S = 1e-3

"""Clocks round; who asks again a hair too early would ask for ever."""


@dataclass(frozen=True)
class Arrived:
    """What came of one other peer's gradient.

    Attributes:
        norm: of the buckets that arrived, together.
        numel: values in them.
        complete: nothing is missing.
    """

    norm: float
    numel: int
    complete: bool


@dataclass(frozen=True)
class StepStatus:
    """How step ``step`` stands at a peer that has its own gradient.

    Attributes:
        step: t, from 0.
        peers: p, of the group at its start.
        own_norm, own_numel: of its own gradient.
        arrived: of step t, one for each other peer that is not lost.
        overdue: peers, not lost, of which something of step t - max_delay or before is missing.
        owed: gradients (of a peer, of a step up to t) of peers not lost of which something is missing.
        lost: peers that are gone.
        waited_s: since its own backward pass ended.
    """

    step: int
    peers: int
    own_norm: float
    own_numel: int
    arrived: tuple[Arrived, ...]
    overdue: int
    owed: int
    lost: int
    waited_s: float

    @property
    def complete(self) -> bool:
        """Whether all of step t is there."""
        return all(one.complete for one in self.arrived)

    @property
    def missing(self) -> float:
        """The share of the others' values of step t that has not arrived."""
        expected = len(self.arrived) * self.own_numel
        return 1 - sum(one.numel for one in self.arrived) / expected if expected else 0.0


class Scheduler(Protocol):
    """Decides when a peer goes on to its next step. Pure."""

    @property
    def name(self) -> str: ...

    @property
    def max_delay(self) -> int:
        """A step ends only when all gradients that are so many steps old have arrived."""

    @property
    def stand_in(self) -> bool:
        """Whether one's own gradient stands in for what is missing, until that arrives."""

    def may_go_on(self, standing: StepStatus) -> bool:
        """Whether the step may end, and the next forward pass begin."""

    def ask_again_s(self, standing: StepStatus) -> float | None:
        """In how many seconds time alone makes `may_go_on` true; None: only an arrival, or a loss, does."""

    def bound(self, facts: StepFacts) -> float | None:
        """B, the elastic consistency constant; None: there is none for this codec."""


@dataclass(frozen=True)
class Synchronous:
    """Perfectly consistent: every gradient of the step is waited for."""

    name = "synchronous"
    max_delay = 0
    stand_in = False

    def may_go_on(self, standing: StepStatus) -> bool:
        """When everything arrived."""
        return not standing.overdue

    def ask_again_s(self, standing: StepStatus) -> None:
        """Time changes nothing."""

    def bound(self, facts: StepFacts) -> float | None:
        """0, but for codec and crashes."""
        return _with_codec(_faults(facts.crashed, facts), facts)


@dataclass(frozen=True)
class NormBounded:
    """Goes on when every other peer's received norm is at least ``beta`` times one's own (section 5).

    With ``beta=1`` everything is waited for: norms of different peers differ, and one's own norm may be reached before
    the other's gradient is whole.

    Attributes:
        beta: 0 never waits for this step's gradients, 1 is perfectly consistent.
        measure: ``l2``, the norm; ``l0``, the count of values, as the paper's relaxed variant.
    """

    beta: float
    measure: Literal["l2", "l0"] = "l2"

    name = "norm-bounded"
    max_delay = 1
    stand_in = False

    def __post_init__(self) -> None:
        if not 0 <= self.beta <= 1:
            raise ValueError(f"beta={self.beta} is no fraction: choose 0 (never wait) to 1 (always wait)")
        if self.measure not in ("l2", "l0"):
            raise ValueError(
                f"measure={self.measure!r} is unknown: choose 'l2' (norm) or 'l0' (count of values)"
            )

    def may_go_on(self, standing: StepStatus) -> bool:
        """When enough of every peer's gradient arrived."""
        return not standing.overdue and all(self._enough(one, standing) for one in standing.arrived)

    def _enough(self, one: Arrived, standing: StepStatus) -> bool:
        if one.complete or self.beta == 1:
            return one.complete
        if self.measure == "l0":
            return one.numel >= self.beta * standing.own_numel
        return one.norm >= self.beta * standing.own_norm

    def ask_again_s(self, standing: StepStatus) -> None:
        """Time changes nothing."""

    def bound(self, facts: StepFacts) -> float | None:
        """That of one step of delay, whatever beta below 1: a small part of a gradient may have a large norm."""
        own = 0.0 if self.beta == 1 else bounded_staleness(facts.peers, 1, facts.m)
        return _with_codec(own + _faults(facts.crashed, facts), facts)


@dataclass(frozen=True)
class VarianceBounded:
    """One's own gradient stands in for what did not come in time, and is corrected in the next step (section 5).

    Attributes:
        timeout_s: how long missing gradients are waited for after one's own backward pass.
    """

    timeout_s: float

    name = "variance-bounded"
    max_delay = 1
    stand_in = True

    def __post_init__(self) -> None:
        _check_timeout(self.timeout_s)

    def may_go_on(self, standing: StepStatus) -> bool:
        """When everything arrived, or the timeout is over."""
        return not standing.overdue and (standing.complete or standing.waited_s >= self.timeout_s)

    def ask_again_s(self, standing: StepStatus) -> float | None:
        """When the timeout is over."""
        waits = not standing.overdue and not standing.complete and standing.waited_s < self.timeout_s
        return _left(self.timeout_s, standing) if waits else None

    def bound(self, facts: StepFacts) -> float | None:
        """3 sigma."""
        own = variance_bounded(facts.sigma)
        return _with_codec(own + _faults(facts.crashed, facts), facts)


@dataclass(frozen=True)
class BoundedStaleness:
    """Waits for nothing that is younger than ``tau`` steps (section 4.1 c).

    Attributes:
        tau: steps by which a gradient may be late, at least 1.
    """

    tau: int

    name = "bounded-staleness"
    stand_in = False

    def __post_init__(self) -> None:
        if self.tau < 1:
            raise ValueError(f"tau={self.tau} allows no delay: choose at least 1, or use Synchronous()")

    @property
    def max_delay(self) -> int:
        """tau."""
        return self.tau

    def may_go_on(self, standing: StepStatus) -> bool:
        """When everything up to step t - tau arrived."""
        return not standing.overdue

    def ask_again_s(self, standing: StepStatus) -> None:
        """Time changes nothing."""

    def bound(self, facts: StepFacts) -> float | None:
        """(p - 1) tau M / p."""
        own = bounded_staleness(facts.peers, self.tau, facts.m)
        return _with_codec(own + _faults(facts.crashed, facts), facts)


@dataclass(frozen=True)
class CrashTolerant:
    """Synchronous, but ``f`` gradients may be missing: of lost peers at once, of slow ones after a timeout.

    What comes late is applied when it comes: Lemma 14 bounds what is missing at any time, not what ever was. Lost
    peers use up the allowance. When more than f are lost the others still go on, and the bound grows with the loss,
    but slow peers are then waited for.

    Attributes:
        f: gradients that may be missing at any time, at least 1.
        timeout_s: how long a peer that is not lost is waited for.
    """

    f: int
    timeout_s: float

    name = "crash-tolerant"
    stand_in = False

    def __post_init__(self) -> None:
        if self.f < 1:
            raise ValueError(f"f={self.f} tolerates nothing: choose at least 1, or use Synchronous()")
        _check_timeout(self.timeout_s)

    @property
    def max_delay(self) -> int:
        """f: a gradient that is so late is not the only one missing, streams keep their order."""
        return self.f

    def may_go_on(self, standing: StepStatus) -> bool:
        """When everything arrived, or so little is missing after the timeout as is allowed."""
        return not standing.owed or (self._tolerable(standing) and standing.waited_s >= self.timeout_s)

    def _tolerable(self, standing: StepStatus) -> bool:
        return not standing.overdue and standing.owed + standing.lost <= self.f

    def ask_again_s(self, standing: StepStatus) -> float | None:
        """When the timeout is over."""
        waits = standing.owed and self._tolerable(standing) and standing.waited_s < self.timeout_s
        return _left(self.timeout_s, standing) if waits else None

    def bound(self, facts: StepFacts) -> float | None:
        """f M / p."""
        return _with_codec(_faults(max(self.f, facts.crashed), facts), facts)


def _left(timeout_s: float, standing: StepStatus) -> float:
    return max(RESOLUTION_S, timeout_s - standing.waited_s)


def _check_timeout(timeout_s: float) -> None:
    if not timeout_s >= 0:
        raise ValueError(f"timeout_s={timeout_s} is no time: choose seconds, 0 or more")


def _faults(f: int, facts: StepFacts) -> float:
    return faults(facts.peers, f, max(facts.m, facts.largest))


def _with_codec(bound: float, facts: StepFacts) -> float | None:
    if facts.gamma is None or facts.gamma >= 1:
        return None
    return bound + compression(facts.gamma, facts.m)


GAIN = 0.05

"""How much beta changes with a step in which the squared distance is the whole target off."""

MARGIN = 0.7

"""The mean squared distance aimed at, as a share of the target's square: averages of few steps stay under it."""

MOST = 2.0

"""How far beta is carried on beyond 1, so that one step that is far off is paid for by many that wait."""


class AdaptiveBeta:
    """`NormBounded`, with the smallest beta that keeps the measured distance under ``max_inconsistency``.

    Bounds are on the mean square, and gradients arrive in few, large buckets. So beta integrates the squared
    distance's deviation from what is aimed at: where no beta fits, it goes up and down, and the mean fits.

    Args:
        max_inconsistency: target of the root mean square of ``||x_t - v_t^i|| / alpha``, in the unit of gradients, as
            `Meter.measured` shows.
        measure: see `NormBounded`.

    Attributes:
        beta: in force now; it begins at 1, perfectly consistent.
    """

    name = "adaptive-beta"
    max_delay = 1
    stand_in = False

    def __init__(self, max_inconsistency: float, *, measure: Literal["l2", "l0"] = "l2") -> None:
        if not max_inconsistency > 0:
            raise ValueError(f"max_inconsistency={max_inconsistency} allows no delay: use Synchronous()")
        self.max_inconsistency = max_inconsistency
        self._measure, self._level = measure, 1.0

    def __repr__(self) -> str:
        return f"AdaptiveBeta(max_inconsistency={self.max_inconsistency}, measure={self._measure!r})"

    @property
    def beta(self) -> float:
        """Between 0 and 1."""
        return min(1.0, self._level)

    def on_measured(self, distance: float) -> None:
        """The distance of one view, as `Meter.on_closed` returns it."""
        off = (distance / self.max_inconsistency) ** 2 - MARGIN
        self._level = min(max(self._level + GAIN * off, 0.0), MOST)

    def may_go_on(self, standing: StepStatus) -> bool:
        """When enough of every peer's gradient arrived, for the beta in force."""
        return self._now.may_go_on(standing)

    def ask_again_s(self, standing: StepStatus) -> None:
        """Time changes nothing."""

    def bound(self, facts: StepFacts) -> float | None:
        """That of one step of delay: beta is below 1, or was a few steps ago."""
        return NormBounded(0.0).bound(facts)

    @property
    def _now(self) -> NormBounded:
        return NormBounded(self.beta, self._measure)
