"""Training state on disk: one safetensors file per checkpoint, whole or not there at all.

A file holds the tensors; its metadata hold the skeleton (`colab_swarm.training.statedict`) and a SHA-256 over
both, so that a garbled file is told from a good one. It is written beside its name, synced, and renamed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from colab_swarm.errors import StateError
from colab_swarm.training.statedict import decode_skeleton, encode_skeleton, flatten, unflatten

logger = logging.getLogger(__name__)

VERSION = "1"
_SAFETENSORS_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}


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
    path = Path(path)
    tensors, skeleton = flatten(state)
    head = _head(tensors, encode_skeleton(skeleton).decode())
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(head)
            for _, tensor in _in_file_order(tensors):
                file.write(_bytes(tensor))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        _sync_folder(path.parent)
    except OSError as error:
        size = len(head) + sum(tensor.nbytes for tensor in tensors.values())
        raise StateError(f"cannot save {path} ({size:,} bytes): {error.strerror}; {_free(path)}") from error
    finally:
        partial.unlink(missing_ok=True)


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
    if metadata.get("sha256") != _digest(tensors, metadata["skeleton"]):
        raise StateError(f"{path} is garbled: its contents do not match their checksum")
    return unflatten(tensors, decode_skeleton(metadata["skeleton"].encode()))


class CheckpointFolder:
    """The last checkpoints of one run, ``step-000000000012.safetensors`` and so on.

    Args:
        path: the folder; made at the first save.
        keep: how many to keep; older ones are deleted after a save.

    Raises:
        ValueError: ``keep`` is below 1.
    """

    def __init__(self, path: str | Path, *, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep}: at least one checkpoint must be kept")
        self.path = Path(path)
        self.keep = keep

    def save(self, step: int, state: Any) -> Path:
        """`save_checkpoint` under the step's name, then delete what is beyond `keep`; returns the path."""
        path = self.path / f"step-{step:012}.safetensors"
        save_checkpoint(path, state)
        stale = [other for other in self.paths() if other != path][self.keep - 1 :]
        for file in [*stale, *self.path.glob("step-*.partial")]:  # the partial ones: killed while saving
            file.unlink(missing_ok=True)
        return path

    def paths(self) -> list[Path]:
        """The files there are, newest step first, readable or not."""
        return sorted(self.path.glob("step-*.safetensors"), reverse=True)

    def latest(self) -> Any:
        """The state in the newest checkpoint that can be read, else None; skips the others with a warning."""
        for path in self.paths():
            try:
                return load_checkpoint(path)
            except StateError as error:
                logger.warning("skipped a checkpoint: %s", error)
        return None

    def __repr__(self) -> str:
        return f"CheckpointFolder({str(self.path)!r}, {len(self.paths())} of {self.keep} kept)"


def _in_file_order(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """Widest values first, as the format wants them aligned; then by name."""
    return sorted(tensors.items(), key=lambda entry: (-entry[1].itemsize, entry[0]))


def _head(tensors: Mapping[str, torch.Tensor], skeleton: str) -> bytes:
    """What a safetensors file begins with: length and JSON of names, types, shapes and offsets."""
    metadata = {"colab_swarm": VERSION, "skeleton": skeleton, "sha256": _digest(tensors, skeleton)}
    entries: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, tensor in _in_file_order(tensors):
        entries[name] = {
            "dtype": _SAFETENSORS_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _digest(tensors: Mapping[str, torch.Tensor], skeleton: str) -> str:
    digest = hashlib.sha256(skeleton.encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        digest.update(_bytes(tensors[name]))
    return digest.hexdigest()


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _sync_folder(folder: Path) -> None:
    """Make a rename last through a power cut; Windows has no such call."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _free(path: Path) -> str:
    try:
        free = shutil.disk_usage(path.parent).free
        return f"{free:,} bytes are free there; the checkpoint before it is intact"
    except OSError:
        return "its folder cannot be reached"
