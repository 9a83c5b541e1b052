"""A trainer's rounds: find the group, average, and keep within the traffic budget. Knows no torch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from colab_swarm.averaging.exchange import RoundPing, Sending
from colab_swarm.averaging.group import Group, GroupFormationSettings, RoundRefused, Ticket
from colab_swarm.averaging.matchmaking import Matchmaker
from colab_swarm.averaging.round import RoundResult
from colab_swarm.averaging.strategy import AdaptiveShares
from colab_swarm.errors import PeerError, PeerTimeout
from colab_swarm.events import BudgetChosen, Fault, PeerSilent
from colab_swarm.net.peers import PeerId
from colab_swarm.training.catch_up import Values
from colab_swarm.training.progress import Progress, ProgressRecord
from colab_swarm.training.settings import (
    CommunicationPlan,
    PeerServices,
    TrafficBudgetPolicy,
    TrainingSettings,
)

SAYS_SOMETHING_BYTES = 1 << 18

"""A round that moved less says nothing about a line."""

KEPT_PER_ROUND = 0.98

ROUNDS = 4

"""The best of so many is believed: a single round may have waited for anything."""


class Rate:
    """What one direction carried, bits per second: rounds are often shorter than the second by which links measure.

    A good round is believed for long, but not for ever: lines change.
    """

    def __init__(self) -> None:
        self._best_bps = 0.0
        self._rounds = 0

    def on_round(self, size_bytes: int, seconds: float) -> None:
        """A round moved so much."""
        self._best_bps *= KEPT_PER_ROUND
        if size_bytes >= SAYS_SOMETHING_BYTES and seconds > 0:
            self._best_bps = max(self._best_bps, 8 * size_bytes / seconds)
            self._rounds += 1

    def known(self, measured_bps: float | None, most_bps: float | None = None) -> float | None:
        """The best that was seen, by links or in rounds, as far as it may be used; None if nothing was."""
        seen_bps = self._best_bps if self._rounds >= ROUNDS else 0.0
        best_bps = max(measured_bps or 0.0, seen_bps)
        return min(best_bps, most_bps or best_bps) if best_bps else most_bps


class LinkBandwidth:
    """Both directions."""

    def __init__(self) -> None:
        self.upload, self.download = Rate(), Rate()

    def on_round(self, result: RoundResult) -> None:
        """A round ended."""
        seconds = result.seconds["exchange"]
        self.upload.on_round(result.sent_bytes, seconds)
        self.download.on_round(result.received_bytes, seconds)


LATE_S, ANSWER_S = 2.0, 2.0

"""A group that is so long in forming makes people ask why; a peer that is well answers in so long."""


class Rounds:
    """Takes part in a collaboration's rounds.

    Attributes:
        numel: length of what is averaged.
        choice: how this peer keeps within its budget; None without one.

    Args:
        schema: digest of what is averaged.
        expected, on_called, stands: see `Matchmaker`.
    """

    def __init__(
        self,
        services: PeerServices,
        settings: TrainingSettings,
        *,
        numel: int,
        schema: bytes,
        expected: Callable[[int, bytes], Awaitable[Sequence[PeerId]]],
        on_called: Callable[[Ticket, PeerId], float | None],
        stands: Callable[[int, bytes], bool],
    ) -> None:
        self.numel = numel
        self.choice: CommunicationPlan | None = None
        self._services, self._settings, self._schema = services, settings, schema
        self._expected, self._on_called = expected, on_called
        self._callers: dict[PeerId, tuple[int, bytes]] = {}  # for what they called us last
        self._last: Group | None = None
        self._told: set[str] = set()
        self._line = LinkBandwidth()
        self._shares = AdaptiveShares()
        self._thrift: TrafficBudgetPolicy | None = None
        if settings.budget is not None:
            me, auto_steps = services.peers.id, settings.auto_steps
            self._thrift = TrafficBudgetPolicy(
                settings.budget, me, precision=settings.compression, auto_steps=auto_steps
            )
            if settings.budget.rate_bps is not None:
                services.peers.limit(settings.budget.rate_bps)
        self._matchmaker = Matchmaker(
            services.rooms,
            settings.prefix,
            expected=expected,
            on_called=self._on_call,
            stands=stands,
            strategy=self._shares,
            settings=GroupFormationSettings(
                window_s=settings.matchmaking_timeout_s,
                slack_s=settings.matchmaking_timeout_s,
                max_window_s=settings.max_matchmaking_s,
            ),
        )

    def close(self) -> None:
        """Take part in nothing more."""
        self._matchmaker.close()

    def forget(self, step: int, lineage: bytes) -> None:
        """This peer comes back to the step: it tells no more of the group that it had there."""
        self._matchmaker.forget(step, lineage)

    def likely(self, step: int, lineage: bytes) -> frozenset[PeerId]:
        """Who comes to the round of ``step``, whatever its record tells: it was in the one before, or has called us."""
        last = self._last if self._last is not None and self._last.step == step - 1 else None
        members = [member.id for member in last.members] if last else []
        callers = (peer for peer, called in self._callers.items() if called == (step, lineage))
        return frozenset((*members, *callers))

    def _on_call(self, terms: Ticket, caller: PeerId) -> float | None:
        ready_in_s = self._on_called(terms, caller)
        if ready_in_s is not None:
            self._callers[caller] = terms.step, terms.lineage
        return ready_in_s

    async def take_part(
        self,
        own: ProgressRecord,
        values: Values,
        weight: float,
        sending: Sending | None,
        *,
        formed: Callable[[], None],
    ) -> RoundResult:
        """Average ``values`` in the round of the step that ``own`` tells; ``formed`` is called when it has its group.

        Raises:
            PeerError: there is no round for us.
        """
        clock = asyncio.get_running_loop().time
        started = clock()
        deadline = started + self._settings.round_timeout_s
        candidates = await self._expected(own.step, own.lineage)
        watch = asyncio.create_task(self._watch(candidates))
        try:
            group = await self._matchmaker.join(self._ticket(own, weight), candidates, deadline)
        except RoundRefused as refused:
            self._tell(refused, clock())
            raise
        finally:
            watch.cancel()
        formed()
        self._last = group
        if sending is not None and self.choice is not None:
            sending.precision = self.choice.precision
        result = await self._services.averager.average(group, values, sending)
        self._learn(group, result)
        self._services.events.emit(result.event(began_at=started, now=clock()))
        return result

    def _tell(self, refused: RoundRefused, now: float) -> None:
        """What will not pass by itself, such as another codec, is told once; the peer trains alone meanwhile."""
        if refused.reason == "invalid" and str(refused) not in self._told:
            self._told.add(str(refused))
            fix = "all peers of a run take the same model, compression and mean_compression"
            self._services.events.emit(
                Fault(now, "rounds, which this peer is kept out of", f"{refused}; {fix}")
            )

    async def _watch(self, candidates: Sequence[PeerId]) -> None:
        """If the group is long in forming, tell who of those it may be waiting for does not even answer."""
        await asyncio.sleep(LATE_S)
        linked = self._services.peers.linked()
        await asyncio.gather(*(self._ping(peer) for peer in candidates if peer in linked))

    async def _ping(self, peer: PeerId) -> None:
        peers, ping = self._services.peers, RoundPing(b"")
        try:
            await peers.call(peer, ping, RoundPing, timeout_s=ANSWER_S)
        except PeerTimeout:
            now = asyncio.get_running_loop().time()
            self._services.events.emit(PeerSilent(now, peer.hex(), ANSWER_S))
        except PeerError:  # a lost link tells of itself
            pass

    def _learn(self, group: Group, result: RoundResult) -> None:
        self._line.on_round(result)
        if not result.spans_lost and len(result.contributors) > 1:
            shares = [member.share for member in group.members]
            self._shares.on_round(shares, group.predicted_s, result.seconds["exchange"])

    def line_bps(self) -> tuple[float | None, float | None]:
        """What this peer's line carries up and down, bits per second, as far as it is known and may be used."""
        links, budget = self._services.peers.statistics(), self._settings.budget
        most = None if budget is None else budget.rate_bps
        upload, download = self._line.upload, self._line.download
        return upload.known(links.upload_bps, most), download.known(links.download_bps, most)

    def _ticket(self, own: ProgressRecord, weight: float) -> Ticket:
        peers, settings = self._services.peers, self._settings
        willing = self.choice is None or self.choice.reduces
        upload_bps, download_bps = self.line_bps()
        return Ticket(
            prefix=settings.prefix,
            step=own.step,
            lineage=own.lineage,
            weight=weight,
            numel=self.numel,
            schema=self._schema,
            reduces=bool(peers.contact.addresses) and willing and not own.syncing,
            upload_bps=upload_bps,
            download_bps=download_bps,
            codec=settings.compression,
            mean_codec=settings.mean_compression,
            samples_per_s=own.samples_per_s,
        )

    def choose(self, result: RoundResult, progress: Progress) -> CommunicationPlan | None:
        """After a round: how to keep within the budget from now on; None without a budget."""
        if self._thrift is None or self._last is None or len(self._last.members) < 2:
            return self.choice
        now = asyncio.get_running_loop().time()
        self._thrift.on_round(result.sent_bytes, result.received_bytes, progress.local_steps, now=now)
        speed = progress.samples_per_s()
        choice = self._thrift.choose(self._last, progress.target_batch_size / speed) if speed else self.choice
        if choice is not None and not choice.like(self.choice):
            self._services.events.emit(BudgetChosen(now, str(choice), choice.within))
        self.choice = choice
        return choice
