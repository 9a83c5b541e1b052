"""Named tensors and a skeleton in one safetensors file, whole or not there at all. Needs no torch.

The file's metadata hold the skeleton (`colab_swarm.tensors.statedict`) and a SHA-256 over tensors and skeleton, so
that a garbled file is told from a good one. It is written beside its name, synced, and renamed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colab_swarm.errors import StateError
from colab_swarm.markup import facts, size

VERSION = "1"
MAX_HEAD_BYTES = 256 << 20
KINDS = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "int16": ("I16", 2),
    "int32": ("I32", 4),
    "int64": ("I64", 8),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float32": ("F32", 4),
    "float64": ("F64", 8),
}
"""What a value may be, as torch calls it: its name in the file, and its size in bytes."""
_TORCH_NAMES = {name: kind for kind, (name, _) in KINDS.items()}


@dataclass(frozen=True)
class TensorBytes:
    """A tensor as bytes.

    Attributes:
        kind: of its values, one of `KINDS`.
        shape: its sides.
        data: its values, row by row.
    """

    kind: str
    shape: tuple[int, ...]
    data: memoryview


def write_tensors(path: Path, tensors: Mapping[str, TensorBytes], skeleton: str) -> None:
    """Write a file so that ``path`` holds either all of it or what it held before; its folder is made if need be.

    Raises:
        StateError: the disk is full or cannot be written; nothing is left behind.
    """
    head = _head(tensors, skeleton)
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(head)
            for _, tensor in _in_file_order(tensors):
                file.write(tensor.data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync_folder(path.parent)
    except OSError as error:
        size = len(head) + sum(tensor.data.nbytes for tensor in tensors.values())
        raise StateError(f"cannot save {path} ({size:,} bytes): {error.strerror}; {_free(path)}") from error
    finally:
        partial.unlink(missing_ok=True)


def read_tensors(path: Path) -> tuple[dict[str, TensorBytes], str]:
    """The tensors that `write_tensors` wrote, in the file's order, and the skeleton.

    Raises:
        FileNotFoundError: there is no such file.
        StateError: it is truncated, garbled or not a checkpoint of this package.
    """
    data = memoryview(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    try:
        if size > min(len(data) - 8, MAX_HEAD_BYTES):
            raise ValueError("its head is longer than the file")
        head = json.loads(bytes(data[8 : 8 + size]))
        metadata = head.pop("__metadata__")
        tensors = {name: _tensor(entry, data[8 + size :]) for name, entry in head.items()}
        skeleton, told = metadata["skeleton"], metadata["sha256"]
        found = digest(tensors, skeleton)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise StateError(f"{path} is truncated or not a checkpoint: {error}") from error
    if told != found:
        raise StateError(f"{path} is garbled: its contents do not match their checksum")
    return tensors, skeleton


def _tensor(entry: Any, data: memoryview) -> TensorBytes:
    kind, shape = _TORCH_NAMES[entry["dtype"]], tuple(entry["shape"])
    start, stop = entry["data_offsets"]
    if not 0 <= start <= stop <= len(data) or stop - start != math.prod(shape) * KINDS[kind][1]:
        raise ValueError("a tensor is cut off")
    return TensorBytes(kind, shape, data[start:stop])


def digest(tensors: Mapping[str, TensorBytes], skeleton: str) -> str:
    """SHA-256 over all that is saved, in hex."""
    total = hashlib.sha256(skeleton.encode())
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} torch.{tensor.kind} {tensor.shape}".encode())
        total.update(tensor.data)
    return total.hexdigest()


def _in_file_order(tensors: Mapping[str, TensorBytes]) -> list[tuple[str, TensorBytes]]:
    """Widest values first, as the format wants them aligned; then by name."""
    return sorted(tensors.items(), key=lambda entry: (-KINDS[entry[1].kind][1], entry[0]))


def _head(tensors: Mapping[str, TensorBytes], skeleton: str) -> bytes:
    """What a safetensors file begins with: length and JSON of names, types, shapes and offsets."""
    metadata = {"colab_swarm": VERSION, "skeleton": skeleton, "sha256": digest(tensors, skeleton)}
    entries: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, tensor in _in_file_order(tensors):
        end = offset + tensor.data.nbytes
        shape = list(tensor.shape)
        entries[name] = {"dtype": KINDS[tensor.kind][0], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def sync_folder(folder: Path) -> None:
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


class StepFiles:
    """The last checkpoints of one run, ``step-000000000012.safetensors`` and so on.

    Args:
        path: the folder; made at the first save.
        keep: how many to keep.

    Raises:
        ValueError: ``keep`` is below 1.
    """

    def __init__(self, path: str | Path, *, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep}: at least one checkpoint must be kept")
        self.path = Path(path)
        self.keep = keep

    def file_of(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        return self.path / f"step-{step:012}.safetensors"

    def paths(self) -> list[Path]:
        """The files there are, newest step first, readable or not."""
        return sorted(self.path.glob(f"step-{'[0-9]' * 12}.safetensors"), reverse=True)

    @property
    def newest_step(self) -> int:
        """The step of the newest file; 0 if there is none."""
        return max((int(path.stem.partition("-")[2]) for path in self.paths()), default=0)

    def prune(self, newest: Path) -> None:
        """Delete what is beyond `keep`, ``newest`` never."""
        stale: Iterable[Path] = [other for other in self.paths() if other != newest][self.keep - 1 :]
        for file in [*stale, *self.path.glob("step-*.partial")]:  # the partial ones: killed while saving
            file.unlink(missing_ok=True)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}, {len(self.paths())} of {self.keep} kept)"

    def _repr_html_(self) -> str:
        rows = [(path.name, size(path.stat().st_size)) for path in self.paths()]
        return facts(repr(self), {"newest step": f"{self.newest_step:,}"}, ("file", "size"), rows)
