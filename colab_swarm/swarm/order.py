"""The order in which a peer reads its data. Each peer gets its own order, or a warning that it has none."""

import random
from typing import Any

import torch
from torch.utils.data import IterableDataset, SequentialSampler

from colab_swarm.net.peers import PeerId

_IN_ORDER = (
    "all peers read this loader in one order, unless their data differ: use DataLoader(…, shuffle=True), or other "
    "data at each peer"
)
_SAME_STREAM = (
    "this stream gives all peers the same rows in one order, as far as is known: shuffle it, as in "
    "stream.shuffle(buffer_size=1000) of datasets, or give each peer other rows"
)


def seed_of(peer: PeerId, *purpose: object) -> int:
    """Return a seed of 60 bits for a peer and a purpose; it is the same in all sessions of the peer."""
    return random.Random(" ".join(map(str, [peer.hex(), *purpose]))).getrandbits(60)


def give_order(loader: Any, seed: int, epoch: int = 0) -> str:
    """Give the next passes over a loader the order of this ``seed``; return a warning for the user, or "".

    ``epoch`` is for a loader that reads one part of an order that all peers share: all must be in the same epoch.
    """
    source = _source_of(loader)
    if hasattr(source, "initial_seed"):
        # accelerate's sampler seeds with initial_seed + epoch, and its loader counts the passes as ``iteration``.
        source.initial_seed = seed - getattr(loader, "iteration", 0)
        source.set_epoch(getattr(loader, "iteration", 0))
        return ""
    has_generator = source is not loader and hasattr(source, "generator")
    if has_generator:
        source.generator = torch.Generator().manual_seed(seed)
    # A DistributedSampler, or a stream after split_dataset_by_node, reads a part of one order that all peers share.
    # That order must stay the same for all.
    is_part = getattr(source, "num_replicas", 1) > 1 or getattr(source, "_distributed", None) is not None
    if hasattr(source, "set_epoch"):
        source.set_epoch(epoch if is_part else seed % (1 << 31))
    if has_generator or is_part or _reorders(source):
        return ""
    if source is loader or source is getattr(loader, "dataset", None):
        return _SAME_STREAM
    if isinstance(source, SequentialSampler) or hasattr(source, "set_epoch"):
        return _IN_ORDER
    kind = type(source).__name__
    return (
        f"peers whose scripts set the same random seed read this loader in one order, that of its {kind}: let it "
        "draw from self.generator, which is each peer's own, seed each peer by swarm.id, or give each other data"
    )


def _source_of(loader: Any) -> Any:
    """Return the object that decides the loader's order: a sampler, a batch sampler, a stream or the loader itself."""
    data = getattr(loader, "dataset", loader)
    batch_sampler = getattr(loader, "batch_sampler", None)
    sampler = getattr(batch_sampler, "sampler", getattr(loader, "sampler", None))
    if sampler is None or isinstance(data, IterableDataset):
        return data
    # A loader with a batch sampler of the user also has a sampler, but does not read it.
    if batch_sampler is not None and not hasattr(batch_sampler, "sampler"):
        return batch_sampler
    return sampler


def _reorders(stream: Any) -> bool:
    """Return True if ``set_epoch`` changes the order of a stream or sampler, as far as is known."""
    if not hasattr(stream, "set_epoch"):
        return False
    if not hasattr(stream, "_ex_iterable"):
        # A sampler has an attribute ``shuffle``; a stream has a method of this name.
        return bool(getattr(stream, "shuffle", True))
    # A stream of the library `datasets` is a chain of iterables; shuffle(), skip() and take() add parts to it.
    names = ""
    parts = [stream._ex_iterable]
    while parts:
        part = parts.pop()
        names += type(part).__name__
        parts += getattr(part, "ex_iterables", [])
        parts += filter(None, [getattr(part, "ex_iterable", None)])
    # Since version 5 of `datasets`, an epoch shuffles the shards of any stream, unless some of its rows are cut off.
    shuffles_shards = stream.num_shards > 1 and not hasattr(stream, "_shuffling")
    return "Shuffle" in names or (shuffles_shards and "Skip" not in names and "Take" not in names)
