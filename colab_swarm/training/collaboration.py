"""One trainer's part in the swarm: report progress, run averaging rounds, catch up. Does not import torch.

It runs on the runtime's event loop. The optimizer drives it from the user's thread: `report` after each micro-batch,
`average` when a round is due, `advance` when the update is applied, `catch_up` when the swarm moved on without it.

How a late joiner, or a peer that fell behind, catches up with a swarm that does not wait: while the snapshot of step s
downloads, the peer follows the rounds with weight 0 and collects their means. Then it applies the
means of the rounds s, s+1, … in order and has the swarm's parameters, however long the download
took. It sends nothing and reduces nothing meanwhile, so it cannot slow down a round. Donors that
keep failing lose their vote, and the branch of the other peers is tried: a peer that claims an
absurd step keeps no late joiner out.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import math
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

import msgspec
import numpy as np

from colab_swarm.averaging.exchange import UploadEncoding
from colab_swarm.averaging.group import Ticket
from colab_swarm.averaging.round import RoundResult
from colab_swarm.errors import PeerError, StateError
from colab_swarm.events import BatchDropped, PeerLeft, StateReceived, StepFinished
from colab_swarm.net.peers import PeerId
from colab_swarm.tensors.chunks import Snapshot
from colab_swarm.tensors.codecs import Floats
from colab_swarm.training.progress import (
    Assistants,
    Branch,
    Progress,
    ProgressRecord,
    next_lineage,
    participants_of,
    progress_key,
    read_participants,
)
from colab_swarm.training.rounds import Rounds
from colab_swarm.training.settings import PeerServices, TrainingSettings
from colab_swarm.training.state import StateSharing

logger = logging.getLogger(__name__)

CaughtUp: TypeAlias = tuple[Snapshot, list[Floats]]
"""A state to load, and the means of the rounds since, in order."""

LATE_BATCHES = 3.0
"""A trainer that is silent for the time of this many micro-batches does not join a round soon."""
IDLE_BATCHES, IDLE_REPORTS, UNKNOWN_REPORTS = 10.0, 2.0, 10.0
"""An idle trainer was silent for this many micro-batches and record periods, or periods while its speed is unknown."""
ATTEMPTS = 5
BRANCHES = 4
"""Number of branches to try: trainers that died together may each have left a step of its own."""
PAUSE_S = 1.0
PATIENCE_S = 30.0
"""Donors may fail for this long, or `ATTEMPTS` times, before others are tried."""


class ThroughputEstimator:
    """Measures the speed of one trainer from its micro-batches.

    Attributes:
        samples_per_s: moving average; 0 until it is known.
        active_at: time of the trainer's last sign of work.
    """

    def __init__(self, now: float) -> None:
        self.samples_per_s = 0.0
        self._batch_s = 0.0
        self._computing_since: float | None = None
        self.active_at = now

    def wait(self) -> None:
        """The trainer stops computing, and is ready for a round."""
        self._computing_since, self.active_at = None, math.inf

    def work(self, now: float) -> None:
        """The trainer starts computing."""
        self._computing_since = self.active_at = now

    def on_batch(self, samples: float, now: float) -> None:
        """The trainer finished a micro-batch and starts the next."""
        if self._computing_since is not None:
            took_s = max(now - self._computing_since, 1e-6)
            speed = samples / took_s
            self._batch_s = took_s if not self._batch_s else 0.7 * self._batch_s + 0.3 * took_s
            self.samples_per_s = speed if not self.samples_per_s else 0.8 * self.samples_per_s + 0.2 * speed
        self.work(now)

    def ready_in_s(self, now: float, *, patience_s: float) -> float | None:
        """Return when the micro-batch will be done; None if it is overdue by more than ``patience_s``."""
        if self._computing_since is None:
            return 0.0
        ready_in_s = self._computing_since + self._batch_s - now
        late = ready_in_s < -max(LATE_BATCHES * self._batch_s, patience_s)
        return None if late else max(0.0, ready_in_s)

    def idle(self, now: float, *, report_s: float) -> bool:
        """Return True if the trainer was silent for much longer than its own micro-batches take.

        Args:
            report_s: longest time between two progress records.
        """
        periods = IDLE_REPORTS if self._batch_s else UNKNOWN_REPORTS
        return now - self.active_at > max(IDLE_BATCHES * self._batch_s, periods * report_s)


class Due(enum.Enum):
    """The trainer's next action."""

    NOTHING = "continue with the next batch"
    LOCAL_STEP = "take a local step"
    ROUND = "a round is due"
    CATCH_UP = "the swarm moved on without this peer"


