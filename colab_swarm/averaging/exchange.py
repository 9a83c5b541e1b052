"""One round at one member: it contributes, collects the means, and reduces its own span.

One stream to each reducer: outgoing connections are enough. No task, timer or copy per chunk.
"""

import asyncio
import math

from colab_swarm.averaging.collection import Collection
from colab_swarm.averaging.group import Span
from colab_swarm.averaging.lateness import SHORTEST_S, TICK_S, Lateness
from colab_swarm.averaging.member import RoundMember, UploadEncoding
from colab_swarm.averaging.recovery import Recovery
from colab_swarm.averaging.result import GroupResult
from colab_swarm.averaging.span_server import SpanServer
from colab_swarm.averaging.upload import Upload
from colab_swarm.runtime import loop_now


class AllReduce:
    """One round at one member, whose vector becomes the means; an assistant, which does not collect, only reduces.

    ``exchange_s`` is the time from the begin until the last other reducer was done or lost, by `obtain`; infinite
    while none is.
    """

    def __init__(
        self, own: RoundMember, encoding: UploadEncoding | None = None, *, collects: bool = True
    ) -> None:
        now = own.trace.began_at
        encoding = encoding or UploadEncoding()
        self.own = own
        self.group = own.group
        self.collects = collects
        self.lateness = Lateness(own, now=now)
        self.upload = Upload(own, encoding, now=now)
        self.server = SpanServer(own, encoding.fine, collects=collects)
        self.collection = Collection(own, self.upload)
        self.recovery = Recovery(own, self.upload, self.lateness, collects=collects)
        self.exchange_s = math.inf
        if not collects:
            for reducer, settled in enumerate(own.settled):
                if reducer != own.me:
                    settled.set()

    def result(self, now: float) -> GroupResult:
        """Return how the round went, when it is over."""
        own = self.own
        group = self.group
        spans = group.spans()
        seconds = now - own.trace.began_at
        incomplete = own.ledger.incomplete()
        contributors = []
        for index, member in enumerate(group.members):
            if member.weight > 0 and index not in incomplete:
                contributors.append(member.id)
        kept_local: tuple[Span, ...] = ()
        if self.collects:
            kept_local = own.ledger.kept_local()
        return GroupResult(
            group=group,
            step=group.terms.step,
            announced={member.id: member.samples for member in group.members},
            contributors=tuple(contributors),
            spans_lost=tuple(spans[reducer] for reducer in sorted(own.lost)),
            kept_local=kept_local,
            sent_bytes=own.trace.sent_bytes,
            received_bytes=own.trace.received_bytes,
            seconds=seconds,
            exchange_s=min(seconds, self.exchange_s),
            members=own.trace.members(incomplete),
            gaps=own.ledger.gaps(),
            digest=own.ledger.digest() if self.collects else b"",
        )

    async def contribute_own(self) -> None:
        """Add the own contribution to the own reducer, yielding to the event loop in between."""
        own = self.own
        chunks = own.ledger.chunks[own.me] if own.contributes else ()
        try:
            for index, chunk in enumerate(chunks):
                message, payload = self.upload.encoded(own.me, index, chunk)
                self.server.take(own.me, message, payload)
                await asyncio.sleep(0)
        except ValueError as error:  # the codec cannot encode it
            self.server.drop(own.me, str(error))

    async def obtain(self, reducer: int) -> None:
        """Collect the means of a reducer's span, from other members if it is lost."""
        own = self.own
        if own.ledger.chunks[reducer]:
            await self.collection.talk_to(reducer)
            self.exchange_s = loop_now() - own.trace.began_at
            if reducer in own.lost:
                await self.recovery.recover(reducer)
        own.settled[reducer].set()
        own.final[reducer].set()

    async def watch(self) -> None:
        """Go on without each member that is later than usual by more than it has earned."""
        sleep_s = TICK_S
        while True:
            slept_at = loop_now()
            await asyncio.sleep(sleep_s)
            self.upload.tick()
            now = loop_now()
            self.lateness.on_slept(now - slept_at, now)
            sleep_s = min([TICK_S, *self._look(now)])

    def _look(self, now: float) -> list[float]:
        """Drop who is too late; return for each other one when to look again."""
        times_s = []
        for member in self.server.reducer.awaited():
            if member == self.own.me:
                continue
            left_s = self.lateness.left_s(member, now)
            if left_s <= 0:
                silent_s = self.own.silent_s(member, now)
                self.server.drop(member, f"too slow: nothing came for {silent_s:.1f} s")
                if self.lateness.is_silent(member, now):
                    self.collection.give_up(member, now)
            times_s.append(max(left_s, SHORTEST_S))
        for reducer in self.collection.waiting_for():
            left_s = self.lateness.reducer_left_s(reducer, self.server.averaged_at, now)
            if left_s <= 0:
                self.collection.give_up(reducer, now)
            times_s.append(max(left_s, SHORTEST_S))
        return times_s
