"""A volunteer's slot: what one of the units that it works on at a time is at."""

from __future__ import annotations

import time
from dataclasses import dataclass

from colab_swarm.workunits.resume import UnitInHand
from colab_swarm.workunits.unit_training import UnitTraining
from colab_swarm.workunits.volunteer_snapshot import UnitProgress


@dataclass
class Slot:
    """What one slot works on; ``held`` from the moment it is given until it is done with."""

    phase: str = "asking"
    held: UnitInHand | None = None
    training: UnitTraining | None = None
    loss: float | None = None
    began: float = 0.0
    saved: float = 0.0

    def take(self, held: UnitInHand) -> None:
        """It was given this unit."""
        self.held, self.training, self.loss = held, None, None
        self.began = self.saved = time.monotonic()

    def let_go(self) -> None:
        """It is done with its unit."""
        self.held = self.training = None

    def progress(self) -> UnitProgress:
        """For panels."""
        held, training = self.held, self.training
        if held is None:
            return UnitProgress(phase=self.phase)
        unit, seconds = f"epoch {held.unit.epoch}, subset {held.unit.subset}", time.monotonic() - self.began
        if training is None:
            return UnitProgress(unit, self.phase, seconds=seconds)
        return UnitProgress(unit, self.phase, training.done, training.batches, self.loss, seconds)
