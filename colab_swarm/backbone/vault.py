"""The checkpoints of one collaboration on the backbone's disk, made of snapshots; no torch, no model.

A file is what `SwarmOptimizer.save` writes: a trainer loads it, or the folder, with ``optimizer.load``. Beside the
files lies ``history.jsonl``, a line for each checkpoint there ever was.
"""

from __future__ import annotations

import logging
from collections import deque
from pathlib import Path

import msgspec

from colab_swarm.backbone.journal import Journal
from colab_swarm.errors import StateError
from colab_swarm.tensors.tensorfile import StepFiles, read_tensors, write_tensors
from colab_swarm.training.layout import snapshot_of, tensors_of
from colab_swarm.training.state import Snapshot

logger = logging.getLogger(__name__)
MAX_HISTORY = 200
"""Entries held and shown."""


class Checkpoint(msgspec.Struct, frozen=True):
    """A checkpoint that was saved.

    Attributes:
        step: global step.
        loss: of the swarm at that step, if anybody told.
        at: seconds since the epoch.
        size_bytes: of its tensors.
        file: name in the folder; gone when newer ones took its place.
    """

    step: int
    loss: float | None
    at: float
    size_bytes: int
    file: str

    def __str__(self) -> str:
        return f"Step {self.step}" + ("" if self.loss is None else f", loss {self.loss:.3f}")


class Vault(StepFiles):
    """The last checkpoints and the history of all.

    Args:
        path: the folder; made at the first save.
        keep: how many files to keep.
    """

    def __init__(self, path: str | Path, *, keep: int = 3) -> None:
        super().__init__(path, keep=keep)
        self._journal = Journal(self.path / "history.jsonl", Checkpoint)
        self.history: deque[Checkpoint] = deque(self._journal.read(), MAX_HISTORY)

    def save(self, snapshot: Snapshot, *, loss: float | None, at: float) -> Checkpoint:
        """Write a snapshot, whole or not at all, and delete what is beyond ``keep``.

        Raises:
            StateError: it is not sound, or the disk is full; older checkpoints are untouched.
        """
        step = snapshot.manifest.step
        path = self.file_of(step)
        write_tensors(path, *tensors_of(snapshot))
        self.prune(path)
        saved = Checkpoint(step, loss, at, snapshot.manifest.size_bytes, path.name)
        self._journal.append(saved)
        self.history.append(saved)
        return saved

    def latest(self) -> Snapshot | None:
        """The newest checkpoint that can be read, else None; skips the others with a warning."""
        for path in self.paths():
            try:
                return snapshot_of(*read_tensors(path))
            except (StateError, OSError) as error:
                logger.warning("skipped a checkpoint: %s", error)
        return None
