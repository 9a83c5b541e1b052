"""Training state on disk: one safetensors file per checkpoint, whole or not there at all.

A file holds the tensors; its metadata hold the skeleton (`colab_swarm.tensors.statedict`) and a checksum, see
`colab_swarm.tensors.statedict`.

An optimizer's checkpoints in the folder of a kept peer: written while it trains, read when it comes back.

They are written from a copy, by a thread of their own: every two minutes, or less often where that takes long (a large
model, a slow drive), and once more after an interrupt and at the end.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from colab_swarm.errors import StateError
from colab_swarm.events import EventLog, Fault
from colab_swarm.tensors.statedict import (
    VERSION,
    StepFiles,
    TensorBytes,
    decode_skeleton,
    digest,
    encode_skeleton,
    flatten,
    unflatten,
    write_tensors,
)
from colab_swarm.training.replica import Gradients, Replica

logger = logging.getLogger(__name__)


def save_checkpoint(path: str | Path, state: Any) -> None:
    """Write a training state so that ``path`` holds either all of it or what it held before.

    Args:
        path: the file; its folder is made if need be.
        state: anything that `flatten` takes, such as a dictionary of the step, the random state and the
            ``state_dict()`` of model, optimizer and scheduler.

    Raises:
        StateError: the disk is full or cannot be written; nothing is left behind.
        TypeError: part of the state cannot be saved without pickle.
    """
    tensors, skeleton = flatten(state)
    write_tensors(Path(path), _bytes(tensors), encode_skeleton(skeleton).decode())


def load_checkpoint(path: str | Path) -> Any:
    """Read the state that `save_checkpoint` wrote, into memory of its own.

    Raises:
        FileNotFoundError: there is no such file.
        StateError: it is truncated, garbled or not a checkpoint of this package.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no checkpoint at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            names = file.keys()
            # Cloned: these are views of the mapped file, which Windows could not replace while they live.
            tensors = {name: file.get_tensor(name).clone() for name in names}
    except (SafetensorError, OSError, ValueError) as error:
        raise StateError(f"{path} is truncated or not a checkpoint: {error}") from error
    if metadata.get("colab_swarm") != VERSION or "skeleton" not in metadata:
        raise StateError(f"{path} is not a checkpoint of this version of colab_swarm")
    if metadata.get("sha256") != digest(_bytes(tensors), metadata["skeleton"]):
        raise StateError(f"{path} is garbled: its contents do not match their checksum")
    return unflatten(tensors, decode_skeleton(metadata["skeleton"].encode()))


class CheckpointFolder(StepFiles):
    """The last checkpoints of one run; older ones are deleted after a save."""

    def save(self, step: int, state: Any) -> Path:
        """`save_checkpoint` under the step's name, then delete what is beyond `keep`; returns the path."""
        path = self.file_of(step)
        save_checkpoint(path, state)
        self.prune(path)
        return path

    def latest(self) -> Any:
        """The state in the newest checkpoint that can be read, else None; skips the others with a warning."""
        for path in self.paths():
            try:
                return load_checkpoint(path)
            except StateError as error:
                logger.warning("skipped a checkpoint: %s", error)
        return None


def _bytes(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorBytes]:
    return {
        name: TensorBytes(
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            tensor.reshape(-1).view(torch.uint8).numpy().data,
        )
        for name, tensor in tensors.items()
    }


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
