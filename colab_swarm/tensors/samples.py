"""How many samples a batch has, by the loader that drew it or by its parts. Pure functions.

Most batches are columns: tensors whose first dimensions agree. But a list of eight images of shape (3, H, W) is no
column of three samples, and time comes first in some batches. Where several readings are possible, nobody guesses.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader

# A list of more tensors of one kind may be one tensor a sample; so may few, if they look like images.
_MOST_COLUMNS = 4
_CHANNELS = (1, 3, 4)


def samples_of(batch: Any, loader: Any = None, index: int = 0) -> int | None:
    """Return the samples of a batch; None where its parts say nothing, or not all the same.

    A `DataLoader` with a sampler knows what it drew for its batch number ``index``, however that was collated.
    """
    most = None
    if isinstance(loader, DataLoader):
        most = loader.batch_size
    samples = samples_by_parts(batch, most)
    if most is None or samples == 0:
        return samples
    # The sampler of a stream has no length.
    if hasattr(loader.sampler, "__len__") and index * most < len(loader.sampler):
        return min(most, len(loader.sampler) - index * most)
    if samples is not None and samples > most:
        return None
    return samples


def samples_by_parts(batch: Any, full: int | None) -> int | None:
    """Return the samples that all parts of a batch agree on; where several are possible, ``full``, if it is one."""
    counts = _counts(batch)
    if full in counts:
        return full
    if len(counts) == 1:
        return next(iter(counts))
    return None


def _counts(batch: Any) -> set[int]:
    """Return all numbers of samples that a batch, or a part of one, may have; none if it says nothing."""
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
    """Return the numbers that all parts allow; all numbers where the parts disagree."""
    known = [*filter(None, map(_counts, parts))]
    if not known:
        return set()
    return set.intersection(*known) or set.union(*known)


def _kind(part: Any) -> object:
    """Return what parts of one kind have in common."""
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
