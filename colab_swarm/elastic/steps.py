"""One member's steps, on the runtime's loop: what came is noted, and the scheduler asked whenever that changes.

`Steps` is driven from two sides: the exchange tells what arrived and who is lost; the optimizer, on the user's thread,
hands over its own buckets while backward goes on and then waits with `finish`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass

from colab_swarm.elastic.adaptive import AdaptiveBeta
from colab_swarm.elastic.exchange import Exchange, Piece
from colab_swarm.elastic.ledger import Closed, Ledger
from colab_swarm.elastic.meter import Meter
from colab_swarm.elastic.settings import ElasticSettings, ElasticStep
from colab_swarm.net.peers import Buffer
from colab_swarm.tensors.codecs import Floats, all_finite

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


class Steps:
    """The steps of one member of a group.

    Attributes:
        ledger: what arrived, and what is owed.
        meter: how far this member is off.
        finished: a step that has ended and waits to be applied.
    """

    def __init__(self, exchange: Exchange, settings: ElasticSettings, sizes: list[int]) -> None:
        self.ledger = Ledger(sizes, exchange.members, exchange.me, settings.scheduler)
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
        self.meter.on_told(self._exchange.me, piece.step, piece.squares, piece.residual_squares)

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
        self.meter.on_told(peer, piece.step, piece.squares, piece.residual_squares)
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