class Collaboration:
    """One trainer's part in the swarm.

    Args:
        own: this peer's first record.
        numel, schema: length of the averaged vector, and the digest of its layout.
        snapshot: copies the current training state; runs off the event loop and may raise `StateError`.
    """

    def __init__(
        self,
        services: PeerServices,
        settings: TrainingSettings,
        *,
        own: ProgressRecord,
        numel: int,
        schema: bytes,
        snapshot: Callable[[], Snapshot],
    ) -> None:
        self.services, self._settings = services, settings
        peers, target = services.peers, settings.target_batch_size
        self.progress = Progress(peers.id, own, target_batch_size=target, local=settings.local_steps != 1)
        self.assistants = Assistants(settings.prefix)
        services.router.reserve(settings.prefix)
        self.rounds = Rounds(
            services,
            settings,
            numel=numel,
            schema=schema,
            expected=self._expected,
            on_called=self._on_called,
            stands=self.progress.stands,
        )
        self._states = StateSharing(services.router, settings.prefix, lambda: asyncio.to_thread(snapshot))
        self._called: tuple[int, bytes] | None = None
        self._wake = asyncio.Event()
        self._moved = asyncio.Event()
        self._throughput = ThroughputEstimator(self._now())
        self._applying = False
        self._averaging = False
        self._steps_alone = 0  # since the last round
        self._tasks: list[asyncio.Task[None]] = []
        self._stop_listening = peers.on_lost(self._on_lost)

    # --- start and stop -----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Read the other peers' progress and publish this peer's."""
        await self.on_gate()
        await self._exchange()
        self._tasks.append(asyncio.create_task(self._heartbeat(), name="progress"))

    async def stop(self) -> None:
        """Serve the last round to its end, then leave with a record that expires at once."""
        await self.services.averager.drain(self._settings.prefix)
        self.kill()
        await self._publish(ttl_s=0.5)

    def kill(self) -> None:
        """Leave without notice; the record expires by itself."""
        self._stop_listening()
        for task in self._tasks:
            task.cancel()
        self.rounds.matchmaker.close()
        self._states.close()

    def _on_lost(self, peer: PeerId) -> None:
        self.assistants.on_lost(peer)
        if peer in self.progress.records:
            self.progress.on_lost(peer, now=self._now())
            self.services.events.emit(PeerLeft(self._now(), peer.hex(), "its link broke"))
            self._wake_if_due()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    # --- progress -----------------------------------------------------------------------------------------------

    async def _heartbeat(self) -> None:
        """Exchange progress: often when the batch is nearly full, rarely otherwise, at once after a step."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._period_s()):
                    await self._moved.wait()
            self._moved.clear()
            try:
                await self._exchange()
            except PeerError as error:
                logger.info("progress not exchanged: %s", error)

    def _period_s(self) -> float:
        eta_s = self.progress.seconds_to_batch(self._now())
        if self._called is not None:  # the round is forming
            return 5.0
        if eta_s == math.inf:  # no peer has reported a speed yet
            return 1.0
        return min(max(eta_s / 4, 0.25), self._settings.max_report_s)

    async def _exchange(self) -> None:
        await self._publish(ttl_s=4 * max(self._period_s(), 15.0))
        await self.refresh()

    async def _publish(self, *, ttl_s: float) -> None:
        own = self.progress.own
        silent = self._throughput.idle(self._now(), report_s=self._settings.max_report_s)
        if silent and not (own.absent or own.syncing):
            self._update(idle=True)
        addresses = self.services.peers.contact.addresses  # a tunnel or a relay may have opened or closed
        upload_bps, download_bps = self.rounds.bandwidth_bps()
        self._update(
            addresses=addresses, reduces=bool(addresses), upload_bps=upload_bps, download_bps=download_bps
        )
        await self.services.dht.publish(progress_key(self._settings.prefix), self.progress.own, ttl_s=ttl_s)

    async def refresh(self) -> Branch:
        """Read the peers' records now, and return the swarm's branch."""
        records, assistants = await read_participants(self.services.dht, self._settings.prefix)
        self.progress.on_records(records, linked=self.services.peers.linked(), now=self._now())
        self.assistants.on_records(assistants)
        self._wake_if_due()
        return self.progress.branch()

    def _wake_if_due(self) -> None:
        if self.progress.batch_full(self._now()) or self.progress.behind:
            self._wake.set()

    def _update(self, **changes: object) -> None:
        self.progress.own = msgspec.structs.replace(self.progress.own, **changes)
        if changes.keys() & {"syncing", "paused", "idle"}:
            self._moved.set()

    # --- called by the optimizer --------------------------------------------------------------------------------

    async def report(self, samples: float, loss: float | None, *, dropped: str | None = None) -> Due:
        """Count a micro-batch and return what to do next; ``dropped`` says why its gradient does not count."""
        if self.services.pace is not None:
            await asyncio.sleep(self.services.pace(samples))
        await self.on_gate()
        self._throughput.on_batch(samples, self._now())
        await self._end_idle()
        own = self.progress.own
        if dropped is not None:
            self.services.events.emit(BatchDropped(self._now(), dropped))
            return self._due()
        loss = own.loss if loss is None else loss
        self._update(samples=own.samples + samples, samples_per_s=self._throughput.samples_per_s, loss=loss)
        return self._due()

    def _due(self) -> Due:
        if self._averaging or self.progress.own.paused:  # with delayed updates there is one round at a time
            return Due.NOTHING
        if self.progress.own.syncing or self.progress.behind:
            return Due.CATCH_UP
        own = self.progress.own
        if self._called == (own.step, own.lineage) or self.progress.batch_full(self._now()):
            return Due.ROUND
        batches = self.progress.samples(self._now()) / self.progress.target_batch_size
        if self.progress.local_steps > 1 and batches >= self._steps_alone + 1:
            self._steps_alone += 1
            return Due.LOCAL_STEP
        return Due.NOTHING

    async def on_gate(self) -> None:
        """Publish that this peer was paused or resumed, so that no round waits for it.

        After a pause it is idle first (see `_end_idle`): two peers that resume together must not outvote a third.
        """
        paused = self.services.gate.closed
        if paused != self.progress.own.paused:
            self._update(paused=paused, idle=not paused)
            self._throughput.wait() if paused else self._throughput.work(self._now())
            self._wake.set()

    async def _end_idle(self) -> None:
        """Before an idle trainer trains again, look for steps of the others: it has no vote until it caught up."""
        if self.progress.own.idle:
            with suppress(PeerError):
                await self.refresh()
            if not self.progress.behind:
                self._update(idle=False)

    async def wait_due(self, deadline: float) -> Due:
        """Wait until an action is due, at most until ``deadline`` (loop time)."""
        await self.on_gate()
        self._throughput.wait()
        await self._end_idle()
        while (due := self._due()) is Due.NOTHING and self._now() < deadline:
            self._wake.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await self._wake.wait()
        self._throughput.work(self._now())
        return due

    async def average(self, values: Floats, weight: float, encoding: UploadEncoding) -> RoundResult | None:
        """Take part in the round of the own step; ``values`` becomes the mean. Returns None if there is no mean."""
        self._throughput.wait()
        try:
            return await self._average(values, weight, encoding)
        finally:
            self._throughput.work(self._now())

    async def _average(self, values: Floats, weight: float, encoding: UploadEncoding) -> RoundResult | None:
        self._applying = True  # a faster member may call the next round before the last mean arrives here
        stepping = False
        try:
            result = await self._round(self.progress.own, values, weight, encoding)
            stepping = any(member.weight for member in result.group.members)
            return result if stepping else None
        except PeerError as error:
            logger.info("no round for step %d: %s", self.progress.own.step, error)
            await self.refresh()
            return None
        finally:
            self._applying = stepping

    async def average_aside(
        self, values: Floats, weight: float, encoding: UploadEncoding, apply: Callable[[Floats], bytes]
    ) -> RoundResult | None:
        """Like `average`, while the trainer computes for the next step.

        Args:
            apply: takes the mean, off the event loop, and returns the new lineage.
        """
        self._averaging = True
        self._update(samples=0.0)
        try:
            result = await self._average(values, weight, encoding)
            if result is None:
                self._update(samples=self.progress.own.samples + weight)  # for the next try
            else:
                lineage = await asyncio.to_thread(apply, values)
                await self.advance(lineage, result, samples=self.progress.own.samples)
            return result
        finally:
            self._averaging = False
            self._wake.set()

    async def _round(
        self, own: ProgressRecord, values: Floats, weight: float, encoding: UploadEncoding | None = None
    ) -> RoundResult:
        result = await self.rounds.take_part(own, values, weight, encoding, formed=self._on_formed)
        plan = self.rounds.update_plan(result, self.progress)
        if self._settings.auto_steps and plan is not None:
            self._update(local_steps=plan.local_steps)
        return result

    def _on_formed(self) -> None:
        self._called = None

    async def _expected(self, step: int, lineage: bytes) -> list[PeerId]:
        """Return the peers expected by their records, the last round or a call: a record may be late."""
        expected = {*participants_of(self.progress.records, step, lineage), *self.assistants.records}
        expected |= self.rounds.likely(step, lineage) & self.services.peers.linked()
        return sorted(expected - self.progress.absent)

    async def advance(self, lineage: bytes, result: RoundResult, *, samples: float = 0.0) -> None:
        """Move to the next step after the mean is applied; ``samples`` count for it already."""
        self._applying, self._steps_alone = False, 0
        self._states.outdate()
        self.progress.advance(lineage, samples=samples)
        self._moved.set()
        step, members = self.progress.own.step, result.group.members
        self.progress.on_round((member.id for member in members), step, lineage, now=self._now())
        counted = sum(member.weight for member in members if member.id in result.contributors)
        self.services.events.emit(StepFinished(self._now(), step, counted, self.progress.own.loss))

    def _on_called(self, terms: Ticket, caller: PeerId) -> float | None:
        """Return when this peer joins an organizer's round, or None if it does not."""
        own, step, lineage = self.progress.own, terms.step, terms.lineage
        if own.absent:
            return None
        applying = self._applying and step == own.step + 1  # its lineage is known when the update is done
        if not own.syncing and not applying and (own.step, own.lineage) != (step, lineage):
            return None
        self._called = (step, lineage)
        self._wake.set()
        patience_s = self._settings.matchmaking_timeout_s
        return 0.0 if own.syncing else self._throughput.ready_in_s(self._now(), patience_s=patience_s)

    # --- catching up --------------------------------------------------------------------------------------------

    async def catch_up(self) -> CaughtUp | None:
        """Return the state of the swarm's branch, or None if this peer's own state counts.

        Raises:
            StateError: no peer on the branch could give its state, and this peer has none of its own.
        """
        has_state = not self.progress.own.syncing
        self._called, self._applying = None, False
        self._update(syncing=True, samples=0.0, idle=False)
        await self._exchange()
        branch = self.progress.branch()
        if (branch.step, branch.lineage) == (self.progress.own.step, self.progress.own.lineage):
            self._update(syncing=False)  # equal parameters already, or no other peer
            return None
        capacity = max(1, self._settings.max_replay_bytes // (4 * self.rounds.numel))
        try:
            caught_up = await CatchUp(self, capacity=capacity, has_state=has_state).run()
        except StateError:
            self.progress.trust_all()  # the next attempt tries all peers
            raise
        finally:
            self._throughput.active_at = self._now()
        if caught_up is None:
            self._update(syncing=False)
        return caught_up

    async def wait_called(self) -> None:
        """Wait for an organizer's call."""
        while self._called is None:
            self._wake.clear()
            await self._wake.wait()

    def take_call(self) -> tuple[int, bytes]:
        """Return the step and lineage of the call that `wait_called` waited for."""
        assert self._called is not None
        called, self._called = self._called, None
        return called

    async def follow_round(self, step: int, lineage: bytes) -> Floats | None:
        """Take part with weight 0 and return the mean; None if it is not complete."""
        values = np.zeros(self.rounds.numel, np.float32)
        own = msgspec.structs.replace(self.progress.own, step=step, lineage=lineage)
        try:
            result = await self._round(own, values, 0.0)
        except PeerError as error:
            logger.info("round %d not followed: %s", step, error)
            return None
        return None if result.kept_local else values

    async def adopt(self, step: int, lineage: bytes, *, syncing: bool = False) -> None:
        """Move this peer's record to a state that it has loaded, is about to load or, ``syncing``, still needs."""
        self._steps_alone = 0
        self.rounds.matchmaker.forget(step, lineage)
        self.progress.leap(step, lineage, syncing=syncing)
        self._moved.set()

    async def download(self, donors: list[PeerId]) -> Snapshot:
        """Fetch the state from the donors, or through an assistant if they are unreachable."""
        started = self._now()
        self.services.rng.shuffle(donors)
        try:
            snapshot = await self._states.download(donors)
        except StateError:
            if not self.assistants.records:
                raise
            snapshot = await self._states.download(list(self.assistants.records))
        manifest, now = snapshot.manifest, self._now()
        names = tuple(donor.hex() for donor in snapshot.donors)
        self.services.events.emit(
            StateReceived(now, manifest.step, names, manifest.size_bytes, now - started)
        )
        return snapshot


class CatchUp:
    """One attempt to get the swarm's state.

    Args:
        capacity: number of means that fit in memory.
        has_state: this peer can continue with its own state if no other peer can give a better one.
    """

    def __init__(self, collaboration: Collaboration, *, capacity: int, has_state: bool) -> None:
        self._collaboration = collaboration
        self._capacity, self._has_state = capacity, has_state
        self._means: dict[tuple[int, bytes], Floats] = {}  # by the step and lineage that they are applied to
        self._between_rounds = asyncio.Lock()
        self._failures = 0  # of one branch's donors
        self._trying_since: float | None = None
        self._outdated = b""  # root of the last snapshot that was behind the branch

    async def run(self) -> CaughtUp | None:
        """Download the state and bring it up to date.

        Raises:
            StateError: no peer on the branch could give its state in time, and this peer has none of its own.
        """
        follower = asyncio.create_task(self._follow(), name="follow rounds")
        try:
            return await self._run()
        finally:
            follower.cancel()
            await asyncio.gather(follower, return_exceptions=True)

    async def _run(self) -> CaughtUp | None:
        reasons: dict[str, None] = {}
        for attempt in range(BRANCHES * ATTEMPTS):
            branch = await self._collaboration.refresh()
            donors = sorted(branch.peers - {self._collaboration.progress.me})
            if not donors and (self._has_state or not reasons):
                return None
            if not donors:
                break
            try:
                snapshot = await self._download(donors)
                async with self._between_rounds:
                    return await self._complete(snapshot, donors)
            except StateError as error:
                reasons[str(error)] = None
                await asyncio.sleep(PAUSE_S * (attempt % ATTEMPTS))
        raise StateError(f"could not catch up with the swarm: {'; '.join(reasons)}")

    async def _download(self, donors: list[PeerId]) -> Snapshot:
        self._trying_since = self._trying_since or asyncio.get_running_loop().time()
        try:
            return await self._collaboration.download(donors)
        except StateError:
            self._on_failure(donors)
            raise

    def _on_failure(self, donors: list[PeerId]) -> None:
        now = asyncio.get_running_loop().time()
        self._failures += 1
        if self._failures >= ATTEMPTS or now - (self._trying_since or now) > PATIENCE_S:
            # A false claim, such as step 10^9, must not hide the other peers forever.
            self._collaboration.progress.distrust(donors, now=now)
            self._failures, self._trying_since = 0, None

    async def _complete(self, snapshot: Snapshot, donors: list[PeerId]) -> CaughtUp:
        """Order the means after the snapshot. Runs between two rounds, so that none is missed."""
        step, lineage = snapshot.manifest.step, snapshot.manifest.subject
        means: list[Floats] = []
        while (mean := self._means.get((step, lineage))) is not None:
            means.append(mean)
            step, lineage = step + 1, next_lineage(lineage, mean)
        branch = await self._collaboration.refresh()
        missed = branch.step > step or any(followed > step for followed, _ in self._means)
        if missed or (branch.step == step and branch.lineage != lineage):
            if snapshot.manifest.root == self._outdated:  # again: an assistant's, as its donors are lost
                self._on_failure(donors)
            self._outdated = snapshot.manifest.root
            raise StateError("the swarm moved on during the download")
        await self._collaboration.adopt(step, lineage)
        return snapshot, means

    async def _follow(self) -> None:
        while True:
            await self._collaboration.wait_called()
            async with self._between_rounds:
                step, lineage = self._collaboration.take_call()
                mean = await self._collaboration.follow_round(step, lineage)
            if mean is not None:
                self._means[step, lineage] = mean
            while len(self._means) > self._capacity:
                del self._means[min(self._means)]
