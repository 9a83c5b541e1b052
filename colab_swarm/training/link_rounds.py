"""Rounds over links: the trainers meet, average, and give each other the state. Does not import torch.

The swarm does not wait for a peer that catches up. While the snapshot of step s downloads, the peer
follows the rounds with weight 0 and collects their means, which it then applies in order: s, s+1, …
It slows down no round, as it sends and reduces nothing. Donors that keep failing lose their vote.
"""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Sequence
from functools import partial

import msgspec
import numpy as np

from colab_swarm.averaging.result import GroupResult, contributed
from colab_swarm.errors import MismatchError, PeerError, StateError
from colab_swarm.events import Fault, PeerLeft, StateReceived
from colab_swarm.net.peers import PeerId
from colab_swarm.runtime import loop_now
from colab_swarm.tensors.chunks import Snapshot
from colab_swarm.tensors.vector import HostVector
from colab_swarm.training.catch_up import CatchUp
from colab_swarm.training.meetings import Meetings
from colab_swarm.training.record_exchange import RecordExchange
from colab_swarm.training.records import Mean, ProgressRecord, StepTaken
from colab_swarm.training.rounds import CaughtUp, RoundOutcome, Rounds, TrainedModel, other_settings
from colab_swarm.training.settings import (
    PeerServices,
    RoundInput,
    TrainingSettings,
    most_state_bytes,
)
from colab_swarm.training.state import StateSharing

logger = logging.getLogger(__name__)

_ANSWER_S = 2.0  # of a donor, and what it takes to copy and hash its state
_SNAPSHOT_BYTES_PER_S = 5e8
_MAX_REPLAY_BYTES = 1 << 30  # for the means that a late joiner collects during the download


