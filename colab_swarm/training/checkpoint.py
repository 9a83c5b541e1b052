"""Training state on disk: one safetensors file per checkpoint, written atomically.

The file holds the tensors. Its metadata hold the skeleton and a checksum (`colab_swarm.tensors.statedict`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from colab_swarm.tensors.statedict import (
    StepFiles,
    as_bytes,
    as_tensors,
    flatten,
    read_tensors,
    unflatten,
    write_tensors,
)


def save_checkpoint(path: str | Path, state: Any) -> None:
    """Write a training state so that ``path`` holds either all of it or its old content.

    Args:
        path: the file; its folder is created if needed.
        state: anything that `flatten` takes, such as a dictionary of the step, the random state and
            the ``state_dict()`` of model, optimizer and scheduler.

    Raises:
        StateError: the disk is full or cannot be written; no partial file remains.
        TypeError: part of the state cannot be saved without pickle.
    """
    tensors, skeleton = flatten(state)
    write_tensors(Path(path), as_bytes(tensors), skeleton)


def load_checkpoint(path: str | Path) -> Any:
    """Read the state that `save_checkpoint` wrote, into new memory.

    Raises:
        FileNotFoundError: there is no such file.
        StateError: it is truncated, damaged or not a checkpoint of this package.
    """
    tensors, skeleton = read_tensors(Path(path))
    return unflatten(as_tensors(tensors), skeleton)


class CheckpointFolder(StepFiles):
    """The last checkpoints of one run; older ones are deleted after a save."""

    def save(self, step: int, state: Any) -> Path:
        """Write a checkpoint under the step's name, delete those beyond ``keep``, and return the path."""
        path = self.file_of(step)
        save_checkpoint(path, state)
        self.prune(path)
        return path

    def latest(self) -> Any:
        """Return the state in the newest readable checkpoint, or None; skips damaged ones with a warning."""
        return self.newest(load_checkpoint)
