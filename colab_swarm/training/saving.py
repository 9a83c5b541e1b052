"""A trainer's checkpoints in a folder: `ProgressSaver` saves them in the background, and once more at the end."""

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from colab_swarm.errors import StateError
from colab_swarm.events import Fault
from colab_swarm.runtime import BackgroundTasks
from colab_swarm.tensors.statedict import pack, write_state
from colab_swarm.training.gradients import Gradients
from colab_swarm.training.replica import Replica
from colab_swarm.training.settings import PeerServices
from colab_swarm.training.state import CheckpointFolder

logger = logging.getLogger(__name__)

SAVE_S = 120.0
_MOST_OF_TIME = 0.05  # largest part of the time that saving may take


@dataclass
class TrainerCheckpoint:
    """A trainer's progress: the replica's state, the error feedback, and the positions in the data."""

    _replica: Replica
    _gathered: Gradients
    # For each loader, in the order in which `Swarm.batches` first received the loaders: the number of complete passes
    # that this peer has read, and the number of batches in the present pass.
    positions: list[tuple[int, int]] = field(default_factory=list)
    # the last state of each loader that keeps its position by itself, by the loader's number
    states: dict[int, Any] = field(default_factory=dict)
    _loaders: list[Any] = field(
        default_factory=list
    )  # the objects themselves, because the id of a deleted object may be used again

    @property
    def step(self) -> int:
        return self._replica.step

    def number_of(self, loader: Any) -> int:
        """Return the index in `positions` that belongs to a loader; a new loader takes the next index."""
        for number, known in enumerate(self._loaders):
            if known is loader:
                return number
        self._loaders.append(loader)
        if len(self._loaders) > len(self.positions):
            self.positions.append((0, 0))
        return len(self._loaders) - 1

    def state(self) -> dict[str, Any]:
        """Return the content of a checkpoint file; its tensors share memory with the live tensors."""
        states = {str(number): state for number, state in self.states.items()}
        more = {"positions": [*self.positions], "states": states, "together": self._replica.together}
        return {**self._replica.state(), **self._gathered.state(), **more}

    def take_up(self, state: Any) -> None:
        """Continue from a state; raises `StateError`, with nothing changed, if it does not fit."""
        feedback = self._gathered.feedback_of(state)
        self._replica.load(state)
        # A backbone's checkpoint is a peer's state as the backbone downloaded it, without this entry.
        self._replica.together = state.get("together", self._replica.step)
        self._gathered.feedback = feedback
        self._gathered.forget()
        self.positions = [(passes, batches) for passes, batches in state.get("positions", ())]
        self.states = {int(number): of_loader for number, of_loader in state.get("states", {}).items()}
        # In a new session, or after a load, the loaders come in the same order again.
        self._loaders = []

    def resume(self, folder: CheckpointFolder | None) -> bool:
        """Continue from the folder's latest readable checkpoint; return whether there is one."""
        if folder is None or (state := folder.latest()) is None:
            return False
        try:
            self.take_up(state)
        except StateError as error:
            where = f"it is saved in {folder.path}: to start again, move that folder away"
            raise StateError(f"{error}; {where}") from error
        return True

    def save(self, target: str | Path | CheckpointFolder) -> None:
        """Write a checkpoint to a file, or into a folder: see `SwarmOptimizer.save`."""
        with self._replica.lock:
            step = self._replica.step
            file = [memoryview(pack(self.state()).data)]
        if isinstance(target, CheckpointFolder):
            target.write(step, file)
        else:
            write_state(Path(target), file)


class ProgressSaver:
    """Saves a trainer's checkpoint in ``folder``, at most once per step; without a folder it does nothing."""

    def __init__(
        self,
        services: PeerServices,
        folder: CheckpointFolder | None,
        checkpoint: TrainerCheckpoint,
        time: Callable[[], float],
    ) -> None:
        self._folder = folder
        self._checkpoint = checkpoint
        self._time = time
        self._events = services.events
        self._tasks = BackgroundTasks("saving progress", services.events, services.rng)
        self._saving = threading.Lock()
        self._saved_step = -1

    async def start(self) -> None:
        """Begin to save regularly, in a thread of the pool."""
        if self._folder is not None:
            self._tasks.every(SAVE_S, partial(asyncio.to_thread, self.save), rest=1 / _MOST_OF_TIME)

    def stop(self) -> None:
        self._tasks.cancel()

    def save(self) -> None:
        """Save the present step, if it is not saved yet. Thread-safe; a failure raises no error but emits a `Fault`."""
        with self._saving:
            folder = self._folder
            step = self._checkpoint.step
            if folder is None or step == self._saved_step:
                return
            try:
                self._checkpoint.save(folder)
            except (StateError, OSError) as error:
                logger.warning("progress was not saved: %s", error)
                self._events.emit(Fault(self._time(), "saving progress", str(error)))
            else:
                self._saved_step = step
