"""Data as rows: samples in equally long columns, cut into subsets, and the bytes of a subset on the wire."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import zstandard
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import Tensor

Batch: TypeAlias = tuple[Tensor, ...] | dict[str, Tensor]
Array: TypeAlias = npt.NDArray[Any]
Indices: TypeAlias = npt.NDArray[np.int64]
KINDS = "biuf"
"""NumPy kinds of a column: bool, int, uint, float."""
MAX_DECODED_BYTES = 1 << 30
LEVEL = 3


@dataclass(frozen=True)
class Rows:
    """Samples as columns.

    Attributes:
        columns: arrays (n, …) by name.
        named: whether batches are dictionaries, else tuples in the order of the columns.
    """

    columns: Mapping[str, Array]
    named: bool

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    @property
    def size_bytes(self) -> int:
        """In memory."""
        return sum(column.nbytes for column in self.columns.values())

    def take(self, indices: Indices) -> Rows:
        """These samples."""
        return Rows({name: column[indices] for name, column in self.columns.items()}, self.named)

    def sample(self, count: int, *, seed: int) -> Rows:
        """At most ``count`` samples, the same ones for the same seed."""
        if count >= len(self):
            return self
        return self.take(np.sort(np.random.default_rng(seed).choice(len(self), count, replace=False)))

    def cut(self, subsets: int, *, seed: int) -> list[Rows]:
        """All samples in so many parts, of sizes that differ by one at most."""
        order = np.random.default_rng(seed).permutation(len(self))
        return [self.take(part) for part in np.array_split(order, subsets)]

    def batch(self, indices: Indices, device: torch.device) -> Batch:
        """These samples as tensors."""
        tensors = {
            name: torch.from_numpy(column[indices]).to(device) for name, column in self.columns.items()
        }
        return tensors if self.named else tuple(tensors.values())

    def encode(self) -> bytes:
        """As safetensors, compressed by zstd.

        Raises:
            ValueError: they are too many for `decode`.
        """
        names = list(self.columns)
        head = {
            "rows": msgspec.json.encode((names, self.named)).decode()
        }  # one key: their order is by chance
        columns = {name: np.ascontiguousarray(column) for name, column in self.columns.items()}
        if self.size_bytes > MAX_DECODED_BYTES:
            raise ValueError(
                f"a subset of {self.size_bytes:,} bytes: cut the data into more, by plan.subsets"
            )
        return zstandard.ZstdCompressor(level=LEVEL).compress(save(columns, metadata=head))

    @classmethod
    def decode(cls, data: bytes) -> Rows:
        """What `encode` made.

        Raises:
            ValueError: it is something else, or too large.
        """
        try:
            size = zstandard.frame_content_size(data)
            if not 0 <= size <= MAX_DECODED_BYTES:
                raise ValueError(f"a subset of {size:,} bytes: {MAX_DECODED_BYTES:,} at most")
            plain = zstandard.ZstdDecompressor().decompress(data, max_output_size=MAX_DECODED_BYTES)
            head = _metadata(plain)
            names, named = msgspec.json.decode(head["rows"], type=tuple[list[str], bool])
            columns = load(plain)
            rows = cls({name: columns[name] for name in names}, named)
            _check(rows)
        except (zstandard.ZstdError, SafetensorError, LookupError, msgspec.MsgspecError, TypeError) as error:
            raise ValueError(f"not a subset of data: {error}") from error
        return rows


class _Head(msgspec.Struct, rename={"metadata": "__metadata__"}):
    metadata: dict[str, str]


def _metadata(plain: bytes) -> dict[str, str]:
    """What `safetensors.numpy.load` leaves out."""
    size = int.from_bytes(plain[:8], "little")
    return msgspec.json.decode(plain[8 : 8 + size], type=_Head).metadata


def rows_of(data: Any) -> Rows:
    """Samples from what a user has: see `Job`.

    Raises:
        ValueError: there are no samples, or the columns differ in length or hold no numbers.
        TypeError: it is of a kind that has no rows.
    """
    if callable(data):
        data = data()
    if isinstance(data, Rows):
        return data
    if isinstance(data, Mapping):
        rows = Rows({str(name): _array(column) for name, column in data.items()}, named=True)
    elif isinstance(data, tuple | list) and data and hasattr(data[0], "shape"):
        rows = Rows({str(place): _array(column) for place, column in enumerate(data)}, named=False)
    elif hasattr(data, "column_names") and hasattr(data, "with_format"):  # datasets.Dataset
        numbers = data.with_format("numpy")
        rows = Rows({name: _array(numbers[name][:]) for name in data.column_names}, named=True)
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__"):  # torch's Dataset
        rows = _stacked([data[place] for place in range(len(data))])
    else:
        raise TypeError(
            f"data of type {type(data).__name__} has no rows: give arrays, a torch Dataset or a datasets.Dataset"
        )
    _check(rows)
    return rows


def _stacked(samples: Sequence[Any]) -> Rows:
    if not samples:
        raise ValueError("the data hold no sample")
    if isinstance(samples[0], Mapping):
        return Rows({str(name): _column(one[name] for one in samples) for name in samples[0]}, named=True)
    width = len(samples[0])
    return Rows({str(place): _column(one[place] for one in samples) for place in range(width)}, named=False)


def _column(values: Iterable[Any]) -> Array:
    return np.stack([_array(value) for value in values])


def _array(values: Any) -> Array:
    array = np.asarray(values.detach().cpu()) if isinstance(values, Tensor) else np.asarray(values)
    native = array.dtype.newbyteorder("=")  # torch knows no other
    return array.astype(np.float32 if native == np.float64 else native, copy=False)


def _check(rows: Rows) -> None:
    if not rows.columns:
        raise ValueError("the data have no column")
    for name, column in rows.columns.items():
        if column.dtype.kind not in KINDS:
            raise ValueError(f"column {name} holds {column.dtype}: rows are numbers, tokenize or drop it")
    lengths = {name: column.shape[:1] for name, column in rows.columns.items()}
    if len(set(lengths.values())) != 1 or () in lengths.values():
        raise ValueError(
            f"the columns differ in length: { {name: n[0] if n else 'none' for name, n in lengths.items()} }"
        )
    if not len(rows):
        raise ValueError("the data hold no sample")
