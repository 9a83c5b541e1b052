"""Yield a peer's batches in a plain training loop: on the model's device, in the peer's order, until the last step."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch.utils.data import Dataset, IterableDataset

from colab_swarm.errors import require
from colab_swarm.net.peers import PeerId
from colab_swarm.swarm.order import give_order, seed_of
from colab_swarm.tensors.samples import SampleCounter

if TYPE_CHECKING:
    from colab_swarm.swarm.script import CellView, ScriptLines
    from colab_swarm.training.optimizer import SwarmOptimizer


KEEP_S = 60.0
"""How old the saved position of a loader may be. After a crash, the batches since that position are read again."""


class BatchReader:
    """Reads a loader again and again for one trainer, from a position that the optimizer saves.

    ``peer`` seeds the order of each pass. An endless iterator with ``state_dict`` and ``load_state_dict``, such as
    the batches of `recipes`, keeps its own order and position. ``warn`` takes a sentence for the user, ``time``
    returns seconds. Raises RuntimeError if the optimizer has left or was replaced.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        optimizer: "SwarmOptimizer",
        *,
        peer: PeerId,
        warn: Callable[[str], None],
        time: Callable[[], float],
    ) -> None:
        text = f"swarm.batches(…, {optimizer!r:.40}): pass the loader first, then what swarm.optimizer(…) returned"
        require(hasattr(optimizer, "hooks"), text, TypeError)
        text = "a data set gives single rows: pass torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)"
        is_table = isinstance(loader, Dataset) and not isinstance(loader, IterableDataset)
        require(not is_table, text, TypeError)
        optimizer.hooks.check_open()
        self._loader = loader
        self._optimizer = optimizer
        self._peer = peer
        self._warn = warn
        self._time = time
        self._kept_at = time()
        self._stream: Stateful | None = None
        if isinstance(loader, Iterator) and isinstance(loader, Stateful):
            self._stream = loader
        self._checkpoint = optimizer.hooks.checkpoint
        self._checkpoint.number_of(loader)
        self._device = optimizer.param_groups[0]["params"][0].device

    def read(self, max_steps: int, *, shows: "ScriptLines | CellView") -> Iterator[Any]:
        """Yield batches until the swarm's step ``max_steps``; ``shows`` shows the user the progress."""
        optimizer = self._optimizer
        optimizer.hooks.max_steps = max_steps
        shows.on_begin(max_steps)
        passes = self._passes() if self._stream is None else self._rest_of(self._stream)
        try:
            with optimizer.hooks.running():
                while not (optimizer.hooks.over or optimizer.global_step >= max_steps):
                    yield next(passes)
                    shows.on_batch(max_steps)
        finally:
            self._keep()
            shows.on_end(max_steps)

    def _rest_of(self, stream: "Stateful") -> Iterator[Any]:
        """Yield the batches that follow the batches of an earlier session of this peer."""
        if self._number in self._checkpoint.states:
            try:
                stream.load_state_dict(self._checkpoint.states[self._number])
            except ValueError as error:
                self._warn(f"the data are read from their beginning: {error}")
        counter = SampleCounter(self._loader, self._optimizer.settings.batch_size)
        for index, batch in enumerate(self._loader):
            self._optimizer.hooks.begin_batch(counter.count(batch, index), loader=self._number)
            yield _moved(batch, self._device)
            if self._time() - self._kept_at > KEEP_S:
                self._keep()
        raise ValueError("the stream of batches has ended: pass one without an end, or a DataLoader")

    def _keep(self) -> None:
        """Save the stream's position for the next checkpoint. Runs on the user's thread, which reads the stream."""
        if self._stream is not None:
            self._checkpoint.states[self._number] = self._stream.state_dict()
            self._kept_at = self._time()

    def _passes(self) -> Iterator[Any]:
        counter = SampleCounter(self._loader, self._optimizer.settings.batch_size)
        while True:
            number, done = self._position
            self._shuffle(number)
            for index, batch in enumerate(self._loader):
                # an earlier session of this peer has read the first ones
                if index < done:
                    continue
                self._position = number, index + 1
                size = counter.count(batch, index)
                if size == 0:
                    continue
                # If the size is unknown, step() without samples= raises an error.
                self._optimizer.hooks.begin_batch(size, loader=self._number)
                yield _moved(batch, self._device)
            require(
                self._position != (number, 0),
                "the loader gave no batch: pass a DataLoader or a list, which can be read again and again",
            )
            self._position = number + 1, 0

    @property
    def _number(self) -> int:
        """The number of this loader in the checkpoint; it may change when a checkpoint is loaded."""
        return self._checkpoint.number_of(self._loader)

    @property
    def _position(self) -> tuple[int, int]:
        """The number of finished passes over this loader, and of batches in the present pass."""
        return self._checkpoint.positions[self._number]

    @_position.setter
    def _position(self, position: tuple[int, int]) -> None:
        self._checkpoint.positions[self._number] = position

    def _shuffle(self, number: int) -> None:
        """Give pass ``number`` over the loader this peer's order; at the first pass, warn if it cannot have one."""
        purpose: list[object] = [number]
        # Several loaders that are read side by side have different orders.
        if self._number:
            purpose.append(self._number)
        warning = give_order(self._loader, seed_of(self._peer, *purpose), number)
        if warning and number == 0:
            self._warn(warning)


@runtime_checkable
class Stateful(Protocol):
    """Saves its position and continues from it (the protocol of torch.distributed.checkpoint and torchdata)."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


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
