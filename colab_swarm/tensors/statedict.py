"""Training state as named tensors with a plain skeleton, and files that hold both. Never pickle.

`flatten` accepts any state of optimizers, schedulers or users: None, bool, int, float, str, bytes,
tensors, and lists, tuples and dicts of these. Tensors go into a dictionary. The rest is the
*skeleton*: None, bool, int, float (NaN and infinities, too), str, list, and dictionaries with
exactly one entry, which stand for what JSON cannot express:

    {"tensor": name}   {"bytes": base64}   {"tuple": [item, …]}   {"dict": [[key, value], …]}

Both may come from a stranger: `unflatten` checks all of it. A file is in the safetensors format;
its metadata hold the skeleton and a SHA-256 over all. A relay keeps checkpoints without torch.
"""

import base64
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from colab_swarm.errors import StateError, require
from colab_swarm.files import write_file

if TYPE_CHECKING:
    import torch


MAX_DEPTH = 32
MAX_NODES = 1_000_000
MAX_SKELETON_BYTES = 64 << 20
MAX_HEAD_BYTES = 256 << 20
VERSION = "1"
PLAIN = str | int | float | bytes | None  # types of the keys of a dictionary
# allowed types of values, as torch names them: the name in a file, and the size in bytes
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
    "complex64": ("C64", 8),
}
_TORCH_NAMES = {name: kind for kind, (name, _) in KINDS.items()}


def flatten(state: Any) -> "tuple[dict[str, torch.Tensor], bytes]":
    """Split a state into named tensors and a skeleton, as JSON.

    Tensors are detached, on the CPU and contiguous; those that were already share the state's
    memory. Tied weights get one name: the path to the tensor, such as ``optimizer/state/0/exp_avg``.
    Raises TypeError for an unsupported type, ValueError for over `MAX_DEPTH` levels, `MAX_NODES`
    parts, an integer that Python does not print, or text that is not Unicode.
    """
    walk = _Walk({})
    skeleton = walk.split(state, "", 0)
    return walk.tensors, json.dumps(skeleton, ensure_ascii=False, separators=(",", ":")).encode()


def copied(state: Any) -> Any:
    """Return a copy of the state, with its tensors on the CPU; raises as `flatten` does."""
    tensors, skeleton = flatten(state)
    return unflatten({name: tensor.clone() for name, tensor in tensors.items()}, skeleton)


def unflatten(tensors: "Mapping[str, torch.Tensor]", skeleton: bytes) -> Any:
    """Return the state that `flatten` split; tensors are not copied.

    Raises StateError if the skeleton is too large or invalid, or names other tensors.
    """
    text = f"state skeleton has {len(skeleton)} bytes; {MAX_SKELETON_BYTES} are allowed"
    require(len(skeleton) <= MAX_SKELETON_BYTES, text, StateError)
    walk = _Walk(dict(tensors))
    try:
        state = walk.join(json.loads(skeleton.decode()), 0)  # bytes could be UTF-16, too
    except (ValueError, RecursionError) as error:
        raise StateError(f"state skeleton cannot be read: {error}") from error
    unused = tensors.keys() - walk.used
    if unused:
        raise StateError(f"the skeleton does not name {len(unused)} tensors, such as {min(unused)!r}")
    return state


class _Walk:
    def __init__(self, tensors: "dict[str, torch.Tensor]") -> None:
        self.tensors = tensors
        self.used = set[str]()
        self._names: dict[Any, str] = {}
        self._parts = 0

    def _count(self, depth: int) -> None:
        self._parts += 1
        text = f"state is too deep or too large: {MAX_DEPTH} levels, {MAX_NODES} parts"
        require(depth <= MAX_DEPTH and self._parts <= MAX_NODES, text)

    def split(self, state: Any, path: str, depth: int) -> Any:
        import torch

        self._count(depth)
        match state:
            case None | bool() | int() | float() | str():
                return state
            case bytes():
                return {"bytes": base64.b64encode(state).decode()}
            case torch.Tensor():
                return {"tensor": self._name(state, path)}
            case list() | tuple():
                items = [self.split(item, f"{path}/{i}", depth + 1) for i, item in enumerate(state)]
                return items if isinstance(state, list) else {"tuple": items}
            case Mapping():
                return {"dict": [self._pair(key, value, path, depth + 1) for key, value in state.items()]}
        raise TypeError(f"{path!r} is a {type(state).__name__}, not saved without pickle: convert it")

    def _pair(self, key: Any, value: Any, path: str, depth: int) -> list[Any]:
        problem = f"a key at {path!r} is a {type(key).__name__}, not a plain value"
        require(isinstance(key, PLAIN), problem, TypeError)
        step = key if isinstance(key, str) else repr(key)
        below = f"{path}/{step}" if path else step
        return [self.split(key, path, depth), self.split(value, below, depth)]

    def _name(self, tensor: "torch.Tensor", path: str) -> str:
        known_kind = str(tensor.dtype).removeprefix("torch.") in KINDS
        if not known_kind or str(tensor.layout) != "torch.strided" or tensor.is_meta:
            kind = f"{tensor.layout} tensor of {tensor.dtype} on {tensor.device}"
            raise TypeError(f"state has a {kind} at {path!r}, which cannot be saved")
        memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and memory in self._names:
            return self._names[memory]
        name = path or "tensor"
        while name in self.tensors:  # keys 0 and "0", or "a/b" and "a" -> "b", lead to one path
            name += "'"
        self.tensors[name] = tensor.detach().cpu().contiguous()
        self._names[memory] = name
        return name

    def join(self, skeleton: Any, depth: int) -> Any:
        self._count(depth)
        match skeleton:
            case None | bool() | int() | float() | str():
                # raises for half a surrogate pair, which no file can hold
                if isinstance(skeleton, str):
                    return skeleton.encode().decode()
                return skeleton
            case list():
                return [self.join(item, depth + 1) for item in skeleton]
            case {"tensor": str(name)} if len(skeleton) == 1 and name in self.tensors:
                self.used.add(name)
                return self.tensors[name]
            case {"bytes": str(text)} if len(skeleton) == 1:
                return base64.b64decode(text, validate=True)
            case {"tuple": list(items)} if len(skeleton) == 1:
                return tuple(self.join(item, depth + 1) for item in items)
            case {"dict": list(pairs)} if len(skeleton) == 1:
                return self._dictionary(pairs, depth + 1)
        raise ValueError(
            f"it has an unknown {type(skeleton).__name__}, perhaps of another version, or lacks a tensor"
        )

    def _dictionary(self, pairs: list[Any], depth: int) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for pair in pairs:
            require(isinstance(pair, list) and len(pair) == 2, "it has a dictionary entry that is not a pair")
            key = self.join(pair[0], depth)
            text = "it has a dictionary key that is repeated or not a plain value"
            require(isinstance(key, PLAIN) and key not in found, text)
            found[key] = self.join(pair[1], depth)
        return found


