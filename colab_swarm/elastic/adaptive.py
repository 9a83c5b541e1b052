"""A beta that follows the meter: as little waiting as a given inconsistency allows."""

from __future__ import annotations

from typing import Literal

from colab_swarm.elastic.bounds import Facts
from colab_swarm.elastic.schedulers import NormBounded, Standing

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

    def may_go_on(self, standing: Standing) -> bool:
        """When enough of every peer's gradient arrived, for the beta in force."""
        return self._now.may_go_on(standing)

    def ask_again_s(self, standing: Standing) -> None:
        """Time changes nothing."""

    def bound(self, facts: Facts) -> float | None:
        """That of one step of delay: beta is below 1, or was a few steps ago."""
        return NormBounded(0.0).bound(facts)

    @property
    def _now(self) -> NormBounded:
        return NormBounded(self.beta, self._measure)
