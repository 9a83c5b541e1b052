"""Averaging rounds: a group's vectors are replaced by their weighted mean, even if single peers fail."""

import asyncio
import logging
import math
import statistics
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np

from colab_swarm.averaging.exchange import Round
from colab_swarm.averaging.group import Group, RoundRefused
from colab_swarm.averaging.lateness import Key
from colab_swarm.averaging.messages import AveragingSettings, RecallSpan, ReduceSpan
from colab_swarm.averaging.result import GroupResult, RoundResult
from colab_swarm.errors import PeerError, require
from colab_swarm.events import EventLog, Waited
from colab_swarm.net.node import Node
from colab_swarm.net.patience import Patience
from colab_swarm.net.peers import PeerId, Refusal, Role, Stream
from colab_swarm.runtime import loop_now, wait_until, wake
from colab_swarm.tensors.vector import HostVector, Vector

logger = logging.getLogger(__name__)


DRAIN_S = 5.0
LEFT_OUT_S = 60.0  # how long a member is left out when it is late for the first time
LARGEST = 10_000.0  # maximum RMS of a contribution or mean, as a multiple of the last means' median RMS
_MEANS = 10  # number of last means from which this median is taken
# Number of past rounds for which requests are refused immediately. A request for an unknown round waits, because it may
# come before this peer has begun the round.
_PAST_ROUNDS = 64


