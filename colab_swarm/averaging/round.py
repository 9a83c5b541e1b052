"""Averaging rounds: a group's vectors become their weighted mean, even if single peers fail."""

import asyncio
import logging
import math
import statistics
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np

from colab_swarm.averaging.exchange import AllReduce
from colab_swarm.averaging.group import Group, RoundRefused
from colab_swarm.averaging.member import (
    AveragingSettings,
    RecallSpan,
    ReduceSpan,
    RoundMember,
    UploadEncoding,
    Usual,
)
from colab_swarm.averaging.reducer import OUTLIER
from colab_swarm.averaging.result import GroupResult, RoundResult
from colab_swarm.averaging.standing import BURST_S, PART, Standing
from colab_swarm.averaging.strategy import forecast_s
from colab_swarm.errors import PeerError, require
from colab_swarm.events import EventLog
from colab_swarm.net.patience import Patience
from colab_swarm.net.peers import PeerId, Peers, Refusal, Role, Stream
from colab_swarm.runtime import loop_now, wait_until, wake
from colab_swarm.tensors.vector import HostVector, Vector

logger = logging.getLogger(__name__)


DRAIN_S = 5.0
_NORMS = 8  # rounds that say what is usual
_MIN_USUAL_S = 0.1
_MOST_ROUND_S = 3600.0  # whatever the bandwidths are said to be
PREDICTED = 3.0  # a round may take three times its forecast from the bandwidths


