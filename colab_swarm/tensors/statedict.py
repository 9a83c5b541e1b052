"""Training state as named tensors with a plain skeleton, in one safetensors file. Never pickle.

`flatten` accepts any state of optimizers, schedulers or users: None, bool, int, float, str, bytes,
tensors, and lists, tuples and dicts of these. Tensors go into a dictionary. The rest is the
*skeleton*: None, bool, int, float (NaN and infinities, too), str, list, and dictionaries with
exactly one entry, which stand for values that JSON cannot express:

    {"tensor": name}   {"bytes": base64}   {"tuple": [item, …]}   {"dict": [[key, value], …]}

A file consists of the size of its head (uint64), the head as JSON, and the tensors' values without gaps
(https://huggingface.co/docs/safetensors). The head's metadata contain the skeleton, and a place for the file's BLAKE3
hash. This place is only filled on disk, because on the wire each chunk has its own hash (`tensors.chunks`). The
bytes may come from a stranger, so `tensors_of` and `unflatten` check all of them. Torch is not needed to store
a state, so a relay can keep checkpoints without it.
"""

import base64
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from colab_swarm.errors import StateError, require
from colab_swarm.files import write_file
from colab_swarm.net.peers import UNDECODABLE, Buffer

if TYPE_CHECKING:
    import torch

Blob: TypeAlias = NDArray[np.uint8]  # the bytes of a file

MAX_DEPTH = 32
MAX_NODES = 1_000_000
VERSION = "1"
PLAIN = str | int | float | bytes | None  # allowed types of a dictionary's keys
MAX_HEAD_BYTES = 100_000_000  # as in the library safetensors
MAX_DIMENSIONS = 64  # maximum for a tensor, as in numpy
# allowed data types by torch's names, with the name in a file and the size in bytes
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
KIND_NAMES = {name: kind for kind, (name, _) in KINDS.items()}
METADATA = "__metadata__"
_SIZE_BYTES = 8  # bytes that store the head's size
_FIRST = b'{"__metadata__":{"blake3":"'  # each head begins with this, so the hash is always at the same place
_HASH = slice(_SIZE_BYTES + len(_FIRST), _SIZE_BYTES + len(_FIRST) + 64)
_BLANK = b"0" * 64
_BFLOAT16_EXPONENT = 0x7F80

