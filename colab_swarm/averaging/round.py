"""Averaging rounds: a group's vectors become their weighted mean, whatever single peers do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np

from colab_swarm.averaging.exchange import Exchange, ReduceSpan, RoundPing, Sending
from colab_swarm.averaging.group import Group, RoundRefused
from colab_swarm.averaging.ledger import Ledger
from colab_swarm.averaging.partition import Span
from colab_swarm.averaging.recovery import RecallSpan, recover, serve_recall
from colab_swarm.averaging.settings import AveragingSettings
from colab_swarm.errors import PeerError
from colab_swarm.events import EventLog, MemberTrace, PeerSilent, RoundFinished
from colab_swarm.markup import facts, size
from colab_swarm.net.peers import PeerId, Peers, Refusal, Role, Stream
from colab_swarm.tensors.codecs import Floats

__all__ = ["Averager", "AveragingSettings", "RoundResult"]

logger = logging.getLogger(__name__)
DRAIN_S = 5.0


@dataclass(frozen=True)
class RoundResult:
    """What became of a round at this member.

    Attributes:
        group: who was to take part.
        contributors: members whose values are in every mean that arrived here.
        spans_lost: spans whose reducer was lost before all of its means were here, recovered or not.
        kept_local: values for which no mean arrived: they are still this member's own.
        sent_bytes, received_bytes: payload.
        compression_error: relative, of the own contribution: ``||Q(v) - v|| / ||v||``, sampled.
        seconds: wall time per phase: ``exchange`` with the reducers, ``recovery``, ``total``.
        members: what each did when.
    """

    group: Group
    contributors: tuple[PeerId, ...]
    spans_lost: tuple[Span, ...]
    kept_local: tuple[Span, ...]
    sent_bytes: int
    received_bytes: int
    compression_error: float
    seconds: dict[str, float]
    members: tuple[MemberTrace, ...]

    def __repr__(self) -> str:
        peers = f"{len(self.contributors)} of {len(self.group.members)} peers"
        lost = f", {len(self.spans_lost)} spans lost" if self.spans_lost else ""
        return f"RoundResult(step {self.group.step}, {peers}, {self.seconds['total']:.2f} s{lost})"

    def _repr_html_(self) -> str:
        told = {f"seconds: {phase}": f"{seconds:.2f}" for phase, seconds in self.seconds.items()}
        told["sent, received"] = f"{size(self.sent_bytes)}, {size(self.received_bytes)}"
        told["values kept local"] = f"{sum(span.stop - span.start for span in self.kept_local):,}"
        told["error of compression"] = f"{self.compression_error:.2%}"
        return facts(repr(self), told)

    def event(self, *, began_at: float, now: float) -> RoundFinished:
        """What to tell of the round, which began with the search for its group."""
        weights = {member.id: member.weight for member in self.group.members}
        return RoundFinished(
            at=now,
            step=self.group.step,
            group_size=len(weights),
            contributors=tuple(peer.hex() for peer in self.contributors),
            samples=sum(weights.get(peer, 0.0) for peer in self.contributors),
            spans_lost=len(self.spans_lost),
            kept_local=sum(span.stop - span.start for span in self.kept_local),
            sent_bytes=self.sent_bytes,
            received_bytes=self.received_bytes,
            seconds=now - began_at,
            averaging_s=self.seconds["total"],
            predicted_s=self.group.predicted_s,
            explanation=self.group.explanation,
            compression_error=self.compression_error,
            members=self.members,
        )


class Averager:
    """Takes part in averaging rounds, as member and as reducer. Rounds may overlap.

    The last finished round of each collaboration is kept so that its other members can still recover from here; it
    is not copied (a copy costs as much as summing): the caller leaves its vector alone until the next has ended.

    Attributes:
        on_round: called with each result.
    """

    def __init__(
        self, peers: Peers, settings: AveragingSettings | None = None, events: EventLog | None = None
    ) -> None:
        self._peers = peers
        self._events = events or EventLog()
        self._settings = settings or AveragingSettings()
        self._rounds: dict[bytes, Exchange] = {}
        self._finished: dict[str, Exchange] = {}  # by prefix
        self._begun = asyncio.Event()
        self._spare: dict[str, Floats] = {}
        self.on_round: Callable[[RoundResult], None] = lambda result: None
        peers.serve_stream(ReduceSpan, self._serve_reduce, role=Role.REDUCER)
        peers.serve_stream(RecallSpan, self._serve_recall, role=Role.REDUCER)
        peers.serve(RoundPing, self._serve_ping)

    async def close(self) -> None:
        """Serve nobody any more."""
        for kind in (ReduceSpan, RecallSpan, RoundPing):
            self._peers.unserve(kind)

    def holds(self, values: Floats) -> bool:
        """Whether others may still recover from ``values``, the vector of this or of the last round; any thread."""
        return any(exchange.ledger.values is values for exchange in list(self._rounds.values()))

    async def average(self, group: Group, values: Floats, sending: Sending | None = None) -> RoundResult:
        """Replace ``values`` by the group's weighted mean; members end with the same bits.

        Args:
            group: from the matchmaker; this peer is a member.
            values: float32, contiguous, one-dimensional, ``group.numel`` long. Not to be changed before the next
                round has ended: use two vectors in turn.
            sending: how the contribution travels; None: as the group has agreed.

        Returns:
            What was reached before the deadline; a peer's fault shows there and is never raised.

        Raises:
            ValueError: this peer is no member, or the vector does not fit.
            RoundRefused: this very round was averaged or given up before.
        """
        me = group.index_of(self._peers.id)
        if me is None or values.shape != (group.numel,) or values.dtype != np.float32:
            raise ValueError(
                f"a member's {group.numel} float32 values are needed, got {values.dtype}{values.shape}"
            )
        if not values.flags.c_contiguous:
            raise ValueError("the vector must be contiguous")
        sums = self._memory(group.prefix, group.spans()[me].numel)
        return await self._take_part(group, me, values, sums=sums, sending=sending)

    async def reduce(self, group: Group) -> RoundResult:
        """Take part in a round for the others only: reduce the own span, recover what is asked for, collect nothing.

        Raises:
            ValueError: this peer is no member.
            RoundRefused: this very round was averaged or given up before.
        """
        me = group.index_of(self._peers.id)
        if me is None:
            raise ValueError("only a member can reduce")
        values = np.empty(group.numel, np.float32)  # memory is taken up where it is written: the own span
        start, stop = group.spans()[me]
        return await self._take_part(group, me, values, sums=values[start:stop], collects=False)

    async def drain(self, prefix: str) -> None:
        """Return when no member of the last round wants anything of us any more; gives up after a while."""
        if (exchange := self._finished.get(prefix)) is None:
            return
        try:
            async with asyncio.timeout(DRAIN_S):
                while exchange.serving:
                    await exchange.served.wait()
        except TimeoutError:
            logger.info("%d members still want something of the last round", exchange.serving)

    def forget(self, prefix: str) -> None:
        """Free what finished rounds of a collaboration left behind: it is over."""
        if exchange := self._finished.pop(prefix, None):
            self._forget(exchange)
        self._spare.pop(prefix, None)

    async def _take_part(
        self,
        group: Group,
        me: int,
        values: Floats,
        *,
        sums: Floats,
        sending: Sending | None = None,
        collects: bool = True,
    ) -> RoundResult:
        if group.round_id in self._rounds:
            raise RoundRefused("late", f"the round of step {group.step} was given up here")
        exchange = Exchange(
            self._peers,
            group,
            me,
            ledger=Ledger(group, values),
            sums=sums,
            settings=self._settings,
            sending=sending,
            collects=collects,
        )
        self._begin(exchange)
        try:
            result = await self._run(exchange)
        finally:
            self._finish(exchange)
        self.on_round(result)
        return result

    def _begin(self, exchange: Exchange) -> None:
        self._rounds[exchange.group.round_id] = exchange
        self._begun.set()
        self._begun.clear()

    async def _run(self, exchange: Exchange) -> RoundResult:
        clock = asyncio.get_running_loop().time
        begun, stop_listening = clock(), self._peers.on_lost(exchange.on_lost)
        exchanged: list[float] = []
        try:
            async with asyncio.timeout(self._settings.round_timeout_s), asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(exchange.watch(self._on_silent))
                if exchange.collects:
                    tasks.create_task(exchange.contribute_own())
                    count = len(exchange.group.members)
                    for reducer in ((exchange.me + step) % count for step in range(1, count)):
                        tasks.create_task(_obtain(exchange, reducer, exchanged))
                for final in exchange.awaited():
                    await final.wait()
                watch.cancel()
        except TimeoutError:
            logger.warning(
                "round of step %d ran into its limit of %g s",
                exchange.group.step,
                self._settings.round_timeout_s,
            )
            exchange.out_of_time()
        finally:
            stop_listening()
            for event in (*exchange.settled, *exchange.awaited()):
                event.set()
        total_s = clock() - begun
        exchange_s = max(exchanged, default=clock()) - begun
        seconds = {"exchange": exchange_s, "recovery": total_s - exchange_s, "total": total_s}
        return _result(exchange, seconds)

    def _on_silent(self, peer: PeerId, seconds: float) -> None:
        self._events.emit(PeerSilent(asyncio.get_running_loop().time(), peer.hex(), seconds))

    # --- what finished rounds leave behind ------------------------------------------------------------------

    def _finish(self, exchange: Exchange) -> None:
        """Keep the round for its other members, and forget the one before."""
        prefix = exchange.group.prefix
        if prefix in self._finished:
            self._forget(self._finished[prefix])
        self._finished[prefix] = exchange

    def _forget(self, exchange: Exchange) -> None:
        del self._rounds[exchange.group.round_id]
        if exchange.collects and not exchange.serving:  # page faults in fresh memory cost more than the sums
            self._spare[exchange.group.prefix] = exchange.sums

    def _memory(self, prefix: str, numel: int) -> Floats:
        spare = self._spare.pop(prefix, None)
        return np.empty(numel, np.float32) if spare is None or len(spare) != numel else spare

    # --- serving --------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _round_for(self, round_id: bytes, peer: PeerId) -> AsyncIterator[tuple[Exchange, int]]:
        """The round and the peer's place in it; waits a little, as others may get the group before us."""
        try:
            async with asyncio.timeout(self._settings.patience_s):
                while round_id not in self._rounds:
                    await self._begun.wait()
        except TimeoutError:
            raise Refusal("no such round here") from None
        exchange = self._rounds[round_id]
        member = exchange.group.index_of(peer)
        if member is None:
            raise Refusal("the group of this round was formed without you")
        exchange.serving += 1
        exchange.served.clear()
        try:
            async with asyncio.timeout(self._settings.round_timeout_s):
                yield exchange, member
        finally:
            exchange.serving -= 1
            if not exchange.serving:
                exchange.served.set()

    async def _serve_reduce(self, opening: ReduceSpan, stream: Stream) -> None:
        try:
            async with self._round_for(opening.round_id, stream.peer) as (exchange, member), stream:
                if exchange.member(member).weight and self._peers.role_of(stream.peer) < Role.WORKER:
                    raise Refusal("only a worker may contribute: ask for another invitation")
                await exchange.serve(stream, member)
        except (PeerError, TimeoutError) as error:
            logger.debug("contribution ended: %s", error)

    async def _serve_recall(self, opening: RecallSpan, stream: Stream) -> None:
        try:
            async with self._round_for(opening.round_id, stream.peer) as (exchange, _), stream:
                await serve_recall(exchange, opening, stream)
        except (PeerError, TimeoutError) as error:
            logger.debug("recall ended: %s", error)
        except ValueError as error:
            raise Refusal(str(error)) from error

    async def _serve_ping(self, peer: PeerId, ping: RoundPing) -> RoundPing:
        return ping


