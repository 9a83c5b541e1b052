"""The conversation of one trainer with its swarm: progress, rounds, catching up. Knows no torch.

Runs on the runtime's loop and is driven by the optimizer on the user's thread: `report` after each micro-batch,
`average` when a round is due, `advance` when the update is applied, `catch_up` when the swarm went on without us.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable
from contextlib import suppress

import msgspec
import numpy as np

from colab_swarm.averaging.exchange import Sending
from colab_swarm.averaging.group import Ticket
from colab_swarm.averaging.round import RoundResult
from colab_swarm.errors import PeerError, StateError
from colab_swarm.events import BatchDropped, PeerLeft, StateReceived, StepFinished
from colab_swarm.net.peers import PeerId
from colab_swarm.training.catch_up import CatchUp, CaughtUp, Values
from colab_swarm.training.progress import (
    Assistants,
    Branch,
    Progress,
    ProgressRecord,
    progress_key,
    read_assistants,
    read_progress,
)
from colab_swarm.training.rounds import Rounds
from colab_swarm.training.settings import CommunicationPlan, PeerServices, TrainingSettings
from colab_swarm.training.state import Snapshot, StateSharing

IDLE_BATCHES = 3.0

"""A trainer that has been silent for the time of so many micro-batches does not come to a round soon."""


class ThroughputEstimator:
    """The rhythm of one trainer's micro-batches.

    Attributes:
        samples_per_s: moving average; 0 until it is known.
    """

    def __init__(self) -> None:
        self.samples_per_s = 0.0
        self._batch_s = 0.0
        self._at_work_since: float | None = None

    def wait(self) -> None:
        """It computes nothing now: whoever calls finds it ready."""
        self._at_work_since = None

    def work(self, now: float) -> None:
        """It computes from now on."""
        self._at_work_since = now

    def on_batch(self, samples: float, now: float) -> None:
        """It finished a micro-batch and begins the next."""
        if self._at_work_since is not None:
            took_s = max(now - self._at_work_since, 1e-6)
            speed = samples / took_s
            self._batch_s = took_s if not self._batch_s else 0.7 * self._batch_s + 0.3 * took_s
            self.samples_per_s = speed if not self.samples_per_s else 0.8 * self.samples_per_s + 0.2 * speed
        self._at_work_since = now

    def ready_in_s(self, now: float, *, patience_s: float) -> float | None:
        """In how many seconds its micro-batch will be done; None if it has been silent too long, at least
        ``patience_s``."""
        if self._at_work_since is None:
            return 0.0
        ready_in_s = self._at_work_since + self._batch_s - now
        idle = ready_in_s < -max(IDLE_BATCHES * self._batch_s, patience_s)
        return None if idle else max(0.0, ready_in_s)


logger = logging.getLogger(__name__)


class Due(enum.Enum):
    """What the trainer should do now."""

    NOTHING = "go on with the next batch"
    LOCAL_STEP = "take a step of your own"
    ROUND = "a round is due"
    CATCH_UP = "the swarm went on without this peer"


class Collaboration:
    """One trainer's part in the swarm."""

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
        """``snapshot()`` copies the current training state; it is run off the loop and may raise `StateError`."""
        self.services = services
        self._settings = settings
        peers = services.peers
        self.progress = Progress(
            peers.id, own, target_batch_size=settings.target_batch_size, local=settings.local_steps != 1
        )
        self.assistants = Assistants(settings.prefix)
        services.rooms.make_room(settings.prefix)
        self._rounds = Rounds(
            services,
            settings,
            numel=numel,
            schema=schema,
            expected=self._expected,
            on_called=self._on_called,
            stands=self.progress.stands,
        )
        self._states = StateSharing(services.rooms, settings.prefix, lambda: asyncio.to_thread(snapshot))
        self._called: tuple[int, bytes] | None = None
        self._wake = asyncio.Event()
        self._moved = asyncio.Event()
        self._tempo = ThroughputEstimator()
        self._applying = False
        self._averaging = False
        self._steps_alone = 0  # since the last round
        self._tasks: list[asyncio.Task[None]] = []
        self._stop_listening = peers.on_lost(self._on_lost)

    # --- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Look who is there and tell them about this peer."""
        await self.heed_gate()
        await self._exchange()
        self._tasks.append(asyncio.create_task(self._heartbeat(), name="progress"))

    async def stop(self) -> None:
        """Serve the last round to its end, stop taking part and tell the others, by a record that expires at once."""
        await self.services.averager.drain(self._settings.prefix)
        self.kill()
        await self._publish(ttl_s=0.5)

    def kill(self) -> None:
        """Stop taking part without a word; the record expires by itself."""
        self._stop_listening()
        for task in self._tasks:
            task.cancel()
        self._rounds.close()
        self._states.close()

    def _on_lost(self, peer: PeerId) -> None:
        self.assistants.on_lost(peer)
        if peer in self.progress.records:
            self.progress.on_lost(peer, now=self._now())
            self.services.events.emit(PeerLeft(self._now(), peer.hex(), "its link broke"))
            self._poke()

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
        if self._called is not None:  # the round is forming: nothing to watch for
            return 5.0
        if eta_s == float("inf"):  # nobody has told a speed yet
            return 1.0
        return min(max(eta_s / 4, 0.25), self._settings.max_report_s)

    async def _exchange(self) -> None:
        await self._publish(ttl_s=4 * max(self._period_s(), 15.0))
        await self.refresh()

    async def _publish(self, *, ttl_s: float) -> None:
        peers, key = self.services.peers, progress_key(self._settings.prefix)
        addresses = peers.contact.addresses  # a tunnel or a relay may have come or gone
        upload_bps, download_bps = self._rounds.line_bps()
        self._tell(
            addresses=addresses, reduces=bool(addresses), upload_bps=upload_bps, download_bps=download_bps
        )
        await self.services.dht.store(key, self.progress.own, subkey=peers.id, ttl_s=ttl_s, signed=True)

    async def refresh(self) -> Branch:
        """Read the peers' records now."""
        services, prefix = self.services, self._settings.prefix
        records, assistants = await asyncio.gather(
            read_progress(services.dht, services.peers, prefix),
            read_assistants(services.dht, services.peers, prefix),
        )
        self.progress.on_records(records, linked=services.peers.linked(), now=self._now())
        self.assistants.on_records(assistants)
        self._poke()
        return self.progress.branch()

    def _poke(self) -> None:
        if self.progress.batch_full(self._now()) or self.progress.behind:
            self._wake.set()

    def _tell(self, **changes: object) -> None:
        self.progress.own = msgspec.structs.replace(self.progress.own, **changes)
        if changes.keys() & {"syncing", "paused"}:
            self._moved.set()

    # --- the trainer's verbs ------------------------------------------------------------------------------------

    async def report(self, samples: float, loss: float | None, *, dropped: str | None = None) -> Due:
        """Count a micro-batch that the trainer has accumulated, or ``dropped`` for a reason; what to do next."""
        if self.services.pace is not None:
            await asyncio.sleep(self.services.pace(samples))
        await self.heed_gate()
        own = self.progress.own
        self._tempo.on_batch(samples, self._now())
        if dropped is not None:
            self.services.events.emit(BatchDropped(self._now(), dropped))
            return self._due()
        loss = own.loss if loss is None else loss
        self._tell(samples=own.samples + samples, samples_per_s=self._tempo.samples_per_s, loss=loss)
        return self._due()

    def _due(self) -> Due:
        if self._averaging or self.progress.own.paused:  # delayed updates: one round at a time
            return Due.NOTHING
        if self.progress.own.syncing or self.progress.behind:
            return Due.CATCH_UP
        own = self.progress.own
        if self._called == (own.step, own.lineage) or self.progress.batch_full(self._now()):
            return Due.ROUND
        batches = self.progress.samples(self._now()) / self.progress.target_batch_size
        alone = self.progress.local_steps > 1 and batches >= self._steps_alone + 1
        return Due.LOCAL_STEP if alone else Due.NOTHING

    async def heed_gate(self) -> None:
        """This peer was paused, or goes on: tell the others, so that no round waits for it."""
        paused = self.services.gate.closed
        if paused != self.progress.own.paused:
            self._tell(paused=paused)
            self._tempo.wait() if paused else self._tempo.work(self._now())
            self._wake.set()

    async def wait_due(self, deadline: float) -> Due:
        """Wait until there is something to do, at most until ``deadline`` (loop time)."""
        await self.heed_gate()
        self._tempo.wait()
        while (due := self._due()) is Due.NOTHING and self._now() < deadline:
            self._wake.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await self._wake.wait()
        self._tempo.work(self._now())
        return due

    @property
    def choice(self) -> CommunicationPlan | None:
        """How this peer keeps within its traffic budget; None without one, or before its first round."""
        return self._rounds.choice

    def on_local_step(self) -> None:
        """The trainer took a step of its own."""
        self._steps_alone += 1

    async def average(self, values: Values, weight: float, sending: Sending) -> RoundResult | None:
        """Take part in the round of the own step; ``values`` becomes the mean. None: no mean came of it."""
        self._tempo.wait()
        try:
            return await self._average(values, weight, sending)
        finally:
            self._tempo.work(self._now())

    async def average_aside(
        self, values: Values, weight: float, sending: Sending, apply: Callable[[Values], bytes]
    ) -> RoundResult | None:
        """The same while the trainer computes on for the next step; the mean goes to ``apply``, off the loop.

        Args:
            apply: takes the mean and returns the new lineage.
        """
        self._averaging = True
        self._tell(samples=0.0)
        try:
            result = await self._average(values, weight, sending)
            if result is None:
                self._tell(samples=self.progress.own.samples + weight)  # for the next try
            else:
                lineage = await asyncio.to_thread(apply, values)
                self.advance(lineage, result, samples=self.progress.own.samples)
            return result
        finally:
            self._averaging = False
            self._wake.set()

    async def _average(self, values: Values, weight: float, sending: Sending) -> RoundResult | None:
        self._applying = True  # a faster member may call the next round before our last mean is here
        stepping = False
        try:
            result = await self._round(self.progress.own, values, weight, sending)
            stepping = any(member.weight for member in result.group.members)
            return result if stepping else None
        except PeerError as error:
            logger.info("no round for step %d: %s", self.progress.own.step, error)
            await self.refresh()
            return None
        finally:
            self._applying = stepping

    async def _round(
        self, own: ProgressRecord, values: Values, weight: float, sending: Sending | None = None
    ) -> RoundResult:
        result = await self._rounds.take_part(own, values, weight, sending, formed=self._on_formed)
        choice = self._rounds.choose(result, self.progress)
        if self._settings.auto_steps and choice is not None:
            self.progress.own = msgspec.structs.replace(self.progress.own, local_steps=choice.local_steps)
        return result

    def _on_formed(self) -> None:
        self._called = None

    async def _expected(self, step: int, lineage: bytes) -> list[PeerId]:
        """By the records, and who was there a step before or has called: a record may be late."""
        expected = {*self.progress.participants(step, lineage), *self.assistants.records}
        expected |= self._rounds.likely(step, lineage) & self.services.peers.linked()
        return sorted(expected - self.progress.paused)

    def advance(self, lineage: bytes, result: RoundResult, *, samples: float = 0.0) -> None:
        """The mean is applied: the own step is one higher, with so many ``samples`` for the next already."""
        self._applying, self._steps_alone = False, 0
        self._states.outdate()
        self.progress.advance(lineage, samples=samples)
        self._moved.set()
        step, members = self.progress.own.step, result.group.members
        self.progress.on_round((member.id for member in members), step, lineage, now=self._now())
        counted = sum(member.weight for member in members if member.id in result.contributors)
        self.services.events.emit(StepFinished(self._now(), step, counted, self.progress.own.loss))

    # --- being called -------------------------------------------------------------------------------------------

    def _on_called(self, terms: Ticket, caller: PeerId) -> float | None:
        """An organizer opens a round: in how many seconds this peer will be there, or None if it will not."""
        own, now, step, lineage = self.progress.own, self._now(), terms.step, terms.lineage
        if own.paused:
            return None
        applying = self._applying and step == own.step + 1  # its lineage is known when the update is done
        if not own.syncing and not applying and (own.step, own.lineage) != (step, lineage):
            return None
        self._called = (step, lineage)
        self._wake.set()
        return (
            0.0
            if own.syncing
            else self._tempo.ready_in_s(now, patience_s=self._settings.matchmaking_timeout_s)
        )

    # --- catching up --------------------------------------------------------------------------------------------

    async def catch_up(self) -> CaughtUp:
        """Get level with the swarm's branch; nobody there means that this peer is the origin.

        Raises:
            StateError: there is a branch, but nobody on it could give its state, and this peer has none to go on with.
        """
        level = not self.progress.own.syncing
        self._called, self._applying = None, False
        self._tell(syncing=True, samples=0.0)
        await self._exchange()
        branch = self.progress.branch()
        if (branch.step, branch.lineage) == (self.progress.own.step, self.progress.own.lineage):
            self._tell(syncing=False)  # the same parameters already, or nobody else
            return CaughtUp(None)
        room = max(1, self._settings.max_replay_bytes // (4 * self._rounds.numel))
        try:
            caught_up = await CatchUp(self, room=room, level=level).run()
        except StateError:
            self.progress.trust_all()  # whoever tries again tries everybody
            raise
        if caught_up.snapshot is None:
            self._tell(syncing=False)
        return caught_up

    async def wait_called(self) -> None:
        """Wait until an organizer has called and nobody took the call."""
        while self._called is None:
            self._wake.clear()
            await self._wake.wait()

    def take_call(self) -> tuple[int, bytes]:
        """The step and lineage of the call that `wait_called` waited for."""
        assert self._called is not None
        called, self._called = self._called, None
        return called

    async def follow_round(self, step: int, lineage: bytes) -> Values | None:
        """Take part with weight 0, for the mean alone; None if it is not complete."""
        values = np.zeros(self._rounds.numel, np.float32)
        own = msgspec.structs.replace(self.progress.own, step=step, lineage=lineage)
        try:
            result = await self._round(own, values, 0.0)
        except PeerError as error:
            logger.info("round %d not followed: %s", step, error)
            return None
        return None if result.kept_local else values

    def level_with(self, step: int, lineage: bytes, *, syncing: bool = False) -> None:
        """The state of ``step`` is here or about to be loaded: this peer trains or, ``syncing``, will catch up."""
        self._steps_alone = 0
        self._rounds.forget(step, lineage)
        self.progress.leap(step, lineage, syncing=syncing)
        self._moved.set()

    def donors(self, branch: Branch) -> list[PeerId]:
        """Who can give the branch's state."""
        return sorted(branch.peers - {self.services.peers.id})

    def distrust(self, donors: list[PeerId]) -> None:
        """They could not give the state of the step that they claim."""
        self.progress.distrust(donors, now=self._now())

    async def download(self, donors: list[PeerId]) -> Snapshot:
        """Fetch the state from the donors, or through an assistant if they are out of reach; emits `StateReceived`."""
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
