"""A trainer's progress in a folder: saved in the background, and once more at the end."""

import asyncio
import logging
import threading
from collections.abc import Callable

from colab_swarm.dht.service import BackgroundTasks
from colab_swarm.errors import StateError
from colab_swarm.events import Fault
from colab_swarm.training.settings import PeerServices
from colab_swarm.training.state import CheckpointFolder

logger = logging.getLogger(__name__)

SAVE_S = 120.0
_MOST_OF_TIME = 0.05  # largest part of the time that saving may take


class ProgressSaver:
    """Saves the checkpoints of a trainer in ``folder``, each step once; without a folder it does nothing.

    ``step()`` is the trainer's step, and ``save(folder)`` writes its checkpoint.
    """

    def __init__(
        self,
        services: PeerServices,
        folder: CheckpointFolder | None,
        step: Callable[[], int],
        save: Callable[[CheckpointFolder], None],
        time: Callable[[], float],
    ) -> None:
        self._folder = folder
        self._step = step
        self._save = save
        self._time = time
        self._events = services.events
        self._tasks = BackgroundTasks("saving progress", services.events, services.rng)
        self._saving = threading.Lock()
        self._saved_step = -1

    async def start(self) -> None:
        """Save now and then, in a thread of the pool."""
        if self._folder is not None:
            self._tasks.every(SAVE_S, self._save_aside, rest=1 / _MOST_OF_TIME)

    async def _save_aside(self) -> None:
        await asyncio.to_thread(self.save)

    def stop(self) -> None:
        self._tasks.cancel()

    def save(self) -> None:
        """Save the present step, if it is not saved yet. Thread-safe; a failure is a `Fault`."""
        with self._saving:
            folder = self._folder
            step = self._step()
            if folder is None or step == self._saved_step:
                return
            try:
                self._save(folder)
                for path in folder.paths():
                    if path > folder.file_of(self._step()):
                        path.unlink(missing_ok=True)  # of a branch that the swarm has left
            except (StateError, OSError) as error:
                logger.warning("progress was not saved: %s", error)
                self._events.emit(Fault(self._time(), "saving progress", str(error)))
            else:
                self._saved_step = step
