"""A peer's data in a plain training loop: on its device, in its own order, until the swarm's last step."""

import contextlib
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from colab_swarm.errors import require
from colab_swarm.events import Notice
from colab_swarm.markup import count
from colab_swarm.notebook.platforms import has_frontend

if TYPE_CHECKING:
    from colab_swarm.swarm.swarm import Swarm
    from colab_swarm.training.optimizer import SwarmOptimizer


def read(
    swarm: "Swarm", loader: Iterable[Any], optimizer: "SwarmOptimizer", *, max_steps: int
) -> Iterator[Any]:
    """See `Swarm.batches`."""
    optimizer.raises_at_end = False
    simulated, step = swarm.network is None, optimizer.global_step
    panel = swarm.panel() if has_frontend() and not simulated else None
    if panel is not None:
        from IPython.display import display

        display(panel)  # type: ignore[no-untyped-call]
    passes = _endless(swarm, loader, optimizer)
    while not (optimizer.over or optimizer.global_step >= max_steps):
        yield next(passes)
        before, step = step, optimizer.global_step
        if step > before and panel is None:
            print(f"{swarm.name}: " * simulated + _line(optimizer, max_steps))
    if panel is not None:
        panel.refresh()


def _endless(swarm: "Swarm", loader: Iterable[Any], optimizer: "SwarmOptimizer") -> Iterator[Any]:
    """Read the loader again and again from this peer's position, which is kept."""
    device = optimizer.param_groups[0]["params"][0].device
    while True:
        number, done = optimizer.position
        _shuffle(swarm, loader, number)
        for index, batch in enumerate(loader):
            if index < done:  # read before
                continue
            optimizer.position = number, index + 1
            if (size := _size_of(batch)) != 0:
                optimizer.next_batch(samples=size)
                yield _moved(batch, device)
        require(
            optimizer.position != (number, 0),
            "the loader gave no batch: pass a DataLoader or a list, which can be read again and again",
        )
        optimizer.position = number + 1, 0


def _shuffle(swarm: "Swarm", loader: Iterable[Any], number: int) -> None:
    """Give the loader's pass of this ``number`` an order of this peer's own."""
    seed = random.Random(f"{swarm.id.hex()} {number}").getrandbits(60)
    data, sampler = getattr(loader, "dataset", None), getattr(loader, "sampler", None)
    if isinstance(data, torch.utils.data.IterableDataset):
        if hasattr(data, "set_epoch"):  # a shuffled one of the library datasets
            data.set_epoch(seed % (1 << 31))
    elif sampler is not None and hasattr(sampler, "generator"):
        sampler.generator = torch.Generator().manual_seed(seed)
    elif sampler is not None and not number:
        text = "all peers read this loader in one order: use DataLoader(…, shuffle=True), or other data at each peer"
        swarm.events.emit(Notice(swarm.runtime.time(), text))
        print(text)


def _moved(batch: Any, device: torch.device) -> Any:
    if hasattr(batch, "to"):  # tensors, and the batches of transformers
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: _moved(one, device) for name, one in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_moved(one, device) for one in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_moved(one, device) for one in batch)
    return batch


def _size_of(batch: Any) -> int | None:
    """Return the samples of a batch: the length of its first tensor; None without any."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.ndim else None
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    with contextlib.suppress(StopIteration):
        return next(size for size in map(_size_of, parts) if size is not None)
    return None


def _line(optimizer: "SwarmOptimizer", max_steps: int) -> str:
    metrics, loss = optimizer.metrics(), optimizer.loss
    told = "" if loss is None else f"loss {loss:.4f}, "
    pace = (
        f"{metrics['swarm_samples_per_s']:,.1f} samples/s from {count(int(metrics['swarm_peers']), 'peer')}"
    )
    return f"step {optimizer.global_step} of {max_steps}: {told}{pace}"
