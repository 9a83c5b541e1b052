"""Steps of one group member: buckets of its own gradient, and the wait for those of the others.

`ElasticSteps` is driven from two sides. On the runtime's loop, the exchange reports received buckets and lost members.
On the user's thread, the optimizer hands over its own buckets during backward and then waits with `finish`.

`Buckets` cuts a model's gradients, as one flat vector, into buckets that fill up during backward. The vector starts
with the last parameters, whose gradients come first. Buckets have equal size, whatever the sizes of the layers. One is
full when all parameters that overlap it have their gradients.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from colab_swarm.elastic.ledger import Closed, GradientLedger
from colab_swarm.elastic.meter import Meter
from colab_swarm.elastic.schedulers import AdaptiveBeta
from colab_swarm.elastic.settings import ElasticSettings, ElasticStep, Piece
from colab_swarm.net.peers import Buffer
from colab_swarm.tensors.codecs import BLOCK_VALUES, Floats, all_finite, codec_of

logger = logging.getLogger(__name__)

FEWEST = 4
"""Fewest buckets of a model that is not tiny, so that most are sent before backward ends."""


class Buckets:
    """The buckets of one model.

    Args:
        parameters: in the order of the model's layers.
        most: values of a bucket, at most; a multiple of `BLOCK_VALUES`.
        on_full: ``on_full(bucket, values)``, called on the thread that runs backward when a bucket is full. The values
            are a view of `vector` and do not change any more.

    Attributes:
        sizes: values of each bucket.
        vector: the gradient of this step, as far as it is complete.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], *, most: int, on_full: Callable[[int, Floats], None]
    ) -> None:
        self._on_full = on_full
        self._lock = threading.Lock()  # a model on several devices gets gradients on several threads
        self._starts: dict[torch.Tensor, int] = {}
        numel = 0
        for parameter in reversed(parameters):
            self._starts[parameter] = numel
            numel += parameter.numel()
        self._size = min(most, max(1, numel // (FEWEST * BLOCK_VALUES)) * BLOCK_VALUES)
        self.sizes = [min(self._size, numel - at) for at in range(0, numel, self._size)]
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            for parameter in parameters
        ]
        self.begin()

    def begin(self) -> None:
        """Start a step without gradients."""
        self.vector: Floats = np.empty(sum(self.sizes), np.float32)
        self._tensor = torch.from_numpy(self.vector)
        self._absent = dict.fromkeys(self._starts)  # in order
        self._open_parts = [0] * len(self.sizes)
        for parameter in self._starts:
            for bucket in self._overlapping(parameter):
                self._open_parts[bucket] += 1

    @property
    def lacking(self) -> bool:
        """Whether a parameter has no gradient yet."""
        return bool(self._absent)

    def flush(self) -> None:
        """End backward: parameters without a gradient get a zero one."""
        for parameter in list(self._absent):
            self._take(parameter, None)

    def span(self, bucket: int) -> slice:
        """Return the slice of a bucket in the vector."""
        return slice(bucket * self._size, bucket * self._size + self.sizes[bucket])

    @torch.no_grad()
    def to_gradients(self, gradients: Sequence[Floats]) -> None:
        """Set the parameters' gradients from the values of all buckets."""
        flat = torch.from_numpy(gradients[0] if len(gradients) == 1 else np.concatenate(gradients))
        for parameter, start in self._starts.items():
            part = flat[start : start + parameter.numel()].view(parameter.shape)
            if parameter.device.type == "cpu" and parameter.dtype == torch.float32:
                parameter.grad = part
            else:
                parameter.grad = part.to(parameter)

    def close(self) -> None:
        """Stop collecting gradients."""
        for hook in self._hooks:
            hook.remove()

    def _overlapping(self, parameter: torch.Tensor) -> range:
        start = self._starts[parameter]
        return range(start // self._size, -(-(start + parameter.numel()) // self._size))

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        with self._lock:
            if parameter not in self._absent:
                raise RuntimeError(
                    "the gradients of this step are already being sent: call optimizer.step() after each backward()"
                )
            self._take(parameter, parameter.grad)

    def _take(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        del self._absent[parameter]
        start = self._starts[parameter]
        part = self._tensor[start : start + parameter.numel()].view(parameter.shape)
        if gradient is None:
            part.zero_()
        else:
            part.copy_(gradient.detach())
        for bucket in self._overlapping(parameter):
            self._open_parts[bucket] -= 1
            if not self._open_parts[bucket]:
                self._on_full(bucket, self.vector[self.span(bucket)])


class PieceExchange(Protocol):
    """One member's connections to all others of its group. Used on the runtime's loop.

    Attributes:
        me: this member's number.
        members: size of the group.
    """

    me: int
    members: int

    async def begin(self, steps: ElasticSteps) -> None:
        """Report buckets and losses to ``steps`` from now on; return when all members are ready to receive.

        Raises:
            StateError: a member was lost meanwhile.
        """

    def send(self, piece: Piece, payload: Buffer) -> None:
        """Queue a bucket for all other members. The payload must not change any more."""

    def drop(self, peer: int, reason: str) -> None:
        """Disconnect from a member; it is reported as lost."""

    async def close(self) -> None:
        """Send what is queued, and leave. Idempotent."""

    def kill(self) -> None:
        """End without a goodbye, as a crash would."""


class ElasticSteps:
    """The steps of one member of a group.

    Attributes:
        ledger: what arrived, and what is owed.
        meter: estimate of this member's inconsistency.
        finished: a closed step that is not applied yet.
    """

    def __init__(self, exchange: PieceExchange, settings: ElasticSettings, sizes: list[int]) -> None:
        self.ledger = GradientLedger(sizes, exchange.members, exchange.me, settings.scheduler)
        self.meter = Meter(len(sizes), exchange.members)
        self.finished: tuple[Closed, ElasticStep] | None = None
        self._exchange, self._scheduler, self._sizes = exchange, settings.scheduler, sizes
        self._codec = codec_of(settings.compression)
        gamma = max(self._codec.gamma(numel) for numel in sizes)
        self._gamma = gamma if settings.error_feedback or not gamma else None
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._warned = self._woken = self._left = False
        self._own: deque[tuple[Piece, Floats, Buffer]] = deque()

    def hand_over(self, piece: Piece, arrived: Floats, payload: Buffer) -> None:
        """Send a full bucket of this member's gradient. Thread-safe.

        Args:
            arrived: the values as the others decode them.
            payload: the encoded values.
        """
        self._own.append((piece, arrived, payload))
        if not self._woken:  # waking the loop costs more than the rest
            self._woken = True
            self._loop.call_soon_threadsafe(self._take_own)

    def _take_own(self) -> None:
        self._woken = False  # first: what is appended from now on wakes the loop again
        while self._own:
            piece, arrived, payload = self._own.popleft()
            self._exchange.send(piece, payload)
            self.ledger.on_own(piece.step, piece.bucket, arrived, now=self._loop.time())
            self.meter.on_norms(self._exchange.me, piece.step, piece.squares, piece.residual_squares)

    def on_piece(self, peer: int, piece: Piece, payload: Buffer) -> None:
        """Add a received bucket; a member that sends what no honest peer would is dropped."""
        try:
            if not 0 <= piece.bucket < len(self._sizes):
                raise ValueError(f"there is no bucket {piece.bucket}")
            values = self._codec.decode(payload, self._sizes[piece.bucket])
            if not all_finite(values):
                raise ValueError(f"bucket {piece.bucket} of step {piece.step} is not finite")
            if not self.ledger.on_received(peer, piece.step, piece.bucket, values):
                raise ValueError(
                    f"bucket {piece.bucket} of step {piece.step} is not due in step {self.ledger.step}"
                )
        except ValueError as error:
            self._exchange.drop(peer, str(error))
            return
        self.meter.on_norms(peer, piece.step, piece.squares, piece.residual_squares)
        self._changed.set()

    def on_lost(self, peer: int, reason: str) -> None:
        """Stop waiting for a lost member."""
        logger.info("member %d of the elastic group is lost: %s", peer, reason)
        self.ledger.on_lost(peer)
        self._changed.set()

    def leave(self) -> None:
        """Wake a step that still waits; it raises."""
        self._left = True
        self._changed.set()

    async def finish(self, compute_s: float = 0.0) -> None:
        """Wait until the open step may end, and close it; the result is in `finished`.

        Args:
            compute_s: in a simulation, the duration of the next forward and backward pass.

        Raises:
            RuntimeError: this member leaves.
        """
        self._take_own()
        while not self._scheduler.may_go_on(status := self.ledger.standing(self._loop.time())):
            if self._left:
                raise RuntimeError("this member has left its group while its step was waiting for the others")
            self._changed.clear()
            try:
                async with asyncio.timeout(self._scheduler.ask_again_s(status)):
                    await self._changed.wait()
            except TimeoutError:
                pass
        measured, lost = self.meter.measured, tuple(sorted(self.ledger.lost))
        bound = self._scheduler.bound(self.meter.facts(gamma=self._gamma, crashed=len(lost)))
        closed = self.ledger.close_step()
        step = ElasticStep(closed.step, status.waited_s, status.missing, measured, bound, lost)
        if step.passed and not self._warned:
            logger.warning(
                "step %d: inconsistency %.3g (divided by the learning rate) is above the bound of %.3g: "
                "use a larger beta, less compression or a shorter timeout",
                step.step,
                measured,
                bound,
            )
        self._warned = step.passed
        self.finished = closed, step
        self._loop.call_soon(self._measure, closed)  # while the user's thread applies it
        if compute_s:
            await asyncio.sleep(compute_s)

    def _measure(self, closed: Closed) -> None:
        for distance in self.meter.on_closed(closed):
            if isinstance(self._scheduler, AdaptiveBeta):
                self._scheduler.on_measured(distance)
