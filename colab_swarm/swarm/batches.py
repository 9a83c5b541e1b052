"""A peer's data in a plain training loop: on its device, in its own order, until the swarm's last step."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from colab_swarm.errors import require
from colab_swarm.net.peers import PeerId
from colab_swarm.tensors.samples import samples_of

if TYPE_CHECKING:
    from colab_swarm.notebook.panel import Panel
    from colab_swarm.snapshot import SwarmSnapshot
    from colab_swarm.swarm.script import ScriptLines
    from colab_swarm.training.optimizer import SwarmOptimizer

_SAME_ORDER = (
    "all peers read this loader in one order: use DataLoader(…, shuffle=True), or other data at each peer"
)
_SAME_STREAM = (
    "this stream gives all peers the same rows in one order, as far as is known: shuffle it, as in "
    "stream.shuffle(buffer_size=1000) of datasets, or give each peer other rows"
)


class BatchReader:
    """Reads a loader again and again for one trainer, from its position, which the optimizer keeps.

    ``peer`` seeds the order of each pass. ``warn`` takes a sentence for the user.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        optimizer: "SwarmOptimizer",
        *,
        peer: PeerId,
        warn: Callable[[str], None],
    ) -> None:
        self._loader = loader
        self._optimizer = optimizer
        self._peer = peer
        self._warn = warn
        self._device = optimizer.param_groups[0]["params"][0].device

    def read(
        self, max_steps: int, *, panel: "Panel[SwarmSnapshot] | None", lines: "ScriptLines"
    ) -> Iterator[Any]:
        """Yield batches until the swarm's step ``max_steps``. Without a panel, print ``lines``."""
        optimizer = self._optimizer
        optimizer.raises_at_end = False
        # the form of cs.connect() shows it already
        if panel is not None and not panel.in_form:
            from IPython.display import display

            display(panel)  # type: ignore[no-untyped-call]
        passes = self._passes()
        while not (optimizer.over or optimizer.global_step >= max_steps):
            yield next(passes)
            if panel is None:
                lines.on_batch(max_steps)
        if panel is not None:
            panel.refresh()

    def _passes(self) -> Iterator[Any]:
        optimizer = self._optimizer
        checkpoint = optimizer.checkpoint
        while True:
            number, done = checkpoint.position
            self._shuffle(number)
            for index, batch in enumerate(self._loader):
                # an earlier session of this peer has read the first ones
                if index < done:
                    continue
                checkpoint.position = number, index + 1
                size: float | None = samples_of(batch, self._loader, index)
                if size == 0:
                    continue
                if size is None:
                    # Without batch_size= either, a bare step() asks for samples=.
                    size = optimizer.settings.batch_size
                optimizer.next_batch(samples=size)
                yield _moved(batch, self._device)
            require(
                checkpoint.position != (number, 0),
                "the loader gave no batch: pass a DataLoader or a list, which can be read again and again",
            )
            checkpoint.position = number + 1, 0

    def _shuffle(self, number: int) -> None:
        """Give the loader's pass of this ``number`` an order of this peer's own; warn at the first if it has none."""
        seed = random.Random(f"{self._peer.hex()} {number}").getrandbits(60)
        source: Any = getattr(self._loader, "dataset", self._loader)
        sampler = getattr(self._loader, "sampler", None)
        sampler = getattr(getattr(self._loader, "batch_sampler", None), "sampler", sampler)
        warning = _SAME_STREAM
        has_generator = False
        if sampler is not None and not isinstance(source, torch.utils.data.IterableDataset):
            source = sampler
            warning = _SAME_ORDER
            has_generator = hasattr(sampler, "generator")
        if has_generator:
            source.generator = torch.Generator().manual_seed(seed)
        # A DistributedSampler, or a stream after split_dataset_by_node: parts of one order, which must stay one.
        is_part = getattr(source, "num_replicas", 1) > 1 or getattr(source, "_distributed", None) is not None
        if hasattr(source, "set_epoch"):
            source.set_epoch(number if is_part else seed % (1 << 31))
        if number == 0 and not (has_generator or is_part or _reorders(source)):
            self._warn(warning)


def _moved(batch: Any, device: torch.device) -> Any:
    """Return the batch with all its tensors on ``device``."""
    # tensors, and the batches of transformers
    if hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: _moved(part, device) for name, part in batch.items()}
    if not isinstance(batch, list | tuple):
        return batch
    parts = [_moved(part, device) for part in batch]
    if hasattr(batch, "_fields"):
        return type(batch)(*parts)
    return type(batch)(parts)


def _reorders(stream: Any) -> bool:
    """Return True if ``set_epoch`` changes the order of a stream or sampler, as far as is known."""
    if not hasattr(stream, "set_epoch"):
        return False
    if not hasattr(stream, "_ex_iterable"):
        # Samplers have the word, streams the method.
        return bool(getattr(stream, "shuffle", True))
    # A stream of the library datasets is a chain; shuffle(), skip() and take() add parts to it.
    names = ""
    parts = [stream._ex_iterable]
    while parts:
        part = parts.pop()
        names += type(part).__name__
        parts += getattr(part, "ex_iterables", [])
        parts += filter(None, [getattr(part, "ex_iterable", None)])
    # Since its version 5 an epoch shuffles the shards of any stream, unless some of its rows are cut off.
    shuffles_shards = stream.num_shards > 1 and not hasattr(stream, "_shuffling")
    return "Shuffle" in names or (shuffles_shards and "Skip" not in names and "Take" not in names)