@dataclass(frozen=True)
class TensorBytes:
    """A tensor as bytes: one of `KINDS`, its shape, and its values row by row."""

    kind: str
    shape: tuple[int, ...]
    data: memoryview


def as_bytes(tensors: "Mapping[str, torch.Tensor]") -> dict[str, TensorBytes]:
    """Return tensors from `flatten` as views of their memory."""
    import torch

    views = {}
    for name, tensor in tensors.items():
        kind = str(tensor.dtype).removeprefix("torch.")
        data = tensor.reshape(-1).view(torch.uint8).numpy().data
        views[name] = TensorBytes(kind, tuple(tensor.shape), data)
    return views


def as_tensors(tensors: Mapping[str, TensorBytes]) -> "dict[str, torch.Tensor]":
    """Return tensors that share this memory; raises `StateError` if a shape is impossible."""
    import torch

    views: dict[str, torch.Tensor] = {}
    for name, encoded in tensors.items():
        if encoded.data.nbytes:
            flat = torch.frombuffer(encoded.data, dtype=torch.uint8)
        else:
            flat = torch.empty(0).byte()
        try:
            views[name] = flat.view(getattr(torch, encoded.kind)).reshape(encoded.shape)
        except (RuntimeError, TypeError, ValueError, OverflowError) as error:  # such as (0, 2**64)
            raise StateError(f"the state has an invalid tensor {name[:80]!r}: {error}") from error
    return views


def write_tensors(path: Path, tensors: Mapping[str, TensorBytes], skeleton: bytes) -> None:
    """Write a state as a safetensors file and sync it, largest types first: all are aligned."""
    ordered = dict(sorted(tensors.items(), key=lambda entry: (-KINDS[entry[1].kind][1], entry[0])))
    metadata = {"colab_swarm": VERSION, "skeleton": skeleton.decode(), "sha256": digest(tensors, skeleton)}
    head: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, tensor in ordered.items():
        begin = end
        end = end + tensor.data.nbytes
        head[name] = {"dtype": KINDS[tensor.kind][0], "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    values = [tensor.data for tensor in ordered.values()]
    write_file(path, [len(text).to_bytes(8, "little"), text, *values], sync=True)


def read_tensors(path: Path) -> tuple[dict[str, TensorBytes], bytes]:
    """Return the tensors of a file, in its order and in new memory, and the skeleton.

    Raises FileNotFoundError, or StateError if it is truncated, damaged or no checkpoint.
    """
    require(path.exists(), f"no checkpoint at {path}", FileNotFoundError)
    try:
        data = np.fromfile(path, np.uint8).data
        size = int.from_bytes(data[:8], "little")
        require(size <= min(len(data) - 8, MAX_HEAD_BYTES), "its head is longer than the file")
        head = json.loads(bytes(data[8 : 8 + size]))
        metadata = head.pop("__metadata__", {})
        text = f"{path} is not a checkpoint of this version of colab_swarm"
        require(metadata.get("colab_swarm") == VERSION, text, StateError)
        tensors = {name: _tensor(entry, data[8 + size :]) for name, entry in head.items()}
        skeleton = metadata["skeleton"].encode()
        expected = metadata["sha256"]
        found = digest(tensors, skeleton)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise StateError(f"{path} is truncated or not a checkpoint: {error}") from error
    require(expected == found, f"{path} is damaged: its contents do not match their checksum", StateError)
    return tensors, skeleton


def _tensor(entry: Any, data: memoryview) -> TensorBytes:
    kind = _TORCH_NAMES[entry["dtype"]]
    shape = tuple(entry["shape"])
    start, stop = entry["data_offsets"]
    require(
        0 <= start <= stop <= len(data) and stop - start == math.prod(shape) * KINDS[kind][1],
        "a tensor is truncated",
    )
    return TensorBytes(kind, shape, data[start:stop])


def digest(tensors: Mapping[str, TensorBytes], skeleton: bytes) -> str:
    """Return the SHA-256 over tensors and skeleton, in hex."""
    total = hashlib.sha256(skeleton)
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} torch.{tensor.kind} {tensor.shape}".encode())
        total.update(tensor.data)
    return total.hexdigest()