class LinkRounds(Rounds):
    """Rounds among the peers that are online, over links."""

    def __init__(
        self, services: PeerServices, settings: TrainingSettings, own: ProgressRecord, model: TrainedModel
    ) -> None:
        super().__init__(services, settings, own, model)
        peers = services.peers
        progress = self.progress
        self._meetings = Meetings(
            services, settings, progress, self.throughput, numel=model.numel, schema=model.schema
        )
        self.wait_called = self._meetings.wait_called
        self._records = RecordExchange(
            services, progress, model, self.throughput, self._meetings, self.comparison
        )
        self._states = StateSharing(
            services.router,
            settings.prefix,
            partial(asyncio.to_thread, model.snapshot),
        )
        # What the last state took until it was here.
        self._download_s = 0.0
        self._stop_listening = peers.on_lost(self._on_lost)

    @property
    def line_bps(self) -> tuple[float | None, float | None]:
        return self._meetings.bandwidth.known()

    async def start(self) -> None:
        known = self.progress.known
        # A resumed peer has no vote until it has read the records: it must not call the others back.
        known.update(idle=not known.own.syncing)
        await self._records.exchange()
        own = known.own
        known.update(idle=own.idle and self.progress.election.branch().step > own.step)
        self._tasks.spawn(self._records.keep_exchanging())

    async def stop(self) -> None:
        try:
            await self.services.averager.drain(self.settings.prefix)
        finally:
            self.kill()
        await self._records.withdraw()

    def kill(self) -> None:
        self._stop_listening()
        self._tasks.cancel()
        self._meetings.close()
        self._states.close()
        # Its vector may lie on a GPU.
        self.services.averager.forget(self.settings.prefix)

    def _on_lost(self, peer: PeerId) -> None:
        if self.progress.known.on_lost(peer, now=loop_now()):
            self.services.events.emit(PeerLeft(loop_now(), peer.hex(), "its link broke"))
            self.progress.known.news.set()

    async def refresh(self) -> None:
        await self._records.refresh()

    def check(self) -> None:
        differs = self.progress.election.disagreement()
        if differs:
            self.services.events.emit(Fault(loop_now(), "this peer's settings", differs))
            raise MismatchError(other_settings(differs))
        self.comparison.check()

    @property
    def behind(self) -> bool:
        return self.progress.election.behind

    def samples(self, now: float, *, aside: bool) -> float:
        if not aside:
            return self.progress.forecast.samples(now)
        # The others' records still count the samples before the round.
        own = self.progress.known.own
        return own.samples * self.progress.forecast.samples_per_s() / (own.samples_per_s or math.inf)

    def round_due(self, now: float, *, waiting: bool) -> bool:
        known = self.progress.known
        forecast = self.progress.forecast
        called = self._meetings.called == (known.own.step, known.own.lineage)
        if called and not forecast.early_s(now):
            return True
        return forecast.batch_full(now, self.services.peers.time())

    async def contribute(self, contribution: RoundInput) -> AsyncGenerator[RoundOutcome, None]:
        self._meetings.in_a_round = True
        try:
            result = await self._try_average(contribution)
            if result is not None:
                group = result.group
                mean = Mean(contribution.vector, result.digest, group.unused, group.loss)
                yield RoundOutcome(mean, result)
        finally:
            self._meetings.in_a_round = False

    async def _try_average(self, contribution: RoundInput) -> GroupResult | None:
        own = self.progress.known.own
        began_at = loop_now()
        try:
            result = await self._average(own, contribution)
        except PeerError as error:
            logger.info("no round for step %d: %s", own.step, error)
            await self.refresh()
            return None
        finally:
            self.progress.forecast.last_round_s = loop_now() - began_at
        contributes = any(member.weight for member in result.group.members)
        return result if contributes else None

    async def on_applied(self, outcome: RoundOutcome, taken: StepTaken) -> None:
        result = outcome.result
        assert isinstance(result, GroupResult)
        self._meetings.in_a_round = False
        self._states.outdate()
        for peer in result.samples:
            self._meetings.standing.earn(peer, loop_now())
        own = self.progress.known.own
        events = self.services.events
        if events.detailed:
            digest = await self.state_digest()
            mean = outcome.mean.vector.read(0, self.model.numel)
            events.emit(result.applied(mean, own.step, own.lineage, digest, now=loop_now()))
        self.comparison.on_sketch(taken.sketch)

    async def _average(self, own: ProgressRecord, contribution: RoundInput) -> GroupResult:
        """Take part in the round of a record's step and lineage; raises `PeerError` if there is none."""
        began_at = loop_now()
        vector = contribution.vector
        events = self.services.events
        group = await self._meetings.find_group(own, contribution)
        self._meetings.called = None
        if contribution.weight and events.detailed:
            values = vector.read(0, vector.numel)
            weight = contribution.weight
            samples = contribution.samples
            event = contributed(group, values, weight, samples, self.computed, now=loop_now())
            events.emit(event)
        result = await self.services.averager.average(group, vector, contribution.fine, bounded=True)
        self._meetings.bandwidth.on_round(result)
        self.comparison.moved_bytes += result.sent_bytes + result.received_bytes
        if not result.spans_lost and len(result.contributors) > 1:
            shares = [member.share for member in group.members]
            self._meetings.shares.on_round(shares, group.predicted_s, result.exchange_s)
        events.emit(result.event(began_at=began_at, now=loop_now()))
        return result

    async def take_state(self, *, has_state: bool) -> CaughtUp | None:
        known = self.progress.known
        self._meetings.called = None
        await self._records.exchange()
        self.check()
        branch = self.progress.election.branch()
        own = known.own
        if (branch.step, branch.lineage) == (own.step, own.lineage) and not self.comparison.deviant:
            return None  # equal parameters already, or no other peer
        capacity = max(1, _MAX_REPLAY_BYTES // (4 * self.model.numel))
        try:
            caught_up = await CatchUp(self, capacity=capacity, has_state=has_state).run()
        except StateError:
            if not has_state:
                self.progress.election.trust_all()  # the next attempt tries all peers
            raise
        if caught_up is None:
            self.comparison.deviant = False
        return caught_up

    def on_loaded(self, donors: tuple[PeerId, ...]) -> None:
        self.comparison.on_loaded(donors)

    async def follow_round(self) -> dict[tuple[int, bytes], Mean]:
        """Follow the round of the call; return its complete mean by step and lineage."""
        called = self._meetings.called
        assert called is not None
        step, lineage = called
        self._meetings.called = None
        vector = HostVector(np.zeros(self.model.numel, np.float32))
        own = msgspec.structs.replace(self.progress.known.own, step=step, lineage=lineage)
        try:
            result = await self._average(own, RoundInput(vector, 0.0, 0.0))
        except PeerError as error:
            logger.info("round %d not followed: %s", step, error)
            return {}
        if result.kept_local:
            return {}
        return {(step, lineage): Mean(vector, result.digest, result.group.unused, result.group.loss)}

    def adopt(self, step: int, lineage: bytes, *, syncing: bool = False) -> None:
        self._meetings.forget(step, lineage)
        super().adopt(step, lineage, syncing=syncing)

    async def distrust(self, donors: Sequence[PeerId]) -> None:
        await super().distrust(donors)
        wasted_s = dict.fromkeys(donors, self._download_s)
        awaited = [self.services.peers.id, *donors]
        self._meetings.standing.settle("to give a state that loads", wasted_s, awaited, loop_now())

    def patience_s(self, donors: Sequence[PeerId]) -> float:
        """Return how long to wait for a state of these donors, where this peer could go on without it."""
        now = loop_now()
        usual_s = _ANSWER_S + most_state_bytes(self.model.numel) / _SNAPSHOT_BYTES_PER_S
        return usual_s + max(self._meetings.standing.patience_s(donor, now) for donor in donors)

    async def download(self, donors: list[PeerId], timeout_s: float) -> Snapshot:
        """Fetch the state from the donors, or through an assistant if they are unreachable."""
        began_at = loop_now()
        limit_bytes = most_state_bytes(self.model.numel)
        self.services.rng.shuffle(donors)
        try:
            snapshot = await self._states.download(donors, limit_bytes, timeout_s)
        except StateError:
            assistants = list(self.progress.known.assistants)
            if not assistants:
                raise
            snapshot = await self._states.download(assistants, limit_bytes, timeout_s)
        state = snapshot.manifest
        now = loop_now()
        self._download_s = now - began_at
        names = tuple(donor.hex() for donor in snapshot.donors)
        self.services.events.emit(StateReceived(now, state.step, names, state.size_bytes, self._download_s))
        return snapshot