class Averager:
    """Takes part in averaging rounds, as a member and as a reducer. Rounds may overlap.

    Others may still recover chunks from the last finished round of each collaboration. Its vector
    is not copied: do not change it until the next round has ended.
    """

    def __init__(
        self,
        peers: Peers,
        settings: AveragingSettings | None = None,
        events: EventLog | None = None,
    ) -> None:
        self._peers = peers
        self._settings = settings or AveragingSettings()
        self._rounds: dict[bytes, AllReduce] = {}
        self._finished: dict[str, AllReduce] = {}  # by prefix
        self._begun = asyncio.Event()
        # how long the members' contributions take, by prefix
        self._took = Patience[str](0.0, first_s=math.inf, least_s=_MIN_USUAL_S)
        log = events or EventLog()
        self.standings = defaultdict[str, Standing](
            lambda: Standing(peers.id, heard_at=peers.read_at, events=log)
        )  # by prefix
        self._norms: dict[str, deque[float]] = {}  # `SpanReducer.usual_rms` of the last rounds, by prefix
        self.on_round: Callable[[RoundResult], None] = lambda result: None  # called with each result
        peers.serve_stream(ReduceSpan, self._serve_reduce, role=Role.REDUCER)
        peers.serve_stream(RecallSpan, self._serve_recall, role=Role.REDUCER)

    async def close(self) -> None:
        for kind in (ReduceSpan, RecallSpan):
            self._peers.unserve(kind)

    def holds(self, vector: Vector) -> bool:
        """Return True if another member may still recover chunks from ``vector``. Thread-safe."""
        return any(exchange.own.ledger.vector is vector for exchange in list(self._rounds.values()))

    async def average(
        self,
        group: Group,
        vector: Vector,
        encoding: UploadEncoding | None = None,
        *,
        standing: Standing | None = None,
        bounded: bool = False,
    ) -> GroupResult:
        """Replace the values of ``vector`` by the group's weighted mean; all members end with the same bits.

        Args:
            vector: of ``group.terms.numel`` values. Do not change it before the next round has ended: use two
                vectors in turn.
            encoding: of the contribution; None: the group's codec.
            standing: what delays have cost this peer; None: one of the averager's own for the collaboration.
            bounded: scale down contributions that are `OUTLIER` times larger than usual in the last rounds.

        The result shows the failures of peers. Raises ValueError if this peer is no member or the
        vector does not fit, RoundRefused if it was this peer's last round, or still runs here.
        """
        numel = group.terms.numel
        require(vector.numel == numel, f"the group averages {numel} values, the vector has {vector.numel}")
        return await self._take_part(group, vector, encoding, standing=standing, bounded=bounded)

    async def reduce(self, group: Group) -> GroupResult:
        """Join a round as a reducer only: contribute no values. Raises as `average` does."""
        # the system allocates only what is written: the own span
        vector = HostVector(np.empty(group.terms.numel, np.float32))
        return await self._take_part(group, vector, collects=False, bounded=True)

    async def drain(self, prefix: str) -> None:
        """Wait until no member of the last round needs this peer, for `DRAIN_S` at most."""
        exchange = self._finished.get(prefix)
        deadline = loop_now() + DRAIN_S
        while exchange is not None and exchange.server.open_streams and loop_now() < deadline:
            await wait_until(deadline, exchange.server.idle)

    def forget(self, prefix: str) -> None:
        """Let no member recover from the last finished round any more."""
        exchange = self._finished.pop(prefix, None)
        if exchange is not None:
            exchange.own.ledger.readable = False
            del self._rounds[exchange.group.round_id]

    async def _take_part(
        self,
        group: Group,
        vector: Vector,
        encoding: UploadEncoding | None = None,
        *,
        standing: Standing | None = None,
        collects: bool = True,
        bounded: bool,
    ) -> GroupResult:
        if group.round_id in self._rounds:
            raise RoundRefused("late", f"the round of step {group.terms.step} was given up here")
        prefix = group.terms.prefix
        usual = self._usual_in(group, standing or self.standings[prefix], bounded=bounded)
        own = RoundMember(self._peers, group, vector, self._settings, usual, now=loop_now())
        exchange = AllReduce(own, encoding, collects=collects)
        self._rounds[group.round_id] = exchange
        wake(self._begun)
        try:
            await self._run(exchange)
        finally:  # members may still recover from this round, no longer from the one before
            self.forget(prefix)
            self._finished[prefix] = exchange
        exchange.server.release()
        result = exchange.result(loop_now())
        self._learn(exchange)
        logger.info("%s", result)
        self.on_round(result)
        return result

    def _usual_in(self, group: Group, standing: Standing, *, bounded: bool) -> Usual:
        prefix = group.terms.prefix
        norms = self._norms.get(prefix)
        round_s = self._took.limit_s(prefix)
        most_rms = math.inf
        if bounded and norms:
            most_rms = OUTLIER * statistics.median(norms)
        return Usual(round_s, PREDICTED * forecast_s(group), most_rms, standing)

    def _limit_s(self, group: Group) -> float:
        """Return the bound on a whole round: a large model takes long over slow lines, beside the trainer."""
        return max(self._settings.round_timeout_s, min(PREDICTED * forecast_s(group), _MOST_ROUND_S))

    def _learn(self, exchange: AllReduce) -> None:
        """Charge the members that this round waited for; what the median one did is usual."""
        peers = [member.id for member in exchange.group.members]
        prefix = exchange.group.terms.prefix
        late_s = {peers[member]: seconds for member, seconds in exchange.lateness.late_s.items()}
        # A member that sent its whole part here did not keep the reducer waiting either, whatever that one says.
        waited_for = {}
        for reducer, member in exchange.own.ledger.waited().items():
            if not exchange.server.reducer.has_all_of(member):
                waited_for[peers[reducer]] = peers[member]
        standing = exchange.own.usual.standing
        standing.settle("its part of a round", late_s, peers, loop_now(), waited_for)
        ended_s = exchange.own.trace.ended_s()
        if ended_s:
            self._took.learn(prefix, statistics.median_low(ended_s))
        usual_rms = exchange.server.reducer.usual_rms
        if usual_rms:
            self._norms.setdefault(prefix, deque(maxlen=_NORMS)).append(usual_rms)

    async def _run(self, exchange: AllReduce) -> None:
        stop_listening = self._peers.on_lost(exchange.server.on_lost)
        own = exchange.own
        step = exchange.group.terms.step
        limit_s = self._limit_s(exchange.group)
        awaited = own.final
        if not exchange.collects:
            awaited = [own.final[own.me]]
        try:
            async with asyncio.timeout(limit_s), asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(exchange.watch())
                if exchange.collects:
                    tasks.create_task(exchange.contribute_own())
                    for reducer in own.others:
                        tasks.create_task(exchange.obtain(reducer))
                for final in awaited:
                    await final.wait()
                watch.cancel()
        except TimeoutError:
            logger.warning("the round of step %d timed out after %g s", step, limit_s)
            for member in {*exchange.server.reducer.awaited(), *own.lost} - {own.me}:
                own.trace.on_dropped(member, f"too slow: the round ended after {limit_s:g} s")
        finally:
            stop_listening()
            if exchange.collects:  # a late chunk must not change what the trainer applies
                own.ledger.writable = False
            for event in (*own.settled, *awaited):
                event.set()

    @asynccontextmanager
    async def _round_for(self, round_id: bytes, peer: PeerId) -> AsyncIterator[tuple[AllReduce, int]]:
        deadline = loop_now() + self._settings.silence_s + BURST_S / PART  # this peer may begin later
        while round_id not in self._rounds:
            require(loop_now() < deadline, "no such round here", Refusal)
            await wait_until(deadline, self._begun)
        exchange = self._rounds[round_id]
        member = exchange.group.index_of(peer)
        if member is None:
            raise Refusal("the group of this round was formed without you")
        exchange.server.on_open()
        try:
            async with asyncio.timeout(self._limit_s(exchange.group)):
                yield exchange, member
        finally:
            exchange.server.on_close()
            if self._finished.get(exchange.group.terms.prefix) is exchange:
                exchange.server.release()

    async def _serve_reduce(self, opening: ReduceSpan, stream: Stream) -> None:
        try:
            async with self._round_for(opening.round_id, stream.peer) as (exchange, member), stream:
                require(
                    not exchange.own.member(member).weight or self._peers.role_of(stream.peer) >= Role.WORKER,
                    "only a worker may contribute: ask for another invitation",
                    Refusal,
                )
                await exchange.server.serve(stream, member)
        except (PeerError, TimeoutError) as error:
            logger.debug("contribution ended: %s", error)

    async def _serve_recall(self, opening: RecallSpan, stream: Stream) -> None:
        try:
            async with self._round_for(opening.round_id, stream.peer) as (exchange, _), stream:
                await exchange.recovery.serve(opening, stream)
        except (PeerError, TimeoutError) as error:
            logger.debug("recall ended: %s", error)
        except ValueError as error:
            raise Refusal(str(error)) from error
