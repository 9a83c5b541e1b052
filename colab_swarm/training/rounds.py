"""A trainer's rounds: find the group, average, and stay within the traffic budget. Does not import torch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from colab_swarm.averaging.exchange import RoundPing, UploadEncoding
from colab_swarm.averaging.group import Group, GroupFormationSettings, RoundRefused, Ticket
from colab_swarm.averaging.matchmaking import Matchmaker
from colab_swarm.averaging.round import RoundResult
from colab_swarm.averaging.strategy import AdaptiveShares
from colab_swarm.errors import PeerError, PeerTimeout
from colab_swarm.events import BudgetChosen, Fault, PeerSilent
from colab_swarm.net.peers import PeerId, Peers
from colab_swarm.tensors.codecs import Floats
from colab_swarm.training.progress import Progress, ProgressRecord
from colab_swarm.training.settings import (
    CommunicationPlan,
    PeerServices,
    TrafficBudgetPolicy,
    TrainingSettings,
)

MEASURABLE_BYTES = 1 << 18
"""A round that moved less says nothing about bandwidth."""
KEPT_PER_ROUND = 0.98
ROUNDS = 4
"""Number of rounds before their best counts: a single round may have waited for anything."""
LATE_S, ANSWER_S = 2.0, 2.0
"""When to look for silent peers while a group forms, and how soon a healthy peer answers."""


class Rate:
    """Bandwidth of one direction, bits per second, from links and from rounds.

    Rounds are often shorter than the second over which links measure. The best round counts for
    long but decays, because bandwidth changes.
    """

    def __init__(self) -> None:
        self._best_bps = 0.0
        self._rounds = 0

    def on_round(self, size_bytes: int, seconds: float) -> None:
        """Count the traffic of a round."""
        self._best_bps *= KEPT_PER_ROUND
        if size_bytes >= MEASURABLE_BYTES and seconds > 0:
            self._best_bps = max(self._best_bps, 8 * size_bytes / seconds)
            self._rounds += 1

    def known(self, measured_bps: float | None, most_bps: float | None = None) -> float | None:
        """Return the best rate of links and rounds, bounded by ``most_bps``; None if there is no measurement."""
        seen_bps = self._best_bps if self._rounds >= ROUNDS else 0.0
        best_bps = max(measured_bps or 0.0, seen_bps)
        return min(best_bps, most_bps or best_bps) if best_bps else most_bps


class LinkBandwidth:
    """Measured bandwidth of a peer's links in both directions."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._upload, self._download = Rate(), Rate()

    def on_round(self, result: RoundResult) -> None:
        """Count the traffic of a round."""
        seconds = result.seconds["exchange"]
        self._upload.on_round(result.sent_bytes, seconds)
        self._download.on_round(result.received_bytes, seconds)

    def known(self, most_bps: float | None = None) -> tuple[float | None, float | None]:
        """Return upload and download, bits per second, bounded by ``most_bps``; None where not measured."""
        links = self._peers.statistics()
        upload_bps = self._upload.known(links.upload_bps, most_bps)
        return upload_bps, self._download.known(links.download_bps, most_bps)


