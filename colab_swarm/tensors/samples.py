"""How many samples a batch has, according to the loader that drew it or to the parts of the batch. Pure functions.

Most batches are columns: tensors whose first dimensions agree. But a list of eight images of shape (3, H, W) is not a
column of three samples, and in some batches time is the first dimension. If several readings are possible, the result
is None rather than a guess.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import BatchSampler, DataLoader

# A list of more tensors of one kind than this may have one tensor per sample. A shorter list may, too, if its tensors
# look like images.
_MOST_COLUMNS = 4
_CHANNELS = (1, 3, 4)


def samples_of(batch: Any, loader: Any = None, index: int = 0) -> int | None:
    """Return the number of samples in a batch; None if its parts do not show it, or contradict one another.

    A `DataLoader` with a sampler knows how many samples it drew for its batch number ``index``, in whatever way they
    were collated. But a collate function may drop samples; then the remaining rows count.
    """
    most = _full_size(loader)
    samples = samples_by_parts(batch, most)
    if most is None and texts_in_one_row(batch) > 1:
        return None
    if most is None or samples == 0:
        return samples
    drawn = _drawn(loader, index)
    if drawn is not None:
        return _left_of(drawn, batch)
    if samples is not None and samples > most:
        return None
    return samples


def _full_size(loader: Any) -> int | None:
    """Return how many samples a full batch of a loader has; None if this is not known."""
    if not isinstance(loader, DataLoader):
        return None
    # Loaders of accelerate, and of some users, have a batch sampler in place of a batch size.
    if type(loader.batch_sampler) is BatchSampler:
        return loader.batch_sampler.batch_size
    return loader.batch_size


def _drawn(loader: Any, index: int) -> int | None:
    """Return how many samples a loader with a sampler drew for its batch number ``index``; None if not known."""
    full = _full_size(loader)
    if full is None:
        return None
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    before = index * full
    # The sampler of a stream has no length.
    if hasattr(sampler, "__len__") and before < len(sampler):
        return min(full, len(sampler) - before)
    return None


def _left_of(drawn: int, batch: Any) -> int | None:
    """Return how many of the ``drawn`` samples are left in a batch; None if this is unclear."""
    counts = _counts(batch)
    if drawn in counts or not counts or min(counts) > drawn or texts_in_one_row(batch) > 1:
        return drawn
    shapes = [tensor.shape for tensor in _tensors(batch)]
    # Samples may be in the second dimension, for example if time is the first one.
    if all(len(shape) > 1 and shape[1] == drawn for shape in shapes):
        return drawn if len(counts) > 1 else None
    # A single row of numbers may be one text, or all texts joined without padding.
    if len(counts) > 1 or _is_one_text(batch):
        return None
    return next(iter(counts))


def texts_in_one_row(batch: Any) -> int:
    """Return how many texts are in a batch's only row, according to its position ids; 0 if they do not show it."""
    positions = batch.get("position_ids") if isinstance(batch, Mapping) else None
    if not isinstance(positions, torch.Tensor) or positions.ndim != 2 or len(positions) != 1:
        return 0
    return int((positions == 0).sum())


def _is_one_text(batch: Any) -> bool:
    """Return True if all tensors of a batch are one row of equally many integers, like the tokens of one text."""
    tensors = _tensors(batch)
    if any(tensor.is_floating_point() or tensor.ndim != 2 for tensor in tensors):
        return False
    return {tensor.shape[0] for tensor in tensors} == {1} and len({tensor.shape for tensor in tensors}) == 1


def _tensors(part: Any) -> list[torch.Tensor]:
    """Return all tensors in a batch that have at least one dimension."""
    if isinstance(part, torch.Tensor):
        return [part] if part.ndim else []
    if isinstance(part, Mapping):
        part = [*part.values()]
    if not isinstance(part, list | tuple):
        return []
    return [tensor for inner in part for tensor in _tensors(inner)]