async def _obtain(exchange: Exchange, reducer: int, exchanged: list[float]) -> None:
    """Get one reducer's means: from it, or by recovery."""
    if exchange.ledger.chunks[reducer]:
        await exchange.talk_to(reducer)
        exchanged.append(asyncio.get_running_loop().time())
        if reducer in exchange.lost:
            await recover(exchange, reducer)
    exchange.settled[reducer].set()
    exchange.final[reducer].set()


def _result(exchange: Exchange, seconds: dict[str, float]) -> RoundResult:
    group, incomplete = exchange.group, exchange.ledger.incomplete()
    spans = group.spans()
    contributors = tuple(
        member.id
        for index, member in enumerate(group.members)
        if member.weight > 0 and index not in incomplete
    )
    result = RoundResult(
        group=group,
        contributors=contributors,
        spans_lost=tuple(spans[reducer] for reducer in sorted(exchange.lost)),
        kept_local=exchange.ledger.kept_local(),
        sent_bytes=exchange.sent_bytes,
        received_bytes=exchange.received_bytes,
        compression_error=exchange.sending.error,
        seconds=seconds,
        members=exchange.trace.members(),
    )
    logger.info(
        "round of step %d: %d of %d contributed, %d spans lost, %.2f s",
        group.step,
        len(contributors),
        len(group.members),
        len(result.spans_lost),
        seconds["total"],
    )
    return result