class Rounds:
    """Takes part in a collaboration's rounds.

    Args:
        schema: digest of the averaged vector's layout.
        expected, on_called, stands: see `Matchmaker`.

    Attributes:
        numel: length of the averaged vector.
        plan: how this peer stays within its budget; None without one.
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
        self.plan: CommunicationPlan | None = None
        self._services, self._settings, self._schema = services, settings, schema
        self._expected, self._on_called = expected, on_called
        self._called, self._callers = (0, b""), set[PeerId]()  # the round last called for, and by whom
        self._last: Group | None = None
        self._reported: set[str] = set()
        self._bandwidth = LinkBandwidth(services.peers)
        self._shares = AdaptiveShares()
        self._policy: TrafficBudgetPolicy | None = None
        if settings.budget is not None:
            self._policy = TrafficBudgetPolicy(
                settings.budget,
                services.peers.id,
                precision=settings.compression,
                auto_steps=settings.auto_steps,
            )
            if settings.budget.rate_bps is not None:
                services.peers.limit(settings.budget.rate_bps)
        self.matchmaker = Matchmaker(
            services.router,
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

    def likely(self, step: int, lineage: bytes) -> frozenset[PeerId]:
        """Return the peers that were in the round before, or called this peer: their records may be late."""
        last = self._last if self._last is not None and self._last.step == step - 1 else None
        members = [member.id for member in last.members] if last else []
        callers = self._callers if self._called == (step, lineage) else ()
        return frozenset((*members, *callers))

    def _on_call(self, terms: Ticket, caller: PeerId) -> float | None:
        ready_in_s = self._on_called(terms, caller)
        if ready_in_s is not None:
            if self._called != (terms.step, terms.lineage):
                self._called, self._callers = (terms.step, terms.lineage), set()
            self._callers.add(caller)
        return ready_in_s

    async def take_part(
        self,
        own: ProgressRecord,
        values: Floats,
        weight: float,
        encoding: UploadEncoding | None,
        *,
        formed: Callable[[], None],
    ) -> RoundResult:
        """Average ``values`` in the round of the step in ``own``; ``formed`` is called when the group is complete.

        Raises:
            PeerError: this peer found no round.
        """
        clock = asyncio.get_running_loop().time
        started = clock()
        candidates = await self._expected(own.step, own.lineage)
        watch = asyncio.create_task(self._watch(candidates))
        try:
            deadline = started + self._settings.round_timeout_s
            group = await self.matchmaker.join(self._ticket(own, weight), candidates, deadline)
        except RoundRefused as refused:
            if (
                refused.reason == "invalid" and str(refused) not in self._reported
            ):  # it will not pass by itself
                self._reported.add(str(refused))
                fix = "all peers of a run take the same model, compression and mean_compression"
                text = f"{refused}; {fix}"
                self._services.events.emit(Fault(clock(), "rounds, which this peer is kept out of", text))
            raise
        finally:
            watch.cancel()
        formed()
        self._last = group
        if encoding is not None and self.plan is not None:
            encoding = replace(encoding, precision=self.plan.precision)
        result = await self._services.averager.average(group, values, encoding)
        self._bandwidth.on_round(result)
        if not result.spans_lost and len(result.contributors) > 1:
            shares = [member.share for member in group.members]
            self._shares.on_round(shares, group.predicted_s, result.seconds["exchange"])
        self._services.events.emit(result.event(began_at=started, now=clock()))
        return result

    async def _watch(self, candidates: Sequence[PeerId]) -> None:
        """If the group forms slowly, report the candidates that do not even answer."""
        await asyncio.sleep(LATE_S)
        linked = self._services.peers.linked()
        await asyncio.gather(*(self._ping(peer) for peer in candidates if peer in linked))

    async def _ping(self, peer: PeerId) -> None:
        try:
            await self._services.peers.call(peer, RoundPing(b""), RoundPing, timeout_s=ANSWER_S)
        except PeerTimeout:
            now = asyncio.get_running_loop().time()
            self._services.events.emit(PeerSilent(now, peer.hex(), ANSWER_S))
        except PeerError:  # a lost link has an event of its own
            pass

    def bandwidth_bps(self) -> tuple[float | None, float | None]:
        """Return this peer's upload and download, bits per second, as measured and within its budget."""
        budget = self._settings.budget
        return self._bandwidth.known(None if budget is None else budget.rate_bps)

    def _ticket(self, own: ProgressRecord, weight: float) -> Ticket:
        settings = self._settings
        willing = (self.plan is None or self.plan.reduces) and not own.syncing
        upload_bps, download_bps = self.bandwidth_bps()
        return Ticket(
            prefix=settings.prefix,
            step=own.step,
            lineage=own.lineage,
            weight=weight,
            numel=self.numel,
            schema=self._schema,
            reduces=bool(self._services.peers.contact.addresses) and willing,
            upload_bps=upload_bps,
            download_bps=download_bps,
            codec=settings.compression,
            mean_codec=settings.mean_compression,
            samples_per_s=own.samples_per_s,
        )

    def update_plan(self, result: RoundResult, progress: Progress) -> CommunicationPlan | None:
        """Return the plan after a round that keeps this peer within its budget; None without a budget."""
        if self._policy is None or self._last is None or len(self._last.members) < 2:
            return self.plan
        now = asyncio.get_running_loop().time()
        self._policy.on_round(result.sent_bytes, result.received_bytes, progress.local_steps, now=now)
        speed = progress.samples_per_s()
        plan = self._policy.choose(self._last, progress.target_batch_size / speed) if speed else self.plan
        if plan is not None and not plan.like(self.plan):
            self._services.events.emit(BudgetChosen(now, str(plan), plan.within))
        self.plan = plan
        return plan
