"""Rounds over links: the trainers report to an organizer, average, and give each other the state. No torch.

A trainer is a member of each group of its swarm, even while it evaluates or downloads the state. It keeps the means of
the rounds in which it does not contribute, and applies them later, in the order of the steps. So a member is not left
behind. Only if the kept means would take more than `_MAX_REPLAY_BYTES`, it downloads the state instead.

A peer *stands at* an organizer while it has an open stream to it.
"""

import asyncio
import dataclasses
import logging
import math
import threading
from collections.abc import AsyncGenerator, Collection, Sequence
from functools import partial

import numpy as np
from msgspec.structs import replace

from colab_swarm.averaging.forming import FormationSettings, holders_of
from colab_swarm.averaging.group import Group, RoundTerms, SharePlan, Ticket
from colab_swarm.averaging.rendezvous import Rendezvous
from colab_swarm.averaging.result import GroupResult
from colab_swarm.averaging.strategy import AdaptiveShares
from colab_swarm.errors import MismatchError, PeerError, StateError
from colab_swarm.events import Fault, Notice, PeerLeft, StateReceived, Waited
from colab_swarm.markup import count
from colab_swarm.net.peers import Contact, PeerId
from colab_swarm.runtime import loop_now, wait_until
from colab_swarm.tensors.chunks import CHUNK_TIMEOUT_S, Snapshot
from colab_swarm.tensors.vector import HostVector
from colab_swarm.training.records import Mean, ProgressRecord, StepTaken, progress_key
from colab_swarm.training.rounds import CaughtUp, Ready, RoundOutcome, Rounds, TrainedModel, other_settings
from colab_swarm.training.settings import (
    LinkBandwidth,
    PeerServices,
    RoundInput,
    StepOffer,
    TrainingSettings,
    most_state_bytes,
)
from colab_swarm.training.state import StateSharing

logger = logging.getLogger(__name__)

_MAX_REPLAY_BYTES = 1 << 30  # memory for means that this peer has not applied yet
_LEAST_PERIOD_S = 2.0  # between two readings of the records
_MOST_PERIOD_S = 30.0
_PERIOD_PER_PEER_S = 1.0  # so the traffic for reading does not grow with the swarm
_LEAST_TTL_S = 60.0
_GONE_S = 0.5  # life of the last record of a peer that leaves
_TELL_S = 2.0  # how long this peer waits for others before it tells the user
_ATTEMPTS = 20  # maximum number of attempts to download a state
_PATIENT_ATTEMPTS = 10  # the first attempts, which accept only a state for which all later means are known
_STAND_S = 3.0
_PAUSE_S = 1.0  # between two attempts
_SLOW_S = 5.0  # if a download takes longer, the user is told


