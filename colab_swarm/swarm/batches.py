"""A peer's data in a plain training loop: on its device, in its own order, until the swarm's last step."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from colab_swarm.errors import require
from colab_swarm.markup import count
from colab_swarm.net.peers import PeerId

if TYPE_CHECKING:
    from colab_swarm.notebook.panel import Panel
    from colab_swarm.snapshot import SwarmSnapshot
    from colab_swarm.training.optimizer import SwarmOptimizer

_SAME_ORDER = (
    "all peers read this loader in one order: use DataLoader(…, shuffle=True), or other data at each peer"
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
        self, max_steps: int, *, panel: "Panel[SwarmSnapshot] | None", line_prefix: str
    ) -> Iterator[Any]:
        """Yield batches until the swarm's step ``max_steps``. Without a panel, print a line for each step."""
        optimizer = self._optimizer
        optimizer.raises_at_end = False
        if panel is not None:
            from IPython.display import display

            display(panel)  # type: ignore[no-untyped-call]
        passes = self._passes()
        printed_step = optimizer.global_step
        while not (optimizer.over or optimizer.global_step >= max_steps):
            yield next(passes)
            if panel is None and optimizer.global_step > printed_step:
                print(line_prefix + _step_line(optimizer, max_steps))
            printed_step = optimizer.global_step
        if panel is not None:
            panel.refresh()

    def _passes(self) -> Iterator[Any]:
        optimizer = self._optimizer
        while True:
            number, done = optimizer.position
            self._shuffle(number)
            for index, batch in enumerate(self._loader):
                # an earlier session of this peer has read the first ones
                if index < done:
                    continue
                optimizer.position = number, index + 1
                size = _size_of(batch)
                if size == 0:
                    continue
                optimizer.next_batch(samples=size)
                yield _moved(batch, self._device)
            require(
                optimizer.position != (number, 0),
                "the loader gave no batch: pass a DataLoader or a list, which can be read again and again",
            )
            optimizer.position = number + 1, 0

    def _shuffle(self, number: int) -> None:
        """Give the loader's pass of this ``number`` an order of this peer's own."""
        seed = random.Random(f"{self._peer.hex()} {number}").getrandbits(60)
        dataset = getattr(self._loader, "dataset", None)
        sampler = getattr(self._loader, "sampler", None)
        if isinstance(dataset, torch.utils.data.IterableDataset):
            # a shuffled one of the library datasets
            if hasattr(dataset, "set_epoch"):
                dataset.set_epoch(seed % (1 << 31))
        elif sampler is not None and hasattr(sampler, "generator"):
            sampler.generator = torch.Generator().manual_seed(seed)
        elif sampler is not None and number == 0:
            self._warn(_SAME_ORDER)


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


def _size_of(batch: Any) -> int | None:
    """Return the samples of a batch: the length of its first tensor; None without any."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.ndim else None
    parts: Iterable[Any] = ()
    if isinstance(batch, Mapping):
        parts = batch.values()
    elif isinstance(batch, list | tuple):
        parts = batch
    for part in parts:
        size = _size_of(part)
        if size is not None:
            return size
    return None


def _step_line(optimizer: "SwarmOptimizer", max_steps: int) -> str:
    metrics = optimizer.metrics()
    peers = count(int(metrics["swarm_peers"]), "peer")
    speed = f"{metrics['swarm_samples_per_s']:,.1f} samples/s from {peers}"
    loss = "" if optimizer.loss is None else f"loss {optimizer.loss:.4f}, "
    return f"step {optimizer.global_step} of {max_steps}: {loss}{speed}"
