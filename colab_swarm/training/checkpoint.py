"""Training state on disk: one safetensors file per checkpoint, written atomically.

The file holds the tensors. Its metadata hold the skeleton and a checksum (`colab_swarm.tensors.statedict`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from colab_swarm.errors import StateError
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

logger = logging.getLogger(__name__)


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
    write_tensors(Path(path), _bytes(tensors), encode_skeleton(skeleton).decode())


def load_checkpoint(path: str | Path) -> Any:
    """Read the state that `save_checkpoint` wrote, into new memory.

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
            # Cloned: Windows cannot replace a mapped file while views of it live.
            names = file.keys()
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
        """Write a checkpoint under the step's name, delete those beyond ``keep``, and return the path."""
        path = self.file_of(step)
        save_checkpoint(path, state)
        self.prune(path)
        return path

    def latest(self) -> Any:
        """Return the state in the newest readable checkpoint, or None; skips damaged ones with a warning."""
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
