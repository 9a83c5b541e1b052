"""`LoopHooks`: what a loop that calls ``step()`` itself tells a `SwarmOptimizer`, and asks it."""

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
    """``optimizer.hooks``: for the loop of a framework, or one like `Swarm.batches`; your own loop needs none of it.

    Attributes:
        peer: the id of the peer that trains with this optimizer.
        checkpoint: what a checkpoint holds; a loop keeps its positions in the data there.
        warn: tells the user a sentence about the training, and records it.
        max_steps: global step at which the loop ends; infinite by default. Views show it.
        closed: set once the optimizer steps no more.
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
        self.max_steps = math.inf
        self.closed = threading.Event()
        self.why = LEFT  # it steps no more
        self.hand_over_s: float | None = None  # set: finish the call, hand over, close
        self.is_replaced = False  # by a later optimizer of the same name
        self._next = next_step
        self._running = 0  # loops that end by themselves with the session

    def begin_batch(self, samples: float | None, *, loader: int = 0) -> None:
        """Count a batch that is about to be computed, for a loop whose steps accumulate several.

        The next bare ``step()`` counts the batches since the last one. One of which no gradient came does not count.

        Args:
            samples: of the batch; None if nothing says how many, so the step asks for ``samples=``.
            loader: number of the loader that gave it.
        """
        self._next.draw(samples, loader)

    def next_step(
        self,
        *,
        samples: float | None = None,
        weight: float | None = None,
        loss: float | torch.Tensor | None = None,
    ) -> None:
        """Say what the next bare ``step()`` counts, whatever batches were begun; as the arguments of ``step()``."""
        self._next.say(samples, weight, loss)

    @contextmanager
    def running(self) -> Iterator[None]:
        """While this lasts, ``step()`` does nothing after the session's end: the loop looks at `over`, and ends.

        Raises RuntimeError if this peer has left already, or a later optimizer has replaced this one.
        """
        self.check_open()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    @property
    def over(self) -> bool:
        """True if this peer has left, or leaves at the next step, as its session ends."""
        return self.closed.is_set() or self.hand_over_s is not None

    def check_open(self) -> None:
        """Raise RuntimeError, with what to do, if this optimizer steps no more, or is about to leave."""
        require(not self.over, self.why, RuntimeError)

    @property
    def ends_quietly(self) -> bool:
        """True in a loop that looks at `over`: a step after the end raises nothing there."""
        return self._running > 0 and not self.is_replaced

    def end(self, why: str, *, hand_over_s: float) -> None:
        """Let the next call of the optimizer hand over, close and raise ``why``."""
        self.why = why
        self.hand_over_s = hand_over_s