# A tensor's name, its kind (one of `KINDS`), and its shape.
Description: TypeAlias = tuple[str, str, tuple[int, ...]]
_Whole: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class TensorEntry(msgspec.Struct, frozen=True):
    """A tensor in a file's head; ``data_offsets`` count from the head's end."""

    dtype: str
    shape: Annotated[tuple[_Whole, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    data_offsets: tuple[_Whole, _Whole]


def flatten(state: Any) -> "tuple[dict[str, torch.Tensor], bytes]":
    """Split a state into named tensors and a skeleton, as JSON.

    The returned tensors are detached, on the CPU and contiguous. Tensors that were so before share the state's
    memory. A tensor's name is its path, such as ``optimizer/state/0/exp_avg``; tied weights have only one name.
    Raises TypeError for an unsupported type, and ValueError for more than `MAX_DEPTH` levels or `MAX_NODES`
    parts, an integer that Python does not print, or text that is not Unicode.
    """
    walk = _Walk({})
    skeleton = walk.split(state, "", 0)
    return walk.tensors, json.dumps(skeleton, ensure_ascii=False, separators=(",", ":")).encode()


def unflatten(tensors: Mapping[str, Any], skeleton: bytes) -> Any:
    """Return the state that `flatten` split, with these tensors, which need not be torch's.

    Raises StateError if the skeleton is invalid, or if its tensors are not the given ones.
    """
    walk = _Walk(dict(tensors))
    try:
        state = walk.join(json.loads(skeleton.decode()), 0)  # json.loads would also accept UTF-16
    except (ValueError, RecursionError) as error:
        raise StateError(f"state skeleton cannot be read: {error}") from error
    unused = tensors.keys() - walk.used
    if unused:
        raise StateError(f"the skeleton does not name {len(unused)} tensors, such as {min(unused)!r}")
    return state


@dataclass
class _Walk:
    tensors: dict[str, Any]
    used: set[str] = field(default_factory=set)
    names: dict[Any, str] = field(default_factory=dict)  # names by the tensor's place in memory
    parts: int = 0

    def _count(self, depth: int) -> None:
        self.parts += 1
        text = f"state is too deep or too large: {MAX_DEPTH} levels, {MAX_NODES} parts"
        require(depth <= MAX_DEPTH and self.parts <= MAX_NODES, text)

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
                pairs = []
                for key, value in state.items():
                    problem = f"a key at {path!r} is a {type(key).__name__}, not a plain value"
                    require(isinstance(key, PLAIN), problem, TypeError)
                    step = key if isinstance(key, str) else repr(key)
                    below = f"{path}/{step}" if path else step
                    pairs.append([self.split(key, path, depth + 1), self.split(value, below, depth + 1)])
                return {"dict": pairs}
        raise TypeError(f"{path!r} is a {type(state).__name__}, not saved without pickle: convert it")

    def _name(self, tensor: "torch.Tensor", path: str) -> str:
        known_kind = str(tensor.dtype).removeprefix("torch.") in KINDS
        if not known_kind or str(tensor.layout) != "torch.strided" or tensor.is_meta:
            kind = f"{tensor.layout} tensor of {tensor.dtype} on {tensor.device}"
            raise TypeError(f"state has a {kind} at {path!r}, which cannot be saved")
        memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and memory in self.names:
            return self.names[memory]
        name = path or "tensor"
        # Keys 0 and "0", or "a/b" and "a" -> "b", give the same path. The name `METADATA` is reserved in a file.
        while name in self.tensors or name == METADATA:
            name += "'"
        self.tensors[name] = tensor.detach().cpu().contiguous()
        self.names[memory] = name
        return name

    def join(self, skeleton: Any, depth: int) -> Any:
        self._count(depth)
        match skeleton:
            case None | bool() | int() | float():
                return skeleton
            case str():
                # raises for half of a surrogate pair, which a file cannot store
                return skeleton.encode().decode()
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
                entries: dict[Any, Any] = {}
                for pair in pairs:
                    is_pair = isinstance(pair, list) and len(pair) == 2
                    require(is_pair, "it has a dictionary entry that is not a pair")
                    key = self.join(pair[0], depth + 1)
                    text = "it has a dictionary key that is repeated or not a plain value"
                    require(isinstance(key, PLAIN) and key not in entries, text)
                    entries[key] = self.join(pair[1], depth + 1)
                return entries
        raise ValueError(
            f"it has an unknown {type(skeleton).__name__}, perhaps of another version, or lacks a tensor"
        )


def encode_head(tensors: Iterable[Description], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the head of a file with these tensors, in this order; its metadata come first."""
    head: dict[str, object] = {}
    if metadata is not None:
        head[METADATA] = metadata
    end = 0
    for name, kind, shape in tensors:
        file_kind, value_bytes = KINDS[kind]
        begin = end
        end = begin + value_bytes * math.prod(shape)
        head[name] = TensorEntry(file_kind, shape, (begin, end))
    text = msgspec.json.encode(head)
    text += b" " * (-len(text) % _SIZE_BYTES)
    require(len(text) <= MAX_HEAD_BYTES, f"the head of {len(head)} tensors has {len(text):,} bytes")
    return len(text).to_bytes(_SIZE_BYTES, "little") + text


def decode_head(data: Buffer) -> tuple[dict[str, TensorEntry], dict[str, str], int]:
    """Return what a stranger's file says about its tensors, its metadata, and the position where the values begin.

    ``data`` may be only the beginning of the file. Raises ValueError if the head is not valid.
    """
    text_bytes = int.from_bytes(data[:_SIZE_BYTES], "little")
    end = _SIZE_BYTES + text_bytes
    require(text_bytes <= MAX_HEAD_BYTES and end <= len(data), "its head is cut off or too large")
    try:
        parts = msgspec.json.decode(data[_SIZE_BYTES:end], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(parts.pop(METADATA, msgspec.Raw(b"{}")), type=dict[str, str])
        entries = {name: msgspec.json.decode(part, type=TensorEntry) for name, part in parts.items()}
    except UNDECODABLE as error:
        raise ValueError(f"its head cannot be read: {error}") from error
    return entries, metadata, end


def file_parts(state: Any) -> list[memoryview]:
    """Return the parts of a state's file, in order: its head, and views of the tensors' memory.

    Tensors with the largest data types come first, so all tensors are aligned. Raises the errors of `flatten`.
    """
    import torch

    tensors, skeleton = flatten(state)
    parts: dict[Description, memoryview] = {}
    for name, tensor in tensors.items():
        kind = str(tensor.dtype).removeprefix("torch.")
        data = tensor.reshape(-1).view(torch.uint8).numpy().data
        parts[name, kind, tuple(tensor.shape)] = data
    ordered = sorted(parts, key=lambda part: (-KINDS[part[1]][1], part[0]))
    metadata = {"blake3": _BLANK.decode(), "colab_swarm": VERSION, "skeleton": skeleton.decode()}
    head = memoryview(encode_head(ordered, metadata))
    return [head, *(parts[description] for description in ordered)]


def pack(state: Any) -> Blob:
    """Return a copy of a state as the bytes of a file; raises the errors of `flatten`."""
    # numpy releases the GIL while it copies
    return np.concatenate([np.asarray(part) for part in file_parts(state)])


@dataclass(frozen=True)
class TensorBytes:
    """A tensor as bytes: its kind (one of `KINDS`), its shape, and its values row by row."""

    kind: str
    shape: tuple[int, ...]
    data: memoryview


def tensors_of(blob: Blob, source: object = "the state") -> tuple[dict[str, TensorBytes], bytes]:
    """Return the tensors in a stranger's file, as views, and its skeleton, which is not checked yet.

    ``source`` names the file in errors. Raises StateError if the file is cut off, or from another program or version.
    """
    data = memoryview(blob.data)
    tensors: dict[str, TensorBytes] = {}
    try:
        entries, metadata, first = decode_head(data)
        is_ours = metadata.get("colab_swarm") == VERSION and bytes(data[_SIZE_BYTES : _HASH.start]) == _FIRST
        require(is_ours, "it is not a checkpoint of this version of colab_swarm")
        at = first
        for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
            kind = KIND_NAMES[entry.dtype]
            value_bytes = KINDS[kind][1]
            begin, end = [first + offset for offset in entry.data_offsets]
            is_whole = end - begin == value_bytes * math.prod(entry.shape)
            is_in_place = begin == at and begin % value_bytes == 0
            require(
                is_whole and is_in_place, f"tensor {name[:80]!r} is not where its head says, or not as large"
            )
            tensors[name] = TensorBytes(kind, entry.shape, data[begin:end])
            at = end
        require(at == len(data), f"it has {len(data):,} bytes, and {at:,} by its head")
        return tensors, metadata["skeleton"].encode()
    except (ValueError, LookupError) as error:
        raise StateError(f"{source} cannot be read: {error}") from error


def require_finite(tensors: Mapping[str, TensorBytes]) -> None:
    """Raise StateError if a tensor contains NaN or infinite values."""
    for name, tensor in tensors.items():
        values = np.asarray(tensor.data)
        is_finite = True
        if tensor.kind == "bfloat16":
            is_finite = ((values.view(np.uint16) & _BFLOAT16_EXPONENT) != _BFLOAT16_EXPONENT).all()
        elif tensor.kind.startswith("float"):
            is_finite = np.isfinite(values.view(tensor.kind)).all()
        require(is_finite, f"the state holds NaN or infinite values in {name[:80]!r}", StateError)


def unpack(blob: Blob, *, finite: bool = True) -> Any:
    """Return the state in a stranger's blob; its tensors share the blob's memory.

    Raises StateError if the file, a shape or the skeleton is invalid, or, with ``finite``, a value is NaN or infinite.
    """
    import torch

    encoded_tensors, skeleton = tensors_of(blob)
    if finite:
        require_finite(encoded_tensors)
    tensors: dict[str, torch.Tensor] = {}
    for name, encoded in encoded_tensors.items():
        if encoded.data.nbytes:
            flat = torch.frombuffer(encoded.data, dtype=torch.uint8)
        else:
            flat = torch.empty(0).byte()
        try:
            tensors[name] = flat.view(getattr(torch, encoded.kind)).reshape(encoded.shape)
        except (RuntimeError, TypeError, ValueError, OverflowError) as error:  # for example for (0, 2**64)
            raise StateError(f"the state has an invalid tensor {name[:80]!r}: {error}") from error
    return unflatten(tensors, skeleton)


def write_state(path: Path, parts: Sequence[memoryview]) -> None:
    """Write a state's file from the parts of `file_parts`, with its hash, and sync it to the disk.

    Raises StateError if the file cannot be written.
    """
    first, *rest = parts
    write_file(path, [first[: _HASH.start], _hash_of(parts), first[_HASH.stop :], *rest], sync=True)


def read_state(path: Path) -> Blob:
    """Return the bytes of a state's file in the form in which they are sent, in new memory.

    Raises FileNotFoundError, or StateError if the file is cut off, damaged, or from another program or version.
    """
    require(path.exists(), f"no checkpoint at {path}", FileNotFoundError)
    try:
        blob = np.fromfile(path, np.uint8)
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error}") from error
    tensors_of(blob, path)
    data = memoryview(blob.data)
    written_hash = bytes(data[_HASH])
    data[_HASH] = _BLANK
    text = f"{path} is damaged: its contents do not match their hash"
    require(written_hash == _hash_of([data]), text, StateError)
    return blob


def _hash_of(parts: Sequence[memoryview]) -> bytes:
    total = blake3()
    for part in parts:
        total.update(part)
    return total.hexdigest().encode()
