"""Compares what this peer applies, and what came of it, with the other trainers: learning rates and sketches."""

from colab_swarm.errors import MismatchError, require
from colab_swarm.events import EventLog
from colab_swarm.net.peers import PeerId
from colab_swarm.training.sketch import StateSketch
from colab_swarm.training.view import SwarmView


class Comparison:
    """Says if this peer must load the swarm's state, or may not train on.

    Attributes:
        deviant: this peer's state is not that of most others, until it has loaded theirs.
        moved_bytes: sent and received in rounds since this peer was brought together with the others. `LinkRounds`
            adds to them.
    """

    def __init__(self, view: SwarmView, tolerance: float, events: EventLog, *, drift_bytes: float) -> None:
        """Rounds move ``drift_bytes`` between two states that are loaded because rounding moved this peer's."""
        self.deviant = False
        self.moved_bytes = 0
        self._refusal = ""

    def check(self) -> None:
        """Raise `MismatchError` if this peer must not train on."""
        require(not self._refusal, self._refusal, MismatchError)

    def on_loaded(self, donors: tuple[PeerId, ...]) -> None:
        self.deviant = False

    def on_sketch(self, sketch: StateSketch | None) -> None:
        return
