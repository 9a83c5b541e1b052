"""Checks that a loaded state is that of most trainers, by sketches of theirs.

Equal lineages prove an equal history, but a donor may give other parameters under an honest one.
So every `SKETCH_STEPS` steps each trainer publishes random projections of its state, seeded by the
lineage of that step: nobody knows it in advance, so no state can be prepared that fits. They are
compared with a tolerance, as processors differ by rounding.
"""

import math
from collections.abc import Mapping
from typing import Annotated

import msgspec
import numpy as np

from colab_swarm.net.peers import Message, PeerId

SKETCH_STEPS = 10
PROJECTIONS = 4
_TOLERANCE = 0.02  # of a projection, in norms
RELOAD_S = 600.0  # between two states that this peer gives up


class StateSketch(Message, frozen=True):
    """For parameters and each kind of optimizer state its norm, and `PROJECTIONS` projections in norms."""

    step: int
    lineage: Annotated[bytes, msgspec.Meta(max_length=16)]
    values: Annotated[tuple[float, ...], msgspec.Meta(max_length=12 * (1 + PROJECTIONS))]

    def is_of_step(self, other: "StateSketch") -> bool:
        return (self.step, self.lineage) == (other.step, other.lineage)

    def agrees(self, other: "StateSketch") -> bool:
        if not self.is_of_step(other) or len(self.values) != len(other.values):
            return False
        mine = np.array(self.values).reshape(-1, 1 + PROJECTIONS)
        theirs = np.array(other.values).reshape(-1, 1 + PROJECTIONS)
        norms_agree = np.allclose(mine[:, 0], theirs[:, 0], rtol=_TOLERANCE)
        return norms_agree and np.allclose(mine[:, 1:], theirs[:, 1:], rtol=0.0, atol=_TOLERANCE)


class StateCheck:
    """Compares this peer's sketches with the others'; a pure core.

    Until most votes confirm a loaded state, its sketch is not published: the copies of one lie are no witnesses.
    """

    def __init__(self) -> None:
        self.own: StateSketch | None = None  # of the last step that had one; None since a state was loaded
        self._donors: tuple[PeerId, ...] = ()  # of a state, from `on_loaded` until it is confirmed
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
            self._donors = ()
        self.own = sketch
        self._compared = False

    def judge(
        self, sketches: Mapping[PeerId, StateSketch], votes: Mapping[PeerId, float], now: float
    ) -> tuple[PeerId, ...]:
        """Return the donors of this peer's state if most votes hold another; it must be loaded again then."""
        own = self.own
        if own is None or not self._donors:
            return ()
        same_step = {peer: sketch for peer, sketch in sketches.items() if sketch.is_of_step(own)}
        total = sum(votes[peer] for peer in same_step)
        if total > 0:
            self._compared = True

        def is_held_by_most(sketch: StateSketch) -> bool:
            return 2 * _votes_for(sketch, same_step, votes) > total

        if is_held_by_most(own):
            self._donors = ()
        elif now >= self._reload_at and any(map(is_held_by_most, same_step.values())):
            donors = self._donors
            self._reload_at = now + RELOAD_S
            self.on_loaded(())
            return donors
        return ()


def _votes_for(
    sketch: StateSketch, sketches: Mapping[PeerId, StateSketch], votes: Mapping[PeerId, float]
) -> float:
    """Return the votes of the peers whose sketches agree with this one."""
    count = 0.0
    for peer, other in sketches.items():
        if other.agrees(sketch):
            count += votes[peer]
    return count
