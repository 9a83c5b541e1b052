"""Steps of one group member: its settings, the wait for the other members' buckets, the result of each step.

On the runtime's loop, the exchange reports received buckets. On the user's thread, the optimizer hands over its buckets
and waits.
"""

import asyncio
import logging
import sys
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import msgspec

from colab_swarm.elastic.ledger import Closed, GradientLedger, Meter
from colab_swarm.elastic.schedulers import AdaptiveBeta, Scheduler, Synchronous
from colab_swarm.errors import MismatchError, require
from colab_swarm.net.peers import Buffer, Message
from colab_swarm.runtime import wait_until
from colab_swarm.tensors.codecs import Floats, all_finite, codec_of
from colab_swarm.training.comparison import equal_rates
from colab_swarm.training.records import Rates

if TYPE_CHECKING:
    from colab_swarm.elastic.group import PeerExchange

logger = logging.getLogger(__name__)
MAX_PEERS = 16


@dataclass(frozen=True)
class ElasticSettings:
    """Settings of a group. All members need equal settings, except ``wait_s``.

    Attributes:
        prefix: name of the group. Peers with the same prefix train one model.
        peers: number of members, 2 to 16.
        scheduler: decides when a peer continues with its next step.
        compression: codec of the gradients: float32, float16, bfloat16, int8, onebit, sparseloco, topk:0.01.
        error_feedback: add the part that compression removed to the next gradient. Without it, a lossy codec has no
            bound.
        wait_s: seconds to wait for the other peers when the group is formed.
    """

    prefix: str
    peers: int
    scheduler: Scheduler = field(default_factory=Synchronous)
    compression: str = "float32"
    error_feedback: bool = True
    wait_s: float = 300.0

    def __post_init__(self) -> None:
        require(2 <= self.peers <= MAX_PEERS, f"peers={self.peers}: an elastic group has 2 to {MAX_PEERS}")
        require(self.wait_s > 0, f"wait_s={self.wait_s}: pass seconds, such as 300")
        text = (
            f"scheduler={type(self.scheduler).__name__}: here it says when a member goes on, such as "
            "colab_swarm.elastic.NormBounded(0.8). Step a scheduler of learning rates yourself, after each step()"
        )
        require(isinstance(self.scheduler, Scheduler), text)
        codec_of(self.compression)


@dataclass(frozen=True)
class ElasticStep:
    """Result of one step at this peer.

    ``inconsistency`` is the distance of this peer's parameters from the group's parameters, divided by the learning
    rate. It is the root mean square over recent steps whose gradients have all arrived. ``bound`` is the theory's limit
    of the inconsistency, from the gradients of the same steps. It is None if it is unknown for this codec.
    """

    step: int  # counts from 0 since the group was formed
    waited_s: float  # from the end of this peer's backward pass until the scheduler let it continue
    missing: float  # fraction of the other members' values of this step that had not arrived
    inconsistency: float
    bound: float | None
    lost: tuple[int, ...]  # numbers of the lost members

    @property
    def passed(self) -> bool:
        """True if the inconsistency is over 1.1 times its bound. After few steps, a smaller excess is uncertain."""
        return self.bound is not None and self.inconsistency > 1.1 * self.bound > 0


@dataclass(frozen=True)
class ElasticSnapshot:
    scheduler: str  # with its settings
    member: int  # this member's number
    members: int  # size of the group at its start
    steps: tuple[ElasticStep, ...]  # the latest steps, oldest first
    over: bool  # whether this member has left the group


Squares = Annotated[float, msgspec.Meta(ge=0, lt=sys.float_info.max)]  # a finite squared norm


class Piece(Message, frozen=True):
    """One bucket of a gradient. The payload has the bucket's encoded values."""

    step: int
    bucket: int
    squares: Squares = 0.0  # of the values before compression
    residual_squares: Squares = 0.0  # of the residual that compression keeps for the next step
    rates: Rates = ()  # with the first bucket: the sender's learning rates, highest first


