"""Named tensors as bytes: one file in the safetensors format, read without torch and without a copy.

A file is the size of its head (uint64), the head as JSON, and the tensors' values without gaps. The head has the type,
shape and place of each tensor, and plain text as metadata. https://huggingface.co/docs/safetensors
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import msgspec

from colab_swarm.errors import require
from colab_swarm.net.peers import UNDECODABLE
from colab_swarm.tensors.vectors import Buffer

MAX_HEAD_BYTES = 100_000_000  # as in the library safetensors
MAX_DIMENSIONS = 64  # of a tensor, as in numpy
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
KIND_NAMES = {name: kind for kind, (name, _) in KINDS.items()}
_SIZE_BYTES = 8  # of the head's size
METADATA = "__metadata__"

# Of a tensor: its name, its kind (one of `KINDS`), and its shape.
Description: TypeAlias = tuple[str, str, tuple[int, ...]]
_Whole: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class TensorEntry(msgspec.Struct, frozen=True):
    """A tensor in a file's head; ``data_offsets`` count from the head's end."""

    dtype: str
    shape: Annotated[tuple[_Whole, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    data_offsets: tuple[_Whole, _Whole]


@dataclass(frozen=True)
class FileHead:
    entries: dict[str, TensorEntry]
    metadata: dict[str, str]
    size_bytes: int  # where the values begin


def encode_head(tensors: Iterable[Description], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the head of a file with these tensors in this order; the metadata come first in it."""
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


def decode_head(data: Buffer) -> FileHead:
    """Return the head of a stranger's file, of which ``data`` is the beginning; raises ValueError if it is none."""
    text_bytes = int.from_bytes(data[:_SIZE_BYTES], "little")
    end = _SIZE_BYTES + text_bytes
    require(text_bytes <= MAX_HEAD_BYTES and end <= len(data), "its head is cut off or too large")
    try:
        parts = msgspec.json.decode(data[_SIZE_BYTES:end], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(parts.pop(METADATA, msgspec.Raw(b"{}")), type=dict[str, str])
        entries = {name: msgspec.json.decode(part, type=TensorEntry) for name, part in parts.items()}
    except UNDECODABLE as error:
        raise ValueError(f"its head cannot be read: {error}") from error
    return FileHead(entries, metadata, end)
