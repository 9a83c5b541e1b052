"""Checks that this peer's state is that of most trainers, by sketches of theirs.

Equal lineages prove that peers received the same means, not that they hold the same parameters: a
donor may give others under an honest lineage, and a trainer may load weights, or change a learning
rate. So every `SKETCH_STEPS` steps each trainer publishes random projections of its state, seeded by the
lineage of that step: nobody knows it in advance, so no state can be prepared that fits. They are
compared with a tolerance, as processors differ by rounding.
"""

import math
from collections.abc import Collection
from enum import Enum
from typing import Annotated

import msgspec
import numpy as np

from colab_swarm.net.peers import Message, PeerId

SKETCH_STEPS = 10
PROJECTIONS = 4
# Of a norm and of projections, in norms: for parameters in float32, and for those of half the bits.
TOLERANCE = 1e-3
HALF_TOLERANCE = 2e-2
_DRIFT = 1 / 200  # of the tolerance: by more, rounding has moved a state away, and it is brought back
_URGENT = (
    1 / 2
)  # of the tolerance: by more, it is brought back whatever that costs, before it passes for another one
_LEAST_NORM = 1e-30


class StateSketch(Message, frozen=True):
    """For parameters and each kind of optimizer state its norm, and `PROJECTIONS` projections in norms."""

    step: int
    lineage: Annotated[bytes, msgspec.Meta(max_length=16)]
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


class Verdict(Enum):
    """What the comparison of this peer's state with that of most others comes to."""

    FALSE = "the donors of this peer's state gave another one"
    MOVED = "its own steps moved it"
    AGAIN = "its own steps moved it, for the second time"
    DRIFTS = "rounding moved it, within the tolerance"


class StateCheck:
    """Compares this peer's sketches with those of most others; a pure core."""

    def __init__(self, tolerance: float) -> None:
        self.donors: tuple[PeerId, ...] = ()  # of a loaded state, until most others confirm it
        self._tolerance = tolerance
        self._moved = False  # whether its own steps have moved its state once
        self._false: set[PeerId] = set()  # who gave states that were not confirmed, since one was

    def on_loaded(self, donors: tuple[PeerId, ...]) -> None:
        self.donors = donors

    def judge(
        self, own: StateSketch, theirs: StateSketch, agreeing: Collection[PeerId], *, corrects: bool = True
    ) -> Verdict | None:
        """Compare two sketches of one step; None: they are equal enough.

        ``agreeing``: who has their state. A donor among them gave it, so this peer's own steps moved it.
        ``corrects``: also if it drifts by little.
        """
        gap = own.distance(theirs)
        if gap <= self._tolerance:
            self.donors = ()
            self._false.clear()
            drifts = gap > _DRIFT * self._tolerance and (corrects or gap > _URGENT * self._tolerance)
            return Verdict.DRIFTS if drifts else None
        donors = set(self.donors)
        # Where states of other donors come to the same, this peer is the cause.
        is_other_cause = not self._false or donors <= self._false
        if donors and is_other_cause and not donors.intersection(agreeing):
            self._false |= donors
            return Verdict.FALSE
        moved = self._moved
        self._moved = True
        return Verdict.AGAIN if moved else Verdict.MOVED