class ElasticSteps:
    def __init__(self, exchange: "PeerExchange", settings: ElasticSettings, sizes: list[int]) -> None:
        self.ledger = GradientLedger(sizes, exchange.members, exchange.me, settings.scheduler)
        single = exchange.me if settings.scheduler.single_steps else None
        self.meter = Meter(len(sizes), exchange.members, single)
        self.finished: tuple[Closed, ElasticStep] | None = None  # not applied yet
        self._exchange = exchange
        self._scheduler = settings.scheduler
        self._sizes = sizes
        exchange.steps = self
        self._codec = codec_of(settings.compression)
        gamma = max(self._codec.gamma(numel) for numel in sizes)
        # without error feedback, a lossy codec has no bound
        self._gamma = gamma if settings.error_feedback or not gamma else None
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._woken = self._left = False
        self._own: deque[tuple[Piece, Floats, Buffer]] = deque()
        self._rates: dict[int, dict[int, Rates]] = {}  # by step and member, until they are compared
        self._other_rates = ""  # how this member's learning rates differ from those of the first member

    def hand_over(self, piece: Piece, arrived: Floats, payload: Buffer) -> None:
        """Send a full bucket. ``arrived`` has the bucket's values as other peers decode them. Thread-safe."""
        self._own.append((piece, arrived, payload))
        if not self._woken:  # waking the loop takes more time than the rest, so do it once
            self._woken = True
            self._loop.call_soon_threadsafe(self._take_own)

    def _take_own(self) -> None:
        self._woken = (
            False  # do this first, so that a bucket that is appended from now on wakes the loop again
        )
        while self._own:
            piece, arrived, payload = self._own.popleft()
            self._exchange.send(piece, payload)
            self.ledger.on_own(piece.step, piece.bucket, arrived, now=self._loop.time())
            self.meter.on_norms(self._exchange.me, piece.step, piece.squares, piece.residual_squares)
            self._compare_rates(self._exchange.me, piece)

    def on_piece(self, peer: int, piece: Piece, payload: Buffer) -> None:
        """Add a received bucket. If no honest peer would send this bucket, drop the member."""
        try:
            require(0 <= piece.bucket < len(self._sizes), f"there is no bucket {piece.bucket}")
            values = self._codec.decode(payload, self._sizes[piece.bucket])
            require(all_finite(values), f"bucket {piece.bucket} of step {piece.step} is not finite")
            require(
                self.ledger.on_received(peer, piece.step, piece.bucket, values),
                f"bucket {piece.bucket} of step {piece.step} is not due in step {self.ledger.step}",
            )
        except ValueError as error:
            self._exchange.lose(peer, str(error))
            return
        self.meter.on_norms(peer, piece.step, piece.squares, piece.residual_squares)
        self._compare_rates(peer, piece)
        self._changed.set()

    def _compare_rates(self, member: int, piece: Piece) -> None:
        """Compare this member's learning rates of a step with the first member's, from whose state all began."""
        me = self._exchange.me
        first = min(set(range(self._exchange.members)) - self._exchange.lost.keys())
        if not piece.rates or me == first or member not in (me, first):
            return
        rates = self._rates.setdefault(piece.step, {})
        rates[member] = piece.rates
        if rates.keys() >= {me, first}:
            if not equal_rates(rates[me], rates[first]) and not self._other_rates:
                mine = ", ".join(f"{rate:g}" for rate in rates[me])
                theirs = ", ".join(f"{rate:g}" for rate in rates[first])
                self._other_rates = (
                    f"at step {piece.step} the group's first member has the learning rate {theirs}, this one {mine}: "
                    "change rates at all members alike, by the same scheduler after each step(), and make the "
                    "optimizer again at all peers"
                )
            self._rates = {step: found for step, found in self._rates.items() if step > piece.step}

    def on_lost(self, peer: int, reason: str) -> None:
        logger.info("member %d of the elastic group is lost: %s", peer, reason)
        self.ledger.on_lost(peer)
        self._changed.set()

    async def leave(self) -> None:
        """Leave the group. A step that still waits raises an error."""
        self._left = True
        self._changed.set()
        await self._exchange.close()

    async def finish(self, compute_s: float = 0.0) -> None:
        """Wait until the open step may end, then close it and put the result into `finished`.

        ``compute_s`` is the simulated time of the next passes, in seconds. Raises `RuntimeError` if this member leaves,
        and `MismatchError` if its learning rates differ from the first member's rates.
        """
        self._take_own()
        while not self._scheduler.may_go_on(status := self.ledger.standing(self._loop.time())):
            require(
                not self._left,
                "this member has left its group while its step was waiting for the others",
                RuntimeError,
            )
            self._changed.clear()
            seconds = self._scheduler.ask_again_s(status)
            await wait_until(None if seconds is None else self._loop.time() + seconds, self._changed)
        require(not self._other_rates, self._other_rates, MismatchError)
        measured = self.meter.measured
        lost = tuple(sorted(self.ledger.lost))
        bound = self._scheduler.bound(self.meter.facts(gamma=self._gamma, crashed=len(lost)))
        closed = self.ledger.close_step()
        step = ElasticStep(closed.step, status.waited_s, status.missing, measured, bound, lost)
        self.finished = closed, step
        self._loop.call_soon(self._measure, closed)  # runs while the user's thread applies the step
        if compute_s:
            await asyncio.sleep(compute_s)

    def _measure(self, closed: Closed) -> None:
        for distance in self.meter.on_closed(closed):
            if isinstance(self._scheduler, AdaptiveBeta):
                self._scheduler.on_measured(distance)