class Averager:
    """Takes part in averaging rounds, as a member and as a reducer. Rounds may overlap.

    Other members may still recover chunks from the last finished round of each collaboration. This round's vector is
    not copied, so do not change it until the next round has ended.
    """

    def __init__(
        self,
        peers: Node,
        settings: AveragingSettings | None = None,
        events: EventLog | None = None,
    ) -> None:
        self._peers = peers
        self._settings = settings or AveragingSettings()
        self._events = events or EventLog()
        self._patience = Patience[Key](LEFT_OUT_S, first_s=self._settings.patience_s)
        self._rounds: dict[bytes, Round] = {}
        self._finished: dict[str, Round] = {}  # by prefix
        self._past = deque[bytes](maxlen=_PAST_ROUNDS)
        self._begun = asyncio.Event()
        self._means_rms: dict[str, deque[float]] = {}  # sizes of the means of this peer's spans, by prefix
        self.on_round: Callable[[RoundResult], None] = lambda result: None  # called with each result
        peers.serve_stream(ReduceSpan, self._serve_reduce, role=Role.REDUCER)
        peers.serve_stream(RecallSpan, self._serve_recall, role=Role.REDUCER)

    async def close(self) -> None:
        for kind in (ReduceSpan, RecallSpan):
            self._peers.unserve(kind)

    def holds(self, vector: Vector) -> bool:
        """Return True if another member may still recover chunks from ``vector``. Thread-safe."""
        return any(each.ledger.vector is vector for each in list(self._rounds.values()))

    async def average(
        self, group: Group, vector: Vector, fine: int | None = None, *, bounded: bool = False
    ) -> GroupResult:
        """Replace the values of ``vector`` by the group's weighted mean; all members end with the same bits.

        Args:
            vector: a vector of ``group.terms.numel`` values. Do not change it before the next round has ended; use two
                vectors in turn.
            fine: number of values at the front that belong to small tensors, for a group whose codec is adaptive.
            bounded: refuse contributions and means whose root mean square (RMS) is more than `LARGEST` times the median
                RMS of the last means.

        The result shows the failures of peers. Raises ValueError if this peer is no member or the
        vector does not fit, RoundRefused if this round still runs here, or was this peer's last round.
        """
        numel = group.terms.numel
        require(vector.numel == numel, f"the group averages {numel} values, the vector has {vector.numel}")
        return await self._take_part(group, vector, fine, bounded=bounded)

    async def reduce(self, group: Group) -> GroupResult:
        """Join a round as a reducer only, without contributing values. Raises the same errors as `average`."""
        # the system allocates only memory that is written, which is this peer's span
        vector = HostVector(np.empty(group.terms.numel, np.float32))
        return await self._take_part(group, vector, collects=False, bounded=True)

    async def drain(self, prefix: str) -> None:
        """Wait until no member of the last round needs this peer, for at most `DRAIN_S` seconds."""
        finished = self._finished.get(prefix)
        deadline = loop_now() + DRAIN_S
        while finished is not None and finished.open_streams and loop_now() < deadline:
            await wait_until(deadline, finished.idle)

    def forget(self, prefix: str) -> None:
        """Stop serving recovery requests for the last finished round."""
        finished = self._finished.pop(prefix, None)
        if finished is not None:
            finished.ledger.readable = False
            round_id = finished.group.round_id
            del self._rounds[round_id]
            self._past.append(round_id)
            wake(self._begun)

    async def _take_part(
        self,
        group: Group,
        vector: Vector,
        fine: int | None = None,
        *,
        collects: bool = True,
        bounded: bool,
    ) -> GroupResult:
        if group.round_id in self._rounds:
            raise RoundRefused("late", f"the round of step {group.terms.step} was given up here")
        prefix = group.terms.prefix
        most_rms = math.inf
        if bounded and prefix in self._means_rms:
            most_rms = LARGEST * statistics.median(self._means_rms[prefix])
        own = Round(
            self._peers,
            group,
            vector,
            self._settings,
            self._patience,
            fine,
            collects=collects,
            most_rms=most_rms,
        )
        self._rounds[group.round_id] = own
        wake(self._begun)
        try:
            await own.run()
        finally:  # from now on, members may recover from this round, and no longer from the one before
            self.forget(prefix)
            self._finished[prefix] = own
        own.release()
        result = await own.result()
        self._learn(own, result)
        logger.info("%s", result)
        self.on_round(result)
        return result

    def _learn(self, own: Round, result: GroupResult) -> None:
        """Remember how long the members took, which members were late, and how large this peer's mean is."""
        now = loop_now()
        members = own.group.members
        counted = [index for index, member in enumerate(members) if member.id in result.contributors]
        for member, seconds in own.lateness.settle(own.trace.took_s(), counted, now).items():
            self._events.emit(Waited(now, members[member].id.hex(), "its part of a round", seconds))
        if own.reducer.largest_rms:
            means_rms = self._means_rms.setdefault(own.group.terms.prefix, deque(maxlen=_MEANS))
            means_rms.append(own.reducer.largest_rms)

    @asynccontextmanager
    async def _round_for(self, round_id: bytes, peer: PeerId) -> AsyncIterator[tuple[Round, int]]:
        deadline = loop_now() + self._settings.patience_s  # this peer may begin later
        while round_id not in self._rounds:
            is_past = round_id in self._past
            require(not is_past and loop_now() < deadline, "no such round here", Refusal)
            await wait_until(deadline, self._begun)
        own = self._rounds[round_id]
        member = own.group.index_of(peer)
        if member is None:
            raise Refusal("the group of this round was formed without you")
        own.on_open()
        try:
            async with asyncio.timeout(own.limit_s):
                yield own, member
        finally:
            own.on_close()
            if self._finished.get(own.group.terms.prefix) is own:
                own.release()

    async def _serve_reduce(self, opening: ReduceSpan, stream: Stream) -> None:
        try:
            async with self._round_for(opening.round_id, stream.peer) as (own, member), stream:
                require(
                    member not in own.contributors or self._peers.role_of(stream.peer) >= Role.WORKER,
                    "only a worker may contribute: ask for another invitation",
                    Refusal,
                )
                await own.serve(stream, member)
        except (PeerError, TimeoutError) as error:
            logger.debug("contribution ended: %s", error)

    async def _serve_recall(self, opening: RecallSpan, stream: Stream) -> None:
        try:
            async with self._round_for(opening.round_id, stream.peer) as (own, _), stream:
                await own.recovery.serve(opening, stream)
        except (PeerError, TimeoutError) as error:
            logger.debug("recall ended: %s", error)
        except ValueError as error:
            raise Refusal(str(error)) from error