class LinkRounds(Rounds):
    """Rounds among the peers that are online, over links."""

    def __init__(
        self, services: PeerServices, settings: TrainingSettings, own: ProgressRecord, model: TrainedModel
    ) -> None:
        super().__init__(services, settings, own, model)
        self._bandwidth = LinkBandwidth(services.peers)
        self.shares = AdaptiveShares()  # plans which member reduces how much; an experiment may replace it
        codecs = settings.communication.compression, settings.communication.mean_compression
        terms = RoundTerms(settings.prefix, 0, b"", model.numel, model.schema, *codecs)
        formation = FormationSettings(
            terms, self.view.round_samples, self._planned, agree=self.comparison.agree
        )
        self._rendezvous = Rendezvous(services.router, settings.prefix, formation, self)
        self.share = self._rendezvous.share
        self._group: Group | None = None  # the group that took this peer's ticket, until it is averaged
        self._means: dict[
            tuple[int, bytes], Mean
        ] = {}  # means of followed rounds, by the step and lineage to which they are applied
        self._following: set[asyncio.Task[None]] = set()
        self._needs_state = False
        self._loaded_at = -math.inf  # when this peer last downloaded a state
        self._told_of_unreachable = False
        self._steps = False  # True once the trainer has begun; until then this peer only follows
        self._thread = 0  # the thread in which the trainer computes
        self._blocked = False  # True while this thread waits in the step of another collaboration
        self._waits = False  # True while this thread waits in this collaboration's step
        services.on_wait.append(self._on_wait)
        self._news = asyncio.Event()
        self._states = StateSharing(
            services.router, settings.prefix, partial(asyncio.to_thread, model.snapshot)
        )
        self._loop = asyncio.get_running_loop()
        self._stop_listening = services.peers.on_lost(self._on_lost)

    def _planned(self, tickets: Sequence[Ticket]) -> SharePlan:
        # A method, because the formation's settings are made before an experiment sets `shares`.
        return self.shares(tickets)

    @property
    def line_bps(self) -> tuple[float | None, float | None]:
        return self._bandwidth.known()

    # The records.

    async def start(self) -> None:
        await self._exchange()
        self._tasks.spawn(self._keep_exchanging())

    async def stop(self) -> None:
        await self._rendezvous.leave()
        try:
            await self.services.averager.drain(self.settings.prefix)
        finally:
            self.kill()
        await self._publish(ttl_s=_GONE_S)

    def kill(self) -> None:
        self._stop_listening()
        if self._on_wait in self.services.on_wait:
            self.services.on_wait.remove(self._on_wait)
        self._tasks.cancel()
        for task in self._following:
            task.cancel()
        self._rendezvous.close()
        self._states.close()
        # The averager holds the last round's vector, which may be on a GPU.
        self.services.averager.forget(self.settings.prefix)

    def _on_lost(self, peer: PeerId) -> None:
        if self.view.on_lost(peer, swarm_now=self.services.peers.time()):
            self.services.events.emit(PeerLeft(loop_now(), peer.hex(), "its link broke"))
            self._news.set()

    def _period_s(self) -> float:
        return min(max(_PERIOD_PER_PEER_S * len(self.view.all), _LEAST_PERIOD_S), _MOST_PERIOD_S)

    async def _keep_exchanging(self) -> None:
        urgent = self.view.urgent
        while True:
            await wait_until(loop_now() + self._period_s() * self.services.rng.uniform(0.8, 1.0), urgent)
            urgent.clear()
            try:
                await self._exchange()
            except PeerError as error:
                logger.info("records not exchanged: %s", error)
            except Exception as error:  # caught broadly: this peer must go on publishing its record
                logger.exception("records not exchanged")
                self.services.events.emit(Fault.of(loop_now(), "progress", error))

    async def _exchange(self) -> None:
        """Publish this peer's record, and read the others'; raises `PeerError`."""
        await self._publish(ttl_s=max(4 * self._period_s(), _LEAST_TTL_S))
        await self.refresh()

    async def _publish(self, *, ttl_s: float) -> None:
        view = self.view
        peers = self.services.peers
        up, down = self._bandwidth.known()
        share = self.share
        organizer = self._rendezvous.organizer
        view.update(
            addresses=peers.contact.addresses,  # a tunnel or a relay may have opened or closed
            upload_bps=up,
            download_bps=down,
            samples=share.counted,
            samples_per_s=share.samples / share.batch_s if share.batch_s else 0.0,
            organizer=organizer.id if organizer else b"",
            told_at=peers.time(),
        )
        loss = await asyncio.to_thread(self.model.loss)  # it may wait for a GPU
        if loss is not None:
            view.update(loss=loss)
        await self.services.dht.publish(progress_key(view.prefix), view.own, ttl_s=ttl_s)

    async def refresh(self) -> None:
        await self.view.refresh(self.services.dht, self.services.peers)
        if self.view.behind and not self.view.own.syncing:
            self._needs_state = True
        self._rendezvous.settings = self._formation_settings()
        self._news.set()
        if self.view.unreachable and not self._told_of_unreachable:
            self._told_of_unreachable = True
            text = (
                f"none of {count(self.view.unreachable, 'other trainer')} can be dialled, nor can this peer, and no "
                "assistant is there: it trains alone. swarm.reduce() at a peer that can be dialled brings "
                "them together"
            )
            logger.warning("%s", text)
            self.services.events.emit(Notice(loop_now(), text, logged=True))

    def _formation_settings(self) -> FormationSettings:
        settings = dataclasses.replace(self._rendezvous.settings, least=self.view.min_peers)
        if self._rendezvous.formation is not None:
            self._rendezvous.formation.settings = settings
        return settings

    def check(self) -> None:
        differs = self.view.disagreement()
        if differs:
            self.services.events.emit(Fault(loop_now(), "this peer's settings", differs))
            raise MismatchError(other_settings(differs))
        self.comparison.check()

    # What the rendezvous asks and tells.

    async def organizers(self) -> Sequence[Contact]:
        try:
            await self.refresh()
        except PeerError as error:
            logger.info("records not read: %s", error)
        return self.view.organizers(self.services.peers.contact)

    def live(self) -> Collection[PeerId]:
        return self.view.live(self.services.peers.linked())

    def helpers(self) -> Collection[PeerId]:
        return self.view.assistants.keys() | self.view.other_organizers

    def on_granted(self) -> None:
        self._news.set()

    def on_group(self, group: Group, *, contributes: bool) -> None:
        index = group.index_of(self.services.peers.id)
        assert index is not None
        for member, seconds in group.late:
            peer = group.members[member].id
            if peer != self.services.peers.id:
                self.services.events.emit(Waited(loop_now(), peer.hex(), "its part of the batch", seconds))
        if group.members[index].weight and not contributes:
            # The others wait for a contribution that no longer exists, so this peer cannot follow with weight 0.
            self._needs_state = True
        elif contributes:
            self.comparison.on_group(group, self.view.own.rates)
            self._group = group
        else:
            task = self._tasks.spawn(self._follow(group))
            self._following.add(task)
            task.add_done_callback(self._following.discard)
            task.add_done_callback(lambda _: self._news.set())
        self._news.set()

    # A step.

    def count(self, samples: float, now: float) -> None:
        super().count(samples, now)
        self._thread = threading.get_ident()
        if self.share.nearly:
            self._loop.call_soon_threadsafe(self._rendezvous.tell)

    def on_gate(self) -> None:
        super().on_gate()
        self._set_away(self.services.gate.closed or self._blocked)

    def _set_away(self, away: bool) -> None:
        if away != self.share.away:
            self.share.away = away
            self.share.work(loop_now())
            self._rendezvous.tell()
            self._news.set()

    def _block_others(self, blocked: bool) -> None:
        """Tell this process's other optimizers that the trainer's thread begins or stops to wait in this step.

        A thread that waits in a step computes nothing for the other optimizers, so their swarms must not wait for it.
        """
        if blocked == self._waits:
            return
        self._waits = blocked
        for on_wait in self.services.on_wait:
            if on_wait != self._on_wait:
                on_wait(self._thread, blocked)

    def _on_wait(self, thread: int, blocked: bool) -> None:
        if thread == self._thread:
            self._blocked = blocked
            self.on_gate()

    @property
    def behind(self) -> bool:
        return self._needs_state or self.comparison.deviant

    async def ready(
        self, offer: StepOffer, deadline: float = math.inf, *, idle: bool = False, final: bool = False
    ) -> Ready:
        if self._group is not None:
            return Ready.CONTRIBUTE
        self._begin()
        share = self.share
        peers = self.services.peers
        terms = self._rendezvous.settings.terms
        up, down = self._bandwidth.known()
        own = self.view.own
        rates, sketch = self.comparison.shown(offer.rates, own.step)
        self.view.update(rates=offer.rates, changed=offer.changed)
        if offer.loss is not None:
            # Right after the step there is no loss to read, and the next record should still have this loss.
            self.view.update(loss=offer.loss)
        share.ticket = Ticket(
            replace(terms, step=own.step, lineage=own.lineage),
            offer.weight,
            bool(peers.contact.addresses),
            up,
            down,
            metered=peers.metered,
            unused=offer.unused,
            loss=offer.loss,
            samples=share.report(loop_now()).counted,
            rates=rates,
            sketch=sketch,
            changed=offer.changed,
        )
        share.final = final
        share.away = idle or self._blocked
        self._rendezvous.tell()
        if not final:
            self._block_others(True)
        tell_at = loop_now() + _TELL_S
        ready = None
        try:
            while (ready := self._look(stays=idle or final)) is None and loop_now() < deadline:
                self.check()
                now = loop_now()
                if (
                    now >= tell_at
                    and self._rendezvous.group is None
                    and len(self.view.training) < self.view.min_peers
                ):
                    self.tell_begin(self.view.min_peers, self.view.training)
                self._news.clear()
                await wait_until(min(deadline, now + _TELL_S), self._news)
        finally:
            share.away = self.services.gate.closed or self._blocked
            if ready is not Ready.CONTRIBUTE:
                self._block_others(False)
                share.ticket = None
                share.final = False
                share.returned()
                share.work(loop_now())
                self._rendezvous.tell()
        return ready or Ready.NOTHING

    def _begin(self) -> None:
        """Become a member of the swarm, at the trainer's first step."""
        own = self.view.own
        if not self._steps and not own.syncing:
            self._steps = True
            self._hold(own.step, own.lineage)
        self._rendezvous.start()

    def depart(self) -> None:
        if self._group is None:
            super().depart()

    def _look(self, *, stays: bool) -> Ready | None:
        """Return the trainer's next action, or None while the trainer waits."""
        if self._group is not None:
            return Ready.CONTRIBUTE
        missed = self.missed()
        if self._rendezvous.first_step > self.view.own.step and not (missed or self._following):
            # The others took this step while this peer stood at no organizer.
            self._needs_state = True
        if self.behind:
            return Ready.CATCH_UP
        if missed:
            return Ready.FOLLOW
        if not stays and not self.share.used_up and not self._following:
            return Ready.COMPUTE
        return None

    async def contribute(self, contribution: RoundInput) -> AsyncGenerator[RoundOutcome, None]:
        group = self._group
        self._group = None
        assert group is not None
        self.share.averages = True
        self._rendezvous.tell()
        try:
            result = await self._average(group, contribution)
            if any(member.weight for member in result.group.members):
                # The mean has replaced the contribution.
                mean = Mean(contribution.vector, result.digest, group.unused, group.loss)
                yield RoundOutcome(mean, result)
        except PeerError as error:
            logger.info("no round for step %d: %s", group.terms.step, error)
            self._needs_state = True
            self.share.counted += contribution.samples  # these count again if this peer keeps its state
        finally:
            # By now the step with the mean is taken, too.
            self.share.averages = False
            self._rendezvous.tell()
            self._block_others(False)

    async def _average(self, group: Group, contribution: RoundInput) -> GroupResult:
        began_at = loop_now()
        result = await self.services.averager.average(
            group, contribution.vector, contribution.fine, bounded=True
        )
        self._bandwidth.on_round(result)
        self.comparison.moved_bytes += result.sent_bytes + result.received_bytes
        if not result.spans_lost and len(result.contributors) > 1:
            shares = [member.share for member in group.members]
            self.shares.on_round(shares, group.predicted_s, result.exchange_s)
        self.services.events.emit(result.event(began_at=began_at, now=loop_now()))
        return result

    async def on_applied(self, outcome: RoundOutcome, taken: StepTaken) -> None:
        await super().on_applied(outcome, taken)
        self.comparison.on_sketch(taken.sketch)
        self._hold(self.view.own.step, self.view.own.lineage, beside=self.share.computes)

    def _hold(self, step: int, lineage: bytes, *, beside: bool = False) -> None:
        """Note and report that this peer holds another state; ``beside`` is True if the trainer computes meanwhile."""
        if self._steps:
            self.share.step = step
            self.share.lineage = lineage
            if not beside:
                self.share.work(loop_now())
        self._states.outdate()
        self._means = {key: mean for key, mean in self._means.items() if key[0] >= step}
        self._rendezvous.tell()

    # The others' steps.

    async def _follow(self, group: Group) -> None:
        """Take part in a round with weight 0, and keep its mean."""
        vector = HostVector(np.zeros(self.model.numel, np.float32))
        try:
            result = await self._average(group, RoundInput(vector, 0.0, 0.0))
        except PeerError as error:
            logger.info("round %d not followed: %s", group.terms.step, error)
            self._needs_state = True
            return
        if not any(member.weight for member in group.members):
            return
        if result.kept_local:
            self._needs_state = True
            return
        samples = sum(result.samples.values())
        self._means[group.terms.key] = Mean(vector, result.digest, group.unused, group.loss, samples=samples)
        while len(self._means) > max(1, _MAX_REPLAY_BYTES // (4 * self.model.numel)):
            del self._means[min(self._means)]
        own = self.view.own
        if not own.syncing and not self._chain(own.step, own.lineage):
            self._needs_state = True

    def _chain(self, step: int, lineage: bytes) -> list[Mean]:
        """Return the kept means that follow one another from this state on, in order."""
        means = []
        while (mean := self._means.get((step, lineage))) is not None:
            means.append(mean)
            step += 1
            lineage = mean.lineage_after(lineage)
        return means

    @property
    def parted(self) -> bool:
        return bool(self._following or self.missed())

    def missed(self) -> list[Mean]:
        return self._chain(self.view.own.step, self.view.own.lineage)

    async def on_followed(self, taken: Sequence[StepTaken]) -> None:
        await super().on_followed(taken)
        self._hold(self.view.own.step, self.view.own.lineage)

    # The state.

    async def take_state(self, *, has_state: bool) -> CaughtUp | None:
        self._rendezvous.start()
        self.share.step = -1
        self._rendezvous.tell()
        reasons: dict[str, None] = {}
        # Right after a download, the donors may still be at the same step.
        await asyncio.sleep(max(0.0, self._loaded_at + _PAUSE_S - loop_now()))
        for attempt in range(_ATTEMPTS):
            await self._exchange()
            self.check()
            organizer = self.view.organizers(self.services.peers.contact)[0]
            self._rendezvous.move(organizer)
            donors = self._donors()
            branch = self.view.branch()
            own = self.view.own
            # Before the first group, equal first parameters are the swarm's state. After the first group, the other
            # peers' records may be older than their states.
            is_there = not has_state and (own.step, own.lineage) == (branch.step, branch.lineage)
            if not donors or (is_there and not await self._rendezvous.has_begun(organizer)):
                if has_state or not reasons:
                    self._needs_state = False
                    self.view.update(syncing=False)
                    self._hold(self.view.own.step, self.view.own.lineage)
                    return None
                break
            await self._stand(organizer.id)
            # For an older state this peer would lack a mean: that of the round that ran when this peer came.
            least_step = self._rendezvous.first_step if attempt < _PATIENT_ATTEMPTS else 0
            try:
                snapshot = await self._download(donors, least_step)
                self._loaded_at = loop_now()
                return self._complete(snapshot)
            except StateError as error:
                reasons[str(error)] = None
            await asyncio.sleep(_PAUSE_S * min(attempt, 5))
        raise StateError(f"could not catch up with the swarm: {'; '.join(reasons)}")

    async def _stand(self, organizer: PeerId) -> None:
        """Wait until this peer stands at the organizer, for at most `_STAND_S`."""
        deadline = loop_now() + _STAND_S
        while self._rendezvous.first_step < 0 and organizer != self.services.peers.id:
            if loop_now() >= deadline:
                return
            self._news.clear()
            await wait_until(deadline, self._news)

    def _donors(self) -> list[PeerId]:
        """Return the other peers that hold the state of the branch."""
        now = loop_now()
        group = self._rendezvous.group
        branch = self.view.branch()
        donors = set(branch.peers)
        if not self.view.own.syncing:
            # A peer at the branch's organizer may itself have come from another branch, like this peer. So this peer
            # first asks the peers that have shown the state.
            donors = set(branch.holders - {self.services.peers.id}) or donors
        if group is not None and not self.view.behind:
            # Members that have left cannot give the state.
            donors = holders_of(group) & (self.view.others.keys() | set(self.services.peers.linked()))
        donors.discard(self.services.peers.id)
        trusted = {peer for peer in donors if not self.view.distrusts(peer, now)}
        return sorted(trusted or donors)

    async def _download(self, donors: list[PeerId], least_step: int) -> Snapshot:
        """Fetch the state from the donors, or through an assistant if the donors do not give it."""
        began_at = loop_now()
        limit_bytes = most_state_bytes(self.model.numel)
        self.services.rng.shuffle(donors)
        text = f"waiting for the state of the swarm: {count(len(donors), 'donor')} slow or frozen"
        download = partial(self._states.download, least_step=least_step)
        telling = self._loop.call_later(_SLOW_S, lambda: self.services.events.emit(Notice(loop_now(), text)))
        try:
            snapshot = await download(donors, limit_bytes, CHUNK_TIMEOUT_S)
        except StateError:
            assistants = list(self.view.assistants)
            if not assistants:
                raise
            snapshot = await download(assistants, limit_bytes, CHUNK_TIMEOUT_S)
        finally:
            telling.cancel()
        state = snapshot.manifest
        names = tuple(donor.hex() for donor in snapshot.donors)
        took_s = loop_now() - began_at
        self.services.events.emit(StateReceived(loop_now(), state.step, names, state.size_bytes, took_s))
        return snapshot

    def _complete(self, snapshot: Snapshot) -> CaughtUp:
        """Return a state with the means of the rounds since then; raises `StateError` if a mean is missing."""
        step = snapshot.manifest.step
        means = self._chain(step, snapshot.manifest.subject)
        reached = step + len(means)
        if any(followed >= reached for followed, _ in self._means):
            raise StateError("the swarm moved on during the download")
        return snapshot, means

    def on_loaded(self, step: int, lineage: bytes, donors: tuple[PeerId, ...]) -> None:
        super().on_loaded(step, lineage, donors)
        self._hold(step, lineage)
        self._needs_state = False

    def adopt(self, step: int, lineage: bytes, *, syncing: bool = False) -> None:
        super().adopt(step, lineage, syncing=syncing)
        if syncing:
            self._needs_state = True
        else:
            self._rendezvous.begin_again()
            self._hold(step, lineage)