@dataclass
class SampleCounter:
    """Counts the samples in the batches of one loader. If the user gave a ``batch_size``, a full batch counts so many.

    Args:
        loader: the loader of the batches, if it is known.
        batch_size: number of samples in a batch, as the user gave it. Once a batch has this many rows, rows are taken
            as samples, so a smaller batch counts its rows.
    """

    loader: Any = None
    batch_size: float | None = None
    _rows_are_samples: bool = field(default=False, init=False)

    def count(self, batch: Any, index: int) -> float | None:
        """Return the number of samples in the loader's batch number ``index``; None if it is not known."""
        rows = samples_of(batch, self.loader, index)
        full = self.batch_size
        if full is None or rows == 0:
            return rows
        self._rows_are_samples |= rows == full
        if self._rows_are_samples and rows is not None and rows < full:
            return rows
        drawn = _drawn(self.loader, index)
        drawn_full = _full_size(self.loader)
        if drawn is None or drawn_full is None:
            return full
        return full * drawn / drawn_full


class RowCounter:
    """Counts the examples in micro-batches; a full micro-batch has ``full`` examples, however many rows these are.

    Args:
        full: number of examples in a full micro-batch.
        batch_size: the number of examples in a full micro-batch, if the user gave it; then ``full`` is not used.
        most: number of examples in the whole data set, if it is known.
    """

    def __init__(self, full: int, batch_size: float | None = None, *, most: int | None = None) -> None:
        self._full = full
        self._most = full if most is None else min(full, most)
        self._counter = SampleCounter(batch_size=batch_size)
        self._batch_size = batch_size
        self._rows_per_example = 1
        self._one_row = True  # whether all micro-batches so far had only one row

    def count(self, batch: Any) -> float | None:
        """Return the number of examples in a micro-batch; None if it is not known."""
        if self._batch_size is not None:
            return self._counter.count(batch, 0)
        rows = samples_by_parts(batch, self._full)
        texts = texts_in_one_row(batch)
        if rows is not None and rows > 1:
            self._one_row = False
        if self._one_row and self._full > 1 and (texts or _is_one_text(batch)):
            # A packed row may have more texts than the loader drew rows.
            return min(texts or self._most, self._most)
        if not rows:
            return rows
        # For example, the chosen and the rejected text of each pair are two rows of one example.
        if rows > self._full and rows % self._full == 0:
            self._rows_per_example = rows // self._full
        return rows / self._rows_per_example


def samples_by_parts(batch: Any, full: int | None) -> int | None:
    """Return the number of samples on which all parts of a batch agree; if ``full`` is possible, it is preferred."""
    counts = _counts(batch)
    if full in counts:
        return full
    if len(counts) == 1:
        return next(iter(counts))
    return None


def _counts(batch: Any) -> set[int]:
    """Return all numbers of samples that a batch, or a part of one, may have; empty if it does not show any."""
    if isinstance(batch, PackedSequence):
        return {int(batch.batch_sizes[0])}
    if isinstance(batch, torch.Tensor):
        return set(batch.shape[:1])
    if isinstance(batch, Mapping):
        return _agreed(batch.values())
    if not isinstance(batch, list | tuple) or not batch:
        return set()
    as_columns = _agreed(batch)
    kinds = {_kind(part) for part in batch}
    if len(kinds) > 1:
        return as_columns
    if not _has_tensor(batch):
        return {len(batch)}
    if as_columns and isinstance(batch[0], torch.Tensor) and len(batch) <= _MOST_COLUMNS:
        look_like_images = batch[0].ndim == 3 and batch[0].shape[0] in _CHANNELS
        if not look_like_images:
            return as_columns
    return {len(batch), *as_columns}


def _agreed(parts: Iterable[Any]) -> set[int]:
    """Return the numbers that all parts allow; if there are none, the numbers of all parts."""
    known = [*filter(None, map(_counts, parts))]
    if not known:
        return set()
    return set.intersection(*known) or set.union(*known)


def _kind(part: Any) -> object:
    """Return a value that is equal for parts of the same kind."""
    if isinstance(part, torch.Tensor):
        return part.dtype, part.ndim
    if isinstance(part, list | tuple):
        return tuple(map(_kind, part))
    return type(part)


def _has_tensor(part: Any) -> bool:
    if isinstance(part, Mapping):
        return any(map(_has_tensor, part.values()))
    if isinstance(part, list | tuple):
        return any(map(_has_tensor, part))
    return isinstance(part, torch.Tensor)
