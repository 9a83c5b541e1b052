"""An optimizer's checkpoints in the folder of a kept peer: written while it trains, read when it comes back.

They are written from a copy, by a thread of their own: every two minutes, or less often where that takes long (a large
model, a slow drive), and once more after an interrupt and at the end.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from colab_swarm.errors import StateError
from colab_swarm.events import EventLog, Fault
from colab_swarm.training.checkpoint import CheckpointFolder
from colab_swarm.training.gradients import Gradients
from colab_swarm.training.replica import Replica

logger = logging.getLogger(__name__)
SAVE_S = 120.0
MOST_OF_TIME = 0.05
"""Share of the time that may go into saving."""


class Saved(Protocol):
    """What is kept: an optimizer."""

    @property
    def global_step(self) -> int: ...
    def save(self, target: CheckpointFolder) -> None: ...


class KeptSteps:
    """Where one optimizer's progress is kept.

    Args:
        folder: of the checkpoints.
        events: gets a `Fault` when a checkpoint cannot be written; training goes on without it.
        clock: the time of events.
    """

    def __init__(self, folder: CheckpointFolder, events: EventLog, clock: Callable[[], float]) -> None:
        self._folder, self._events, self._clock = folder, events, clock
        self._saved_step = -1
        self._one_at_a_time = threading.Lock()

    def load_into(self, replica: Replica, gathered: Gradients) -> bool:
        """Load the newest checkpoint; returns False if there is none yet.

        Raises:
            StateError: it belongs to another model; nothing was changed.
        """
        state = self._folder.latest()
        if state is None:
            return False
        try:
            feedback = gathered.feedback_of(state)
            replica.load(state)
        except StateError as error:
            where = f"it was kept in {self._folder.path}: to begin anew, move that folder away"
            raise StateError(f"{error}; {where}") from error
        gathered.feedback = feedback
        return True

    def save(self, optimizer: Saved) -> None:
        """Save the optimizer's state if it is new."""
        with self._one_at_a_time:
            step = optimizer.global_step
            if step == self._saved_step:
                return
            try:
                optimizer.save(self._folder)
                for path in self._folder.paths():
                    if path > self._folder.file_of(optimizer.global_step):
                        path.unlink(missing_ok=True)  # of a branch that the swarm has left
            except (StateError, OSError) as error:
                logger.warning("progress was not saved: %s", error)
                self._events.emit(Fault(self._clock(), "keeping what was trained", str(error)))
            else:
                self._saved_step = step

    def save_soon(self, optimizer: Saved) -> None:
        """The same, in the background."""
        threading.Thread(target=self.save, args=(optimizer,), name="colab-swarm-save", daemon=True).start()

    async def keep_saving(self, optimizer: Saved) -> None:
        """Save now and then, until cancelled."""
        pause_s = SAVE_S
        while True:
            await asyncio.sleep(pause_s)
            began = time.monotonic()
            await asyncio.to_thread(self.save, optimizer)
            pause_s = max(SAVE_S, (time.monotonic() - began) / MOST_OF_TIME)
