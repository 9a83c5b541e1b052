"""A trainer's steps: micro-batches within its share on the user's thread, and a round when the share is used up.

The *share* is this peer's part of the batch. A micro-batch within the share involves no other thread. A step with a
round waits for other threads twice. First the trainer reports that it is ready, and waits until the event loop returns,
because a group has formed. Then the trainer contributes, and a pool thread takes the step with the mean.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Iterable
from contextlib import aclosing
from functools import partial
from typing import Any

import torch

from colab_swarm.averaging.result import RoundResult
from colab_swarm.errors import MismatchError, StateError
from colab_swarm.events import BatchDropped, Fault, Notice, StepFinished
from colab_swarm.markup import count
from colab_swarm.net.peers import PeerId, remember
from colab_swarm.runtime import Runner, on_loop, uninterrupted
from colab_swarm.tensors.chunks import Snapshot
from colab_swarm.training.gradients import Gradients
from colab_swarm.training.names import differing_kinds
from colab_swarm.training.records import Mean, StepTaken
from colab_swarm.training.replica import Replica
from colab_swarm.training.rounds import CaughtUp, Ready, RoundOutcome, Rounds
from colab_swarm.training.settings import Due, PeerServices, RoundInput, StepOffer
from colab_swarm.training.state import kinds_at

logger = logging.getLogger(__name__)

_LOOK_S = 10.0  # how often a waiting trainer checks whether this peer is to leave
_END_S = 60.0  # how long an interrupted round is awaited
_REMEMBERED_PEERS = 1024
# After `_MANY_DROPPED` gradients in a row that are not finite, the user is told the likely causes. After that, only one
# of `_FEW_LINES` such gradients gets a line.
_MANY_DROPPED = 20
_FEW_LINES = 100
_LIKELY_CAUSES = (
    ". Likely causes: a learning rate that is too high, NaN in the data, a division by zero or log(0) in the loss, "
    "float16 without a GradScaler"
)


class Trainer:
    """Takes local steps, takes part in rounds and loads the swarm's state, with a ``replica`` of the model.

    Only one thread at a time, the user's thread, calls a trainer. This thread waits while coroutines of this class run
    on the event loop, and while `_apply` takes a step in the pool and uses ``replica`` and ``gathered`` there; but with
    delayed updates it computes on. ``gathered`` has the gradients since the last round. ``over()`` is True if this peer
    is to leave and must not wait any longer.

    Attributes:
        due: the action of the last call in addition to counting.
    """

    def __init__(
        self,
        runtime: Runner,
        services: PeerServices,
        replica: Replica,
        gathered: Gradients,
        rounds: Rounds,
        over: Callable[[], bool],
    ) -> None:
        self._runtime = runtime
        self._services = services
        self._replica = replica
        self._gathered = gathered
        self._rounds = rounds
        self._over = over
        self.due = Due.NOTHING
        self._local_steps = 0  # since the last round
        self._loaded_step = replica.step  # step of the last state that others gave, or of the beginning
        self._common: dict[PeerId, int] = {}  # last step that each peer took together with this one
        self._told_in_row = 0  # how many gradients in a row were dropped when the user was last told
        self._told_of_weights = False  # whether the user was told of a round without weight
        # A round that runs while the trainer computes, and its contribution.
        self._flight: tuple[asyncio.Task[RoundResult | None], RoundInput] | None = None
        self._averaging: asyncio.Task[Any] | None = None  # the last round for which the trainer waited

    @property
    def in_flight(self) -> bool:
        """True if a round runs beside the trainer, or has ended but `land` has not taken its result yet."""
        return self._flight is not None

    async def stop(self) -> None:
        """End the rounds; a step that has begun is finished."""
        flight = self._flight
        self._flight = None
        if flight is not None:
            task, _ = flight
            task.cancel()
            await asyncio.wait([task])
        await self.averaged()

    # What the user calls.

    def count(self, samples: float, *, landed: RoundResult | None) -> RoundResult | None:
        """Count the micro-batch that was added to the sum, and then take the action that is due."""
        rounds = self._rounds
        self.due = Due.NOTHING
        if self._services.pace is not None:
            self._runtime.call(asyncio.sleep(self._services.pace(samples)))
        kept = samples - self._taken_out()
        if kept > 0:
            rounds.count(kept, self._runtime.time())
        if self._replica.rule.local:
            self._step_alone()
        result = None
        if self._is_due():
            result = self._turn()
            if self._replica.rule.local and result is None:
                self._step_alone()  # the first grant comes after the first micro-batch
        if landed is not None and self.due is not Due.ROUND:
            self.due = Due.LANDING
        return result or landed

    def wait_step(self, timeout_s: float) -> RoundResult | None:
        """Wait until the swarm takes a step, and contribute: see `SwarmOptimizer.wait_step`."""
        deadline = self._runtime.time() + timeout_s
        landed = self.land(wait=True, timeout_s=timeout_s)
        self._replica.refresh()
        if landed is not None or self.in_flight:
            return landed
        self.recover()
        result = self._turn(deadline, idle=True)
        result = result or self.land(wait=True)
        self._replica.refresh()
        return result

    def _is_due(self) -> bool:
        rounds = self._rounds
        # After a gradient that was not finite, this peer may have no samples to contribute.
        used_up = rounds.share.counted > 0 and rounds.share.used_up
        return used_up or rounds.behind or rounds.view.own.syncing or rounds.parted

    def _turn(self, deadline: float = math.inf, *, idle: bool = False) -> RoundResult | None:
        """Wait and take steps with the swarm until there is more to compute, or until the ``deadline``."""
        self._rounds.until = deadline
        result = None
        while True:
            if self._replica.rule.delayed and self._flight is not None:
                result = self.land(wait=True) or result
                self.due = Due.LANDING
            ready = self._next(deadline, idle=idle)
            taken, over = self._act(ready, deadline, idle=idle)
            result = taken or result
            if over or self._may_return(ready, result, deadline, idle=idle):
                return result

    def _act(self, ready: Ready, deadline: float, *, idle: bool) -> tuple[RoundResult | None, bool]:
        """Take the action ``ready``; return the result of a round, and True if the turn ends with this action."""
        if ready is Ready.CATCH_UP:
            self.due = Due.CATCH_UP
            return None, not self._try_synchronize() or idle
        if ready is Ready.FOLLOW:
            self._follow()
            return None, idle
        if ready is not Ready.CONTRIBUTE:
            return None, False
        self.due = Due.ROUND
        if self._replica.rule.delayed and not idle:
            uninterrupted(self._take_off)
            return None, True
        taken = self._contribute()
        is_in_vain = taken is None and not self._rounds.behind
        return taken, is_in_vain and (not idle or self._runtime.time() >= deadline)

    def _may_return(self, ready: Ready, result: RoundResult | None, deadline: float, *, idle: bool) -> bool:
        if ready is Ready.NOTHING and not self._over() and self._runtime.time() < deadline:
            return False
        if idle:
            return result is not None or ready is Ready.NOTHING
        return ready is Ready.NOTHING or not self._rounds.share.used_up

    def _next(self, deadline: float, *, idle: bool) -> Ready:
        """Return the next action; wait until it is clear."""
        rounds = self._rounds
        if rounds.behind or rounds.view.own.syncing:
            return Ready.CATCH_UP
        if rounds.missed():
            return Ready.FOLLOW
        if self._replica.rule.delayed and rounds.share.granted and not idle:
            self._settle()
            # The group that has just formed may have granted more, and samples that were not finite are replaced.
            return Ready.CONTRIBUTE if rounds.share.used_up else Ready.COMPUTE
        self._settle()
        offer = uninterrupted(self._gathered.offer)
        until = min(deadline, self._runtime.time() + _LOOK_S)
        return self._runtime.call(rounds.ready(offer, until, idle=idle))

    def _taken_out(self) -> float:
        """Tell the user of gradients that were not finite, and return their samples."""
        gathered = self._gathered
        dropped = gathered.dropped
        gathered.dropped = 0.0
        if dropped:
            self._tell_of_dropped(dropped, gathered.dropped_in_row)
        return dropped

    def _settle(self) -> None:
        """Check all gradients, the newest, too, and no longer count gradients that were not finite."""
        uninterrupted(self._gathered.read_checks)
        share = self._rounds.share
        share.counted = max(0.0, share.counted - self._taken_out())

    def _tell_of_dropped(self, dropped: float, in_row: int) -> None:
        """Tell the user that gradients were not finite; after many in a row, give the likely causes once."""
        if in_row < self._told_in_row:
            self._told_in_row = 0
        text = f"a gradient of {dropped:g} samples was not finite (NaN or Inf)"
        if in_row >= _MANY_DROPPED:
            text = (
                f"{in_row} batches in a row had gradients that were not finite (NaN or Inf), and none counts"
            )
        is_first_of_many = in_row >= _MANY_DROPPED > self._told_in_row
        told = in_row < _MANY_DROPPED or is_first_of_many or in_row >= self._told_in_row + _FEW_LINES
        if told:
            self._told_in_row = in_row
        if is_first_of_many:
            text += _LIKELY_CAUSES
            # a plain loop in a script has no view that shows events
            logger.warning("%s", text)
        self._services.events.emit(BatchDropped(self._runtime.time(), text, told))

    def _step_alone(self) -> None:
        """Take a local step if it is due: step k of n is due when k / n of the share is counted."""
        if not self._is_local_step_due():
            return
        self._settle()
        if self._is_local_step_due():
            self._local_steps += 1
            self.due = Due.LOCAL_STEP
            uninterrupted(self._gathered.step)

    def _is_local_step_due(self) -> bool:
        share = self._rounds.share
        steps = self._rounds.settings.communication.local_steps
        return share.granted > 0 and share.counted * steps >= (self._local_steps + 1) * share.granted

    # A round.

    def _contribute(self) -> RoundResult | None:
        contribution = uninterrupted(self._gathered.contribution)
        return self._runtime.call(self._average(contribution))

    async def _average(self, contribution: RoundInput, *, aside: bool = False) -> RoundResult | None:
        """Contribute, and take a step with each mean that follows; with ``aside``, the trainer computes on meanwhile.

        Returns None if there was no round, or if a device had no memory for it. An interrupt does not stop a round that
        has begun, because the parameters and this peer's record must agree.
        """
        work = asyncio.create_task(self._averaged(contribution, aside=aside), name="average")
        if not aside:
            self._averaging = work
        try:
            return await asyncio.shield(work)
        except torch.OutOfMemoryError as error:
            # If no vector was on a device, the memory is missing in the user's own loop.
            if not await asyncio.to_thread(self._gathered.placement.leave_devices, error):
                raise
            text = f"a GPU's memory ended in a round: {self._gathered.placement.where} from now on"
            self._services.events.emit(Notice(self._runtime.time(), text))
            return None

    async def _averaged(self, contribution: RoundInput, *, aside: bool) -> RoundResult | None:
        result = None
        async with aclosing(self._rounds.contribute(contribution)) as outcomes:
            async for outcome in outcomes:
                try:
                    taken = await asyncio.to_thread(self._apply, contribution, outcome, aside=aside)
                except BaseException:
                    self._rounds.share.counted += contribution.samples
                    raise
                await self._on_applied(outcome, taken)
                if outcome.over:
                    result = outcome.result
        self._tell_of_weights(contribution, over=result is not None)
        return result

    def _apply(self, contribution: RoundInput, outcome: RoundOutcome, *, aside: bool) -> StepTaken:
        """Take a step with a mean."""
        with self._replica.lock:  # a checkpoint must contain both the step and its error feedback, or neither
            self._replica.apply(outcome.mean)
            if outcome.counted:
                self._gathered.on_delivered(contribution)
            taken = self._replica.digests.of_step(self._replica.step, self._replica.lineage)
        if outcome.over and not aside:
            self._gathered.forget()
            self._local_steps = 0
        return taken

    async def _on_applied(self, outcome: RoundOutcome, taken: StepTaken) -> None:
        samples = outcome.result.samples
        await self._rounds.on_applied(outcome, taken)
        own = self._rounds.view.own
        for peer in samples:
            remember(self._common, peer, own.step, _REMEMBERED_PEERS)
        event = StepFinished(self._runtime.time(), own.step, sum(samples.values()), own.loss)
        self._services.events.emit(event)

    def _tell_of_weights(self, contribution: RoundInput, *, over: bool) -> None:
        """Tell the user that a round without any weight trained nothing; only once until the next step."""
        if over:
            self._told_of_weights = False
        if over or contribution.weight or not contribution.samples or self._told_of_weights:
            return
        self._told_of_weights = True
        text = (
            f"a round trained nothing: this peer's {contribution.samples:g} samples have the weight 0, and no mean "
            f"of others came. The weight counts {self._rounds.settings.weight_unit}; are all labels masked (-100), "
            "as by a wrong template?"
        )
        logger.warning("%s", text)
        self._services.events.emit(Notice(self._runtime.time(), text, logged=True))

    async def averaged(self) -> None:
        """Wait until an interrupted round has ended, and its step, if begun, is taken and recorded."""
        if self._averaging is not None:
            await asyncio.wait([self._averaging], timeout=_END_S)

    def _take_off(self) -> None:
        """Begin a round that runs beside the trainer; the trainer goes on with a new sum."""
        offer = self._gathered.offer()
        contribution = self._gathered.contribution()
        if self._replica.rule.local:
            self._replica.depart()
        self._flight = self._runtime.call(self._begin(offer, contribution)), contribution
        self._gathered.forget()
        self._local_steps = 0
        self._replica.refresh()

    async def _begin(self, offer: StepOffer, contribution: RoundInput) -> asyncio.Task[RoundResult | None]:
        self._rounds.depart()
        return asyncio.create_task(self._fly(offer, contribution), name="delayed update")

    async def _fly(self, offer: StepOffer, contribution: RoundInput) -> RoundResult | None:
        ready = await self._rounds.ready(offer, final=True)
        if ready is not Ready.CONTRIBUTE:
            return None
        return await self._average(contribution, aside=True)

    def land(self, *, wait: bool = False, timeout_s: float | None = None) -> RoundResult | None:
        """Return the result of the round beside the trainer if it has ended; ``wait`` for that up to ``timeout_s``."""
        if self._flight is None:
            return None
        task, contribution = self._flight
        if wait:
            self._runtime.call(asyncio.wait([task], timeout=timeout_s))
        if not task.done():
            return None
        self._flight = None
        try:
            result = task.result()
        except BaseException:
            self._return(contribution)
            raise
        if result is None:
            self._return(contribution)
        elif self._replica.rule.local:
            self._replica.land()
        return result

    def _return(self, contribution: RoundInput) -> None:
        """Take back a contribution for which there was no round."""
        self._gathered.on_returned(contribution)
        self._rounds.share.returned()

    # The others' steps and their state.

    def _follow(self) -> None:
        """Take the steps that others took without this peer, and drop its gradients, which belong to an older step."""
        means = self._rounds.missed()

        def follow() -> None:
            self._tell_of_missed(len(means))
            taken = []
            for mean in means:
                with self._replica.lock:
                    self._replica.apply(mean)
                    taken.append(self._replica.digests.of_step(self._replica.step, self._replica.lineage))
                event = StepFinished(self._runtime.time(), self._replica.step, mean.samples, mean.loss)
                self._services.events.emit(event)
            self._gathered.forget()
            self._local_steps = 0
            self._rounds.share.counted = 0.0
            self._runtime.call(self._rounds.on_followed(taken))

        uninterrupted(follow)

    def _tell_of_missed(self, steps: int) -> None:
        samples = self._gathered.samples
        if samples:
            text = f"the others took {count(steps, 'step')} without this peer: its {samples:g} samples came too late"
            self._services.events.emit(BatchDropped(self._runtime.time(), text))

    def _try_synchronize(self) -> bool:
        try:
            self.synchronize()
        except StateError as error:
            logger.warning("this peer is behind, and will try again: %s", error)
            self._services.events.emit(Fault(self._runtime.time(), "catching up", str(error)))
            return False
        return True

    def synchronize(self, *, tries: int = 1) -> None:
        """Load the swarm's state, if this peer's own state does not count; raises `StateError` if loading fails."""
        while (caught_up := self._wait_caught_up()) is not None:
            tries -= 1
            try:
                return uninterrupted(partial(self._catch_up, *caught_up))
            except StateError:  # try again with other donors; if there are none, the model is another one
                if not (tries and self._rounds.view.branch().peers):
                    raise

    def _wait_caught_up(self) -> CaughtUp | None:
        view = self._rounds.view
        try:
            return self._runtime.call(self._rounds.take_state(has_state=not view.own.syncing))
        except MismatchError as error:
            if "model: " not in str(error):
                raise
            donors = sorted(view.branch().peers - {view.me})
            kinds = self._runtime.call(kinds_at(self._services.peers, view.prefix, donors))
            differs = differing_kinds(self._replica.kinds, kinds)
            if not (kinds and differs):
                raise
            raise MismatchError(f"{error}. Other tensors: {differs}") from error

    def _catch_up(self, snapshot: Snapshot, means: Iterable[Mean]) -> None:
        lost = ""
        if not self._rounds.view.own.syncing:
            since = max(self._common.get(donor, self._loaded_step) for donor in snapshot.donors)
            steps = count(max(0, self._replica.step - since), "step")
            lost = (
                f"{steps} that it took without the others and {self._gathered.samples:g} samples are dropped"
            )
        try:
            self._replica.load_snapshot(snapshot)
            self._replica.follow(means)
            self._gathered.forget()
            self._local_steps = 0
            self._loaded_step = self._replica.step
            self._common = {}
            self._rounds.share.counted = 0.0
            loaded = partial(
                self._rounds.on_loaded, self._replica.step, self._replica.lineage, snapshot.donors
            )
            self._runtime.call(on_loop(loaded))
        except StateError:
            self._runtime.call(self._rounds.distrust(snapshot.donors))
            raise
        if lost:
            text = f"this peer was behind: it goes on at step {self._replica.step}; {lost}"
            self._services.events.emit(Notice(self._runtime.time(), text))

    def recover(self) -> None:
        """Correct this peer's record if it differs from the replica; then this peer catches up.

        Before that, wait for a round that an interrupt left running, because its step changes the model.
        """
        if self._averaging is not None and not self._averaging.done():
            self._runtime.call(asyncio.wait([self._averaging]))
        own = self._rounds.view.own
        if self._flight is None and (own.step, own.lineage) != (self._replica.step, self._replica.lineage):
            self.adopt(syncing=True)

    def adopt(self, *, syncing: bool = False) -> None:
        """Set this peer's record to the replica's step and lineage; ``syncing``: it still needs the swarm's state."""
        adopt = partial(self._rounds.adopt, self._replica.step, self._replica.lineage, syncing=syncing)
        self._runtime.call(on_loop(adopt))
