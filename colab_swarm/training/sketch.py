"""Checks that this peer's state is that of most trainers, by sketches of theirs.

Equal lineages prove that peers received the same means, not that they hold the same parameters: a
donor may give others under an honest lineage, and a trainer may load weights, or change a learning
rate. So every `SKETCH_STEPS` steps each trainer publishes random projections of its state, seeded by the
lineage of that step: nobody knows it in advance, so no state can be prepared that fits. They are
compared with a tolerance, as processors differ by rounding.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
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
RELOAD_S = 600.0  # between two states that this peer gives up


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
        if len(self.values) != len(other.values):
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


@dataclass(frozen=True)
class Deviation:
    """This peer's state is another than that of most votes.

    Attributes:
        gap: the difference, in norms.
        donors: who may have given this peer a false state; empty if its own steps moved it.
        again: it left the swarm's for the second time.
        drifts: it is within the tolerance.
    """

    gap: float
    donors: tuple[PeerId, ...] = ()
    again: bool = False
    drifts: bool = False


class StateCheck:
    """Compares this peer's sketches with the others'; a pure core.

    Until most votes confirm a loaded state, its sketch is not published: the copies of one lie are no witnesses.
    """

    def __init__(self, tolerance: float) -> None:
        self.own: StateSketch | None = None  # of the last step that had one; None since a state was loaded
        self._tolerance = tolerance
        self._deviated = False  # whether `judge` has found once that the state left the swarm's by itself
        self._donors: tuple[PeerId, ...] = ()  # of a state, from `on_loaded` until it is confirmed
        self._suspects = (
            True  # donors; False from the first one that `judge` has named until a state is confirmed
        )
        self._compared = False  # whether `judge` has seen a vote on ``own``
        self._reload_at = -math.inf  # no state is given up before; set when one is

    @property
    def published(self) -> StateSketch | None:
        if self._donors:
            return None
        return self.own

    def on_loaded(self, donors: tuple[PeerId, ...]) -> None:
        self.own = None
        self._donors = donors

    def on_sketch(self, sketch: StateSketch) -> None:
        """Take the own sketch of a step; the state counts as confirmed if nobody had one of the last."""
        if self.own is not None and not self._compared:
            self._confirm()
        self.own = sketch
        self._compared = False

    def agree(self, one: StateSketch, other: StateSketch) -> bool:
        return one.distance(other) <= self._tolerance

    def judge(
        self,
        sketches: Mapping[PeerId, StateSketch],
        votes: Mapping[PeerId, float],
        senior: PeerId | None,
        now: float,
        *,
        corrects: bool = True,
    ) -> Deviation | None:
        """Compare the own sketch with the others' of its step, and say if the state must be loaded again.

        Two questions: a loaded state is no witness itself, and waits at a tie. It needs more than half of the votes
        that have a sketch to be confirmed, and more than half of all the others' to be given up. Among confirmed
        states one must win, so `Election.senior` breaks ties.

        A given-up state was false, or this peer's own steps are. If its donors hold what most do, another donor
        decides: a state that leaves that one's too, or without another one, was moved by the own steps.

        ``votes``: of all other trainers, with a sketch or without.
        ``senior``: a peer whose sketch counts most, this peer's own included; None: too few have one.
        ``corrects``: also if it drifts by little.
        """
        own = self.own
        if own is None:
            return None
        if sketches:
            self._compared = True
        if not self._donors:
            return self._deviation(own, sketches.get(senior) if senior else None, corrects=corrects)
        if 2 * self._votes_for(own, sketches, votes) > sum(votes[peer] for peer in sketches):
            self._confirm()
            return None
        total = sum(votes.values())
        others = [
            sketch for sketch in sketches.values() if 2 * self._votes_for(sketch, sketches, votes) > total
        ]
        if not others:
            return None
        agreeing = {peer for peer, sketch in sketches.items() if self.agree(sketch, others[0])}
        has_other_donors = bool(agreeing.difference(self._donors))
        if agreeing.intersection(self._donors) and not (self._suspects and has_other_donors):
            return self._deviation(own, others[0], corrects=False)
        if now < self._reload_at:
            return None
        deviation = Deviation(own.distance(others[0]), self._donors)
        self._reload_at = now + RELOAD_S
        self._suspects = False
        self.on_loaded(())
        return deviation

    def _confirm(self) -> None:
        self._donors = ()
        self._suspects = True

    def _deviation(self, own: StateSketch, theirs: StateSketch | None, *, corrects: bool) -> Deviation | None:
        if theirs is None:
            return None
        gap = own.distance(theirs)
        if gap > self._tolerance:
            deviation = Deviation(gap, again=self._deviated)
            self._deviated = True
        elif gap > _DRIFT * self._tolerance and (corrects or gap > _URGENT * self._tolerance):
            deviation = Deviation(gap, drifts=True)
        else:
            return None
        self.on_loaded(())
        return deviation

    def _votes_for(
        self, sketch: StateSketch, sketches: Mapping[PeerId, StateSketch], votes: Mapping[PeerId, float]
    ) -> float:
        """Return the votes of the peers whose sketches agree with this one."""
        count = 0.0
        for peer, other in sketches.items():
            if self.agree(sketch, other):
                count += votes[peer]
        return count
