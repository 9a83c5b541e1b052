"""One trainer's part in the swarm: progress, averaging rounds, catching up. Does not import torch.

It runs on the runtime's event loop; the optimizer drives it from the user's thread. The swarm does
not wait for a peer that catches up. While the snapshot of step s downloads, the peer follows the
rounds with weight 0 and collects their means, which it then applies in order: s, s+1, … It slows
down no round, as it sends and reduces nothing. Donors that keep failing lose their vote.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
import numpy as np

from colab_swarm.averaging.group import Group, GroupFormationSettings, RoundTerms, Ticket
from colab_swarm.averaging.matchmaking import Matchmaker
from colab_swarm.averaging.messages import UploadEncoding
from colab_swarm.averaging.round import RoundResult, contributed
from colab_swarm.averaging.standing import Standing
from colab_swarm.averaging.strategy import AdaptiveShares
from colab_swarm.errors import MismatchError, PeerError, StateError
from colab_swarm.events import Fault, Loaded, PeerLeft, StateReceived
from colab_swarm.net.peers import PeerId, short
from colab_swarm.runtime import loop_now, wait_until
from colab_swarm.tensors.chunks import Snapshot
from colab_swarm.tensors.codecs import Floats
from colab_swarm.training.catch_up import CatchUp, CaughtUp
from colab_swarm.training.election import Branch
from colab_swarm.training.part import Apply, Due, TrainingPart
from colab_swarm.training.records import ProgressRecord, progress_key
from colab_swarm.training.settings import (
    HEAVIEST,
    ROUND_TIMEOUT_S,
    LinkBandwidth,
    PeerServices,
    RoundInput,
    TrainingSettings,
    most_state_bytes,
)
from colab_swarm.training.sketch import SKETCH_STEPS, StateCheck, StateSketch
from colab_swarm.training.state import StateSharing
from colab_swarm.training.throughput import MAX_REPORT_S

logger = logging.getLogger(__name__)

_MAX_REPLAY_BYTES = 1 << 30  # for the means that a late joiner collects during the download


class Collaboration(TrainingPart):
    """A trainer's part in rounds over links; ``own`` is its first record.

    It averages vectors of ``numel`` values with the layout ``schema``. ``snapshot()`` copies the
    current training state off the event loop; it may raise `StateError`. So does ``sketch()``.
    ``loss()`` is the mean loss of the samples for the next step, or None.
    """

    def __init__(
        self,
        services: PeerServices,
        settings: TrainingSettings,
        own: ProgressRecord,
        numel: int,
        schema: bytes,
        snapshot: Callable[[], Snapshot],
        sketch: Callable[[], StateSketch],
        loss: Callable[[], float | None],
    ) -> None:
        super().__init__(services, settings, own)
        peers = services.peers
        patience_s = settings.matchmaking_timeout_s
        self._numel = numel
        self._schema = schema
        self._limit_bytes = most_state_bytes(numel)
        self._bandwidth = LinkBandwidth(peers)
        self._shares = AdaptiveShares()
        self._matchmaker = Matchmaker(
            services.router,
            settings.prefix,
            expected=self._expected,
            on_called=self._on_called,
            believed_s=self.progress.forecast.believed_s,
            stands=self.progress.election.stands,
            strategy=self._shares,
            settings=GroupFormationSettings(patience_s, patience_s, heaviest=HEAVIEST),
        )
        standing = Standing(
            peers.id,
            self.progress.election.account_of,
            peers.read_at,
            services.events,
            self.progress.forecast.longest_s,
        )
        self._matchmaker.own = self._terms
        self._matchmaker.standing = standing
        services.averager.standings[settings.prefix] = standing
        self._states = StateSharing(services.router, settings.prefix, lambda: asyncio.to_thread(snapshot))
        self._called: tuple[int, bytes] | None = None
        self._applying = False
        self._snapshot = snapshot
        self._sketch = sketch
        self._loss = loss
        self._state_check = StateCheck()
        self._deviant = False  # this peer's state is not that of most others
        self._stop_listening = peers.on_lost(self._on_lost)

    async def start(self) -> None:
        # A resumed peer has no vote until it has read the records: it must not call the others back.
        self._update(idle=not self.progress.known.own.syncing)
        await self.on_gate()
        await self._exchange()
        own = self.progress.known.own
        self._update(idle=own.idle and self.progress.election.branch().step > own.step)
        self._tasks.spawn(self._keep_exchanging())

    def _check(self) -> None:
        if differs := self.progress.election.disagreement():
            self.services.events.emit(Fault(loop_now(), "this peer's settings", differs))
            raise MismatchError(
                f"the swarm trains this model with other settings: {differs}. Use the swarm's, or pass another "
                "name=… to swarm.optimizer(…)"
            )

    async def stop(self) -> None:
        await self.settled()
        await self.services.averager.drain(self._settings.prefix)
        self.kill()
        await self._publish(ttl_s=0.5)

    def kill(self) -> None:
        self._stop_listening()
        self._tasks.cancel()
        self._matchmaker.close()
        self._states.close()

    def _on_lost(self, peer: PeerId) -> None:
        if self.progress.known.on_lost(peer, now=loop_now()):
            self.services.events.emit(PeerLeft(loop_now(), peer.hex(), "its link broke"))
            self._wake.set()

    async def _keep_exchanging(self) -> None:
        while True:
            await wait_until(loop_now() + self._period_s(), self._moved)
            self._moved.clear()
            try:
                await self._exchange()
            except PeerError as error:
                logger.info("progress not exchanged: %s", error)

    def _period_s(self) -> float:
        if self._called is not None:  # the round is forming
            return 5.0
        eta_s = self.progress.forecast.seconds_to_batch(loop_now())  # infinite: no speed is known yet
        return 1.0 if eta_s == math.inf else min(max(eta_s / 4, 0.25), MAX_REPORT_S)

    async def _exchange(self) -> None:
        await self._publish(ttl_s=4 * max(self._period_s(), 15.0))
        await self.refresh()

    async def _publish(self, *, ttl_s: float) -> None:
        own = self.progress.known.own
        if self._throughput.idle(loop_now()) and own.computes:
            self._update(idle=True)
        addresses = self.services.peers.contact.addresses  # a tunnel or a relay may have opened or closed
        up, down = self._bandwidth.known()
        self._update(addresses=addresses, reduces=bool(addresses), upload_bps=up, download_bps=down)
        if (loss := await asyncio.to_thread(self._loss)) is not None:  # it may wait for a GPU
            self._update(loss=loss)
        await self.services.dht.publish(
            progress_key(self._settings.prefix), self.progress.known.own, ttl_s=ttl_s
        )

    async def refresh(self) -> Branch:
        await self.progress.refresh(
            self.services.dht, self.services.peers, self._matchmaker.standing.suspects(loop_now())
        )
        if donors := self._state_check.judge(*self.progress.election.sketches(), now=loop_now()):
            text = f"most peers hold another than {', '.join(map(short, donors))} gave: it is loaded again"
            self.services.events.emit(Fault(loop_now(), "this peer's state", text))
            self.progress.election.distrust(donors, now=loop_now())
            self._deviant = True
            self._update(syncing=True)
        self._publish_sketch()
        self._wake.set()
        return self.progress.election.branch()

    async def _take_sketch(self) -> None:
        sketch = await asyncio.to_thread(self._sketch)
        if sketch.step % SKETCH_STEPS == 0:  # else the trainer went on
            self._state_check.on_sketch(sketch)
            self._publish_sketch()

    def _publish_sketch(self) -> None:
        if (sketch := self._state_check.published) != self.progress.known.own.sketch:
            self._update(sketch=sketch)
            self._moved.set()

    async def _state(self) -> str:
        """Return a digest for the history; with local steps no two states are equal."""
        with suppress(StateError):
            if self._settings.local_steps == 1:
                return (await asyncio.to_thread(self._snapshot)).manifest.root.hex()
        return ""

    @property
    def behind(self) -> bool:
        return self.progress.election.behind

    async def on_loaded(self) -> None:
        own = self.progress.known.own
        events = self.services.events
        if events.detailed:
            events.emit(Loaded(loop_now(), own.step, own.lineage.hex(), await self._state()))

    def _due(self) -> Due:
        own = self.progress.known.own
        if own.paused:
            return "nothing"
        if self._averaging_aside:  # one round at a time
            # The others' records still tell of the samples before it.
            return self._due_alone(
                own.samples * self.progress.forecast.samples_per_s() / (own.samples_per_s or math.inf)
            )
        if own.syncing or self.progress.election.behind:
            return "catching up"
        called = self._called == (own.step, own.lineage) and not self.progress.forecast.early_s(loop_now())
        if called or self.progress.forecast.batch_full(loop_now()):
            return "a round"
        return self._due_alone(self.progress.forecast.samples(loop_now()))

    async def _end_idle(self) -> None:
        """Look for the others' steps before an idle trainer goes on: it has no vote until then."""
        if self.progress.known.own.idle:
            with suppress(PeerError):
                await self.refresh()
            if not self.progress.election.behind:
                self._update(idle=False)

    async def _take_round(self, given: RoundInput, apply: Apply, *, aside: bool) -> RoundResult | None:
        result = None
        try:
            if (result := await self._try_round(given, aside=aside)) is not None:
                await self._settle(self._apply(given.values, result, apply, aside=aside))
            return result
        finally:
            self._applying &= result is not None

    async def _try_round(self, given: RoundInput, *, aside: bool) -> RoundResult | None:
        if not aside:
            self._throughput.wait()
        self._applying = True  # a faster member may call the next round before the last mean arrives here
        try:
            result = await self._round(self.progress.known.own, given)
            return result if any(member.weight for member in result.group.members) else None
        except PeerError as error:
            logger.info("no round for step %d: %s", self.progress.known.own.step, error)
            await self.refresh()
            return None
        finally:
            if not aside:
                self._throughput.work(loop_now())

    async def _apply(self, mean: Floats, result: RoundResult, apply: Apply, *, aside: bool) -> None:
        try:
            lineage = await asyncio.to_thread(apply, mean)
        finally:
            self._applying = False
        self._states.outdate()
        self._advance(lineage, result, aside=aside)
        step = self.progress.known.own.step
        for peer in result.samples:
            self._matchmaker.standing.earn(peer, loop_now())
        if self.services.events.detailed:
            state = await self._state()
            self.services.events.emit(result.applied(mean, step, lineage, state, now=loop_now()))
        if step % SKETCH_STEPS == 0:
            self._tasks.spawn(self._take_sketch())

    async def _round(self, own: ProgressRecord, given: RoundInput) -> RoundResult:
        began_at = loop_now()
        group = await self._find_group(own, given)
        self._called = None
        if given.weight and self.services.events.detailed:
            told = contributed(
                group, given.values, given.weight, given.samples, self._computed, now=loop_now()
            )
            self.services.events.emit(told)
        result = await self.services.averager.average(group, given.values, given.encoding, bounded=True)
        self._bandwidth.on_round(result)
        if not result.spans_lost and len(result.contributors) > 1:
            shares = [member.share for member in group.members]
            self._shares.on_round(shares, group.predicted_s, result.exchange_s)
        self.services.events.emit(result.event(began_at=began_at, now=loop_now()))
        return result

    def _terms(self, step: int, lineage: bytes) -> RoundTerms:
        settings = self._settings
        codecs = settings.compression, settings.mean_compression
        return RoundTerms(settings.prefix, step, lineage, self._numel, self._schema, *codecs)

    async def _find_group(self, own: ProgressRecord, given: RoundInput) -> Group:
        reduces = bool(self.services.peers.contact.addresses) and not own.syncing
        terms = self._terms(own.step, own.lineage)
        bandwidth = self._bandwidth.known()
        metered = self.services.peers.metered
        ticket = Ticket(terms, given.weight, reduces, *bandwidth, metered=metered, samples=given.samples)
        candidates = await self._expected(own.step, own.lineage)
        awaited = self.progress.known.waiting(own.step, own.lineage) & self.services.peers.linked()
        return await self._matchmaker.join(ticket, candidates, loop_now() + ROUND_TIMEOUT_S, awaited=awaited)

    async def _expected(self, step: int, lineage: bytes) -> list[PeerId]:
        # By their records, the last round or a call: a record may be late.
        expected = self.progress.known.participants(step, lineage) | self.progress.known.assistants.keys()
        # This peer does not follow those who are ahead: they would say that the step is done.
        records = self.progress.known.all
        others = {peer for peer, record in records.items() if record.absent or record.step > step}
        return sorted((expected | self._matchmaker.likely(step, lineage)) - others)

    def _on_called(self, terms: RoundTerms, caller: PeerId) -> float | None:
        own = self.progress.known.own
        step = terms.step
        lineage = terms.lineage
        applying = self._applying and step == own.step + 1  # its lineage is known when the update is done
        ahead = self.progress.known.all.get(caller, own).step > step  # by its record: nobody expects it here
        if own.absent or ahead or not (own.syncing or applying or (own.step, own.lineage) == (step, lineage)):
            return None
        if caller != self.services.peers.id:  # its own organizer has begun, and would follow itself forever
            self._called = (step, lineage)
            self._wake.set()
        patience_s = self._settings.matchmaking_timeout_s
        now = loop_now()
        ready_in_s = 0.0 if own.syncing else self._throughput.ready_in_s(now, patience_s=patience_s)
        early_s = 0.0 if own.syncing or applying else self.progress.forecast.early_s(now)
        return None if ready_in_s is None else max(ready_in_s, early_s)

    async def catch_up(self) -> CaughtUp | None:
        has_state = not self.progress.known.own.syncing
        self._called = None
        self._applying = False
        self._update(syncing=True, samples=0.0, idle=False)
        await self._exchange()
        self._check()
        branch = self.progress.election.branch()
        own = self.progress.known.own
        if (branch.step, branch.lineage) == (own.step, own.lineage) and not self._deviant:
            self._update(syncing=False)  # equal parameters already, or no other peer
            return None
        capacity = max(1, _MAX_REPLAY_BYTES // (4 * self._numel))
        try:
            caught_up = await CatchUp(self, capacity=capacity, has_state=has_state).run()
            self._deviant = False
            if caught_up is None:
                self._update(syncing=False)
            else:
                self._state_check.on_loaded(caught_up[0].donors)
            return caught_up
        except StateError:
            if not has_state:
                self.progress.election.trust_all()  # the next attempt tries all peers
            raise
        finally:
            self._throughput.active_at = loop_now()

    async def wait_called(self) -> None:
        while self._called is None:
            self._wake.clear()
            await self._wake.wait()

    async def follow_round(self) -> dict[tuple[int, bytes], Floats]:
        """Follow the round of the call; return its complete mean by step and lineage."""
        assert self._called is not None
        (step, lineage) = self._called
        self._called = None
        values = np.zeros(self._numel, np.float32)
        own = msgspec.structs.replace(self.progress.known.own, step=step, lineage=lineage)
        try:
            result = await self._round(own, RoundInput(values, 0.0, 0.0, UploadEncoding()))
        except PeerError as error:
            logger.info("round %d not followed: %s", step, error)
            return {}
        return {} if result.kept_local else {(step, lineage): values}

    async def adopt(self, step: int, lineage: bytes, *, syncing: bool = False) -> None:
        self._steps_alone = 0
        self._matchmaker.forget(step, lineage)
        self.progress.leap(step, lineage, syncing=syncing)
        self._moved.set()

    async def distrust(self, donors: Sequence[PeerId]) -> None:
        self.progress.election.distrust(donors, now=loop_now())

    async def download(self, donors: list[PeerId], timeout_s: float) -> Snapshot:
        """Fetch the state from the donors, or through an assistant if they are unreachable."""
        started = loop_now()
        self.services.rng.shuffle(donors)
        try:
            snapshot = await self._states.download(donors, self._limit_bytes, timeout_s)
        except StateError:
            if not self.progress.known.assistants:
                raise
            snapshot = await self._states.download(
                list(self.progress.known.assistants), self._limit_bytes, timeout_s
            )
        state = snapshot.manifest
        now = loop_now()
        names = tuple(donor.hex() for donor in snapshot.donors)
        self.services.events.emit(StateReceived(now, state.step, names, state.size_bytes, now - started))
        return snapshot
