"""Where each tensor of a snapshot lies in its blob, and a snapshot as named tensors. Needs no torch."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from colab_swarm.errors import StateError
from colab_swarm.net.peers import UNDECODABLE
from colab_swarm.tensors.tensorfile import KINDS, TensorBytes
from colab_swarm.training.state import Snapshot

ALIGNMENT_BYTES = 64
MAX_PARTS = 1_000_000
_NUMPY_KINDS = {"float16": np.float16, "float32": np.float32, "float64": np.float64}
_BFLOAT16_EXPONENT = 0x7F80


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """A tensor's name, type as torch calls it, and sides."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """The skeleton of a snapshot: the plain part of the state, and where each tensor lies in the blob."""

    skeleton: bytes
    tensors: tuple[TensorEntry, ...]


def decode_layout(data: bytes) -> Layout:
    """Read a snapshot's skeleton.

    Raises:
        StateError: it is none.
    """
    try:
        return msgspec.msgpack.decode(data, type=Layout)
    except UNDECODABLE as error:
        raise StateError(f"the donor's state cannot be read: {error}") from error


def room(size_bytes: int) -> int:
    """What a tensor of so many bytes takes in the blob."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def tensors_of(snapshot: Snapshot) -> tuple[dict[str, TensorBytes], str]:
    """A stranger's snapshot as what `write_tensors` takes; the tensors are views of its blob.

    Raises:
        StateError: it does not add up, is not of the step that it claims, or holds values that are not finite: a
            trainer would refuse it.
    """
    layout = decode_layout(snapshot.manifest.skeleton)
    tensors: dict[str, TensorBytes] = {}
    for entry, span in zip(layout.tensors, _spans(layout.tensors, snapshot.blob.nbytes), strict=True):
        tensors[entry.name] = TensorBytes(entry.dtype, entry.shape, memoryview(snapshot.blob.data)[span])
    state = _checked_state(layout.skeleton, tensors, len(layout.tensors))
    if (_step(state), _lineage(state)) != (snapshot.manifest.step, snapshot.manifest.lineage):
        raise StateError("the donor's state is not of the step that it claims")
    return tensors, layout.skeleton.decode()


def snapshot_of(tensors: Mapping[str, TensorBytes], skeleton: str) -> Snapshot:
    """The snapshot to give to others of a state that was read from a file.

    Raises:
        StateError: it is not the state of a collaboration.
    """
    entries = tuple(TensorEntry(name, tensor.kind, tensor.shape) for name, tensor in tensors.items())
    state = _checked_state(skeleton.encode(), tensors, len(entries))
    blob = np.zeros(sum(room(tensor.data.nbytes) for tensor in tensors.values()), np.uint8)
    for span, tensor in zip(_spans(entries, blob.nbytes), tensors.values(), strict=True):
        memoryview(blob.data)[span] = tensor.data
    layout = msgspec.msgpack.encode(Layout(skeleton.encode(), entries))
    return Snapshot.of(step=_step(state), lineage=_lineage(state), skeleton=layout, blob=blob)


def _spans(entries: Sequence[TensorEntry], size_bytes: int) -> Iterator[slice]:
    """Where the tensors lie in a blob, bytes."""
    at = 0
    for entry in entries:
        if entry.dtype not in KINDS or any(side < 0 for side in entry.shape):
            raise StateError(f"the donor's state has a tensor of unknown kind {entry.dtype!r}")
        tensor_bytes = math.prod(entry.shape) * KINDS[entry.dtype][1]
        if tensor_bytes > size_bytes - at:
            raise StateError("the donor's state is shorter than it says")
        yield slice(at, at + tensor_bytes)
        at += room(tensor_bytes)


def _checked_state(skeleton: bytes, tensors: Mapping[str, TensorBytes], count: int) -> dict[str, Any]:
    """The outermost entries of the state, if the skeleton names exactly these tensors and they are finite."""
    try:
        decoded = msgspec.json.decode(skeleton)
        state = dict(decoded["dict"])
    except (*UNDECODABLE, LookupError, TypeError, ValueError) as error:
        raise StateError(f"this is not the state of a collaboration: {error}") from error
    if len(tensors) != count or _named(decoded) != tensors.keys():
        raise StateError("the state's skeleton does not name exactly its tensors")
    for name, tensor in tensors.items():
        if not _finite(tensor):
            raise StateError(f"the state holds NaN or infinite values in {name[:80]!r}")
    return state


def _named(skeleton: Any) -> set[str]:
    """The tensors that a skeleton names."""
    names: set[str] = set()
    parts = [skeleton]
    for _ in range(MAX_PARTS):
        if not parts:
            return names
        match parts.pop():
            case {"tensor": str(name)}:
                names.add(name)
            case {"tuple": list(items)} | {"dict": list(items)} | list(items):
                parts += items
    raise StateError(f"the state has more than {MAX_PARTS:,} parts")


def _finite(tensor: TensorBytes) -> bool:
    if not tensor.data.nbytes:  # numpy takes no empty buffer
        return True
    if tensor.kind == "bfloat16":
        bits = np.frombuffer(tensor.data, np.uint16)
        return not bool(((bits & _BFLOAT16_EXPONENT) == _BFLOAT16_EXPONENT).any())
    if tensor.kind in _NUMPY_KINDS:
        return bool(np.isfinite(np.frombuffer(tensor.data, _NUMPY_KINDS[tensor.kind])).all())
    return True


def _step(state: Mapping[str, Any]) -> int:
    match state.get("step"):
        case int(step) if not isinstance(step, bool) and step >= 0:
            return step
    raise StateError("the state does not say its step")


def _lineage(state: Mapping[str, Any]) -> bytes:
    try:
        return base64.b64decode(state["lineage"]["bytes"], validate=True)
    except (LookupError, TypeError, ValueError) as error:
        raise StateError("the state does not say its lineage") from error
