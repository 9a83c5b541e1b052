"""A trainer's rounds: find the group, average, and keep within the traffic budget. Knows no torch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from colab_swarm.averaging.exchange import Sending
from colab_swarm.averaging.group import GatheringSettings, Group, Ticket
from colab_swarm.averaging.matchmaking import Matchmaker
from colab_swarm.averaging.round import RoundResult
from colab_swarm.events import BudgetChosen
from colab_swarm.net.peers import PeerId
from colab_swarm.training.catch_up import Values
from colab_swarm.training.progress import Progress, ProgressRecord
from colab_swarm.training.settings import Services, TrainingSettings
from colab_swarm.training.thrift import Choice, Thrift

KEPT_PER_ROUND = 0.98
SAYS_SOMETHING_BYTES = 1 << 18
"""A round that moved less says nothing about a line."""


class Rate:
    """What a line carried in rounds, bits per second: they are often shorter than the second that links measure by.

    A good round is believed for long, but not for ever: lines change.
    """

    def __init__(self) -> None:
        self._best_bps = 0.0

    def on_round(self, size_bytes: int, seconds: float) -> None:
        """A round moved so much."""
        self._best_bps *= KEPT_PER_ROUND
        if size_bytes >= SAYS_SOMETHING_BYTES and seconds > 0:
            self._best_bps = max(self._best_bps, 8 * size_bytes / seconds)

    def known(self, measured_bps: float | None, most_bps: float | None) -> float | None:
        """The best that was seen, by links or in rounds, as far as it may be used; None if nothing was."""
        best_bps = max(measured_bps or 0.0, self._best_bps)
        return min(best_bps, most_bps or best_bps) if best_bps else most_bps


class Rounds:
    """Takes part in a collaboration's rounds.

    Attributes:
        numel: length of what is averaged.
        choice: how this peer keeps within its budget; None without one.

    Args:
        schema: digest of what is averaged.
        expected, on_called: see `Matchmaker`.
    """

    def __init__(
        self,
        services: Services,
        settings: TrainingSettings,
        *,
        numel: int,
        schema: bytes,
        expected: Callable[[int, bytes], Awaitable[Sequence[PeerId]]],
        on_called: Callable[[Ticket, PeerId], float | None],
    ) -> None:
        self.numel = numel
        self.choice: Choice | None = None
        self._services, self._settings, self._schema = services, settings, schema
        self._expected = expected
        self._last: Group | None = None
        self._upload, self._download = Rate(), Rate()
        self._thrift: Thrift | None = None
        if settings.budget is not None:
            me, auto_steps = services.peers.id, settings.auto_steps
            self._thrift = Thrift(settings.budget, me, precision=settings.codec, auto_steps=auto_steps)
            if settings.budget.rate_bps is not None:
                services.peers.limit(settings.budget.rate_bps)
        self._matchmaker = Matchmaker(
            services.rooms,
            settings.prefix,
            expected=expected,
            on_called=on_called,
            settings=GatheringSettings(
                window_s=settings.matchmaking_s,
                slack_s=settings.matchmaking_s,
                max_window_s=settings.max_matchmaking_s,
            ),
        )

    def close(self) -> None:
        """Take part in nothing more."""
        self._matchmaker.close()

    def members_of(self, step: int) -> frozenset[PeerId]:
        """Who was in the last round, if it was that of ``step``."""
        last = self._last if self._last is not None and self._last.step == step else None
        return frozenset(member.id for member in last.members) if last else frozenset()

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
        group = await self._matchmaker.join(self._ticket(own, weight), candidates, deadline)
        formed()
        self._last = group
        if sending is not None and self.choice is not None:
            sending.precision = self.choice.precision
        result = await self._services.averager.average(group, values, sending)
        self._upload.on_round(result.sent_bytes, result.seconds["exchange"])
        self._download.on_round(result.received_bytes, result.seconds["exchange"])
        self._services.events.emit(result.event(began_at=started, now=clock()))
        return result

    def _ticket(self, own: ProgressRecord, weight: float) -> Ticket:
        peers, settings = self._services.peers, self._settings
        links, willing = peers.statistics(), self.choice is None or self.choice.reduces
        most = None if settings.budget is None else settings.budget.rate_bps
        return Ticket(
            prefix=settings.prefix,
            step=own.step,
            lineage=own.lineage,
            weight=weight,
            numel=self.numel,
            schema=self._schema,
            reduces=bool(peers.contact.addresses) and willing and not own.syncing,
            upload_bps=self._upload.known(links.upload_bps, most),
            download_bps=self._download.known(links.download_bps, most),
            codec=settings.codec,
            mean_codec=settings.mean_codec,
            samples_per_s=own.samples_per_s,
        )

    def choose(self, result: RoundResult, progress: Progress) -> Choice | None:
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
