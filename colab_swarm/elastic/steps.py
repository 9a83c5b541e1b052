"""One member's steps, on the runtime's loop: what came is noted, and the scheduler asked whenever that changes.

`ElasticSteps` is driven from two sides: the exchange tells what arrived and who is lost; the optimizer, on the user's
thread, hands over its own buckets while backward goes on and then waits with `finish`.

A model's gradients as one flat vector, cut into buckets that are full one by one while backward goes on.

The vector begins with the last parameters, which have their gradients first. Buckets are of equal size, whatever the
sizes of the layers: a bucket is full when all parameters that reach into it have their gradients.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from colab_swarm.elastic.ledger import Closed, GradientLedger
from colab_swarm.elastic.meter import Meter
from colab_swarm.elastic.schedulers import AdaptiveBeta
from colab_swarm.elastic.settings import ElasticSettings, ElasticStep, Piece, PieceExchange
from colab_swarm.net.peers import Buffer
from colab_swarm.tensors.codecs import BLOCK_VALUES, Floats, all_finite

FEWEST = 4

"""Buckets of a model, if it is not tiny: so that most are on their way before backward ends."""


class Buckets:
    """The buckets of one model.

    Args:
        parameters: in the order of the model's layers.
        most: values of a bucket, at most; a multiple of `BLOCK_VALUES`.
        on_full: ``on_full(bucket, values)``: a bucket of this step is full; on the thread that runs backward. The
            values are a view of `vector` and do not change any more.

    Attributes:
        sizes: values of each bucket.
        vector: the gradient of this step, as far as it is there.
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
        """A new step: no gradient is there."""
        self.vector: Floats = np.empty(sum(self.sizes), np.float32)
        self._tensor = torch.from_numpy(self.vector)
        self._absent = dict.fromkeys(self._starts)  # in order
        self._open_parts = [0] * len(self.sizes)
        for parameter in self._starts:
            for bucket in self._reached_by(parameter):
                self._open_parts[bucket] += 1

    @property
    def lacking(self) -> bool:
        """Whether a parameter has no gradient yet."""
        return bool(self._absent)

    def flush(self) -> None:
        """Backward is over: parameters that got no gradient have a zero one."""
        for parameter in list(self._absent):
            self._take(parameter, None)

    def span(self, bucket: int) -> slice:
        """Where a bucket lies in the vector."""
        return slice(bucket * self._size, bucket * self._size + self.sizes[bucket])

    @torch.no_grad()
    def to_gradients(self, gradients: Sequence[Floats]) -> None:
        """Set the parameters' gradients."""
        flat = torch.from_numpy(gradients[0] if len(gradients) == 1 else np.concatenate(gradients))
        for parameter, start in self._starts.items():
            part = flat[start : start + parameter.numel()].view(parameter.shape)
            if parameter.device.type == "cpu" and parameter.dtype == torch.float32:
                parameter.grad = part
            else:
                parameter.grad = part.to(parameter)

    def close(self) -> None:
        """Take no more gradients."""
        for hook in self._hooks:
            hook.remove()

    def _reached_by(self, parameter: torch.Tensor) -> range:
        start = self._starts[parameter]
        return range(start // self._size, -(-(start + parameter.numel()) // self._size))

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        with self._lock:
            if parameter not in self._absent:
                raise RuntimeError(
                    "the gradients of this step are on their way already: call optimizer.step() after each backward()"
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
        for bucket in self._reached_by(parameter):
            self._open_parts[bucket] -= 1
            if not self._open_parts[bucket]:
                self._on_full(bucket, self.vector[self.span(bucket)])


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OwnBucket:
    """A bucket of this member's gradient.

    Attributes:
        arrived: the values as the others decode them.
        payload: what goes over the wire.
    """

    piece: Piece
    arrived: Floats
    payload: Buffer


class ElasticSteps:
    """The steps of one member of a group.

    Attributes:
        ledger: what arrived, and what is owed.
        meter: how far this member is off.
        finished: a step that has ended and waits to be applied.
    """

    def __init__(self, exchange: PieceExchange, settings: ElasticSettings, sizes: list[int]) -> None:
        self.ledger = GradientLedger(sizes, exchange.members, exchange.me, settings.scheduler)
        self.meter = Meter(len(sizes), exchange.members)
        self.finished: tuple[Closed, ElasticStep] | None = None
        self._exchange, self._scheduler, self._sizes = exchange, settings.scheduler, sizes
        self._codec = settings.wire
        gamma = max(self._codec.gamma(numel) for numel in sizes)
        self._gamma = gamma if settings.error_feedback or not gamma else None
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._warned = self._woken = self._left = False
        self._own: deque[OwnBucket] = deque()

    def hand_over(self, own: OwnBucket) -> None:
        """A bucket of this member's gradient is full; from any thread. To wake the loop costs more than the rest."""
        self._own.append(own)
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._take_own)

    def _take_own(self) -> None:
        self._woken = False  # first: what is appended from now on wakes the loop again
        while self._own:
            self._on_own(self._own.popleft())

    def _on_own(self, own: OwnBucket) -> None:
        piece = own.piece
        self._exchange.send(piece, own.payload)
        self.ledger.on_own(piece.step, piece.bucket, own.arrived, now=self._loop.time())
        self.meter.on_norms(self._exchange.me, piece.step, piece.squares, piece.residual_squares)

    def on_piece(self, peer: int, piece: Piece, payload: Buffer) -> None:
        """See `Receiver`. Who sends what no honest peer would is dropped."""
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
        """See `Receiver`."""
        logger.info("member %d of the elastic group is lost: %s", peer, reason)
        self.ledger.on_lost(peer)
        self._changed.set()

    def leave(self) -> None:
        """This member leaves: what a step still waits for will not come."""
        self._left = True
        self._changed.set()

    async def finish(self, compute_s: float = 0.0) -> None:
        """Return when the open step may end, and has; the result is in `finished`.

        Args:
            compute_s: in a simulation, what the next forward and backward pass take.

        Raises:
            RuntimeError: this member leaves.
        """
        self._take_own()
        while not self._scheduler.may_go_on(standing := self.ledger.standing(self._loop.time())):
            if self._left:
                raise RuntimeError("this member has left its group while its step was waiting for the others")
            self._changed.clear()
            try:
                async with asyncio.timeout(self._scheduler.ask_again_s(standing)):
                    await self._changed.wait()
            except TimeoutError:
                pass
        measured, lost = self.meter.measured, tuple(sorted(self.ledger.lost))
        bound = self._scheduler.bound(self.meter.facts(gamma=self._gamma, crashed=len(lost)))
        closed = self.ledger.close_step()
        result = ElasticStep(closed.step, standing.waited_s, standing.missing, measured, bound, lost)
        self._warn(result)
        self.finished = closed, result
        self._loop.call_soon(self._measure, closed)  # while the user's thread applies it
        if compute_s:
            await asyncio.sleep(compute_s)

    def _measure(self, closed: Closed) -> None:
        for distance in self.meter.on_closed(closed):
            if isinstance(self._scheduler, AdaptiveBeta):
                self._scheduler.on_measured(distance)

    def _warn(self, step: ElasticStep) -> None:
        if step.passed and not self._warned:
            logger.warning(
                "step %d: peers are %.3g apart (by learning rate), the bound is %.3g: a larger beta, less compression "
                "or a shorter timeout brings them together",
                step.step,
                step.inconsistency,
                step.bound,
            )
        self._warned = step.passed
