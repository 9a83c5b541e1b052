"""`LoopHooks`: the calls between a framework's training loop and a `SwarmOptimizer`."""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from colab_swarm.errors import require
from colab_swarm.net.peers import PeerId
from colab_swarm.training.drawn import NextStep
from colab_swarm.training.saving import TrainerCheckpoint

LEFT = "this optimizer has left its swarm: make a new one with swarm.optimizer(…)"


class LoopHooks:
    """``optimizer.hooks``, for a framework's loop or a generator like `Swarm.batches`; your own loop needs no hooks.

    Attributes:
        peer: the id of the peer that trains with this optimizer.
        checkpoint: the content of a checkpoint, in which a loop keeps its positions in the data.
        warn: shows the user a sentence about the training, and records it as an event.
        print_news: prints a line for each event since the last call, such as a peer that joined. A framework's loop
            calls this after each batch. In a simulation it does nothing.
        max_steps: global step at which the loop ends; infinite by default. Views show it.
        closed: set once the optimizer takes no more steps.
    """

    def __init__(
        self,
        peer: PeerId,
        checkpoint: TrainerCheckpoint,
        next_step: NextStep,
        warn: Callable[[str], None],
    ) -> None:
        self.peer = peer
        self.checkpoint = checkpoint
        self.warn = warn
        self.print_news: Callable[[], None] = lambda: None
        self.max_steps = math.inf
        self.closed = threading.Event()
        self.why = LEFT  # why it takes no more steps
        self.hand_over_s: float | None = None  # if set: finish the present call, hand over, close
        self.is_replaced = False  # by a later optimizer of the same name
        self._next = next_step
        self._running = 0  # number of loops that end by themselves with the session

    def begin_batch(self, samples: float | None, *, loader: int = 0) -> None:
        """Count a batch that is about to be computed, for a loop that accumulates several batches in a step.

        The next ``step()`` without arguments counts all batches since the last step. A batch that gave no gradient does
        not count.

        Args:
            samples: size of the batch; None if it is not known: then ``step()`` needs ``samples=``.
            loader: number of the loader that gave the batch.
        """
        self._next.draw(samples, loader)

    def next_step(
        self,
        *,
        samples: float | None = None,
        weight: float | None = None,
        loss: float | torch.Tensor | None = None,
    ) -> None:
        """Set the values that the next ``step()`` without arguments counts, in place of the begun batches."""
        self._next.say(samples, weight, loss)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run a loop in a ``with`` block in which ``step()`` does nothing after the session's end.

        The loop itself checks `over`, and ends. Raises RuntimeError if this peer has left already, or if a later
        optimizer has replaced this optimizer.
        """
        self.check_open()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    @property
    def over(self) -> bool:
        """True if this peer has left, or leaves at the next step because its session ends."""
        return self.closed.is_set() or self.hand_over_s is not None

    def check_open(self) -> None:
        """Raise RuntimeError, with the next step for the user, if this optimizer is closed or about to close."""
        require(not self.over, self.why, RuntimeError)

    @property
    def ends_quietly(self) -> bool:
        """True inside a loop that checks `over`, where a step after the end raises no error."""
        return self._running > 0 and not self.is_replaced

    def end(self, why: str, *, hand_over_s: float) -> None:
        """Let the optimizer's next call hand the accumulated samples over and close the optimizer, with ``why``.

        That call raises RuntimeError with the text ``why``, except in a loop as in `running`.
        """
        self.why = why
        self.hand_over_s = hand_over_s
