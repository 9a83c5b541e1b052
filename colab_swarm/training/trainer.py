"""A trainer's steps on the user's thread: gradients and parameters, driven by what is due in its swarm.

A step with a round crosses between threads three times: the trainer reports its micro-batch to the
event loop, it contributes there, and the pool takes the step with the mean.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from contextlib import aclosing
from functools import partial
from typing import Any

import torch

from colab_swarm.averaging.result import RoundResult
from colab_swarm.dht.service import on_loop
from colab_swarm.errors import MismatchError, StateError
from colab_swarm.events import Fault, Notice
from colab_swarm.runtime import Runner, uninterrupted
from colab_swarm.tensors.chunks import Snapshot
from colab_swarm.training.collaboration import Collaboration, Due
from colab_swarm.training.gradients import Gradients
from colab_swarm.training.names import differing_kinds
from colab_swarm.training.records import Mean, StepTaken
from colab_swarm.training.replica import Replica
from colab_swarm.training.rounds import CaughtUp, RoundOutcome
from colab_swarm.training.settings import PeerServices, RoundInput
from colab_swarm.training.state import kinds_at

logger = logging.getLogger(__name__)

LOOK_S = 10.0  # how often a waiting trainer checks whether this peer is to leave
_END_S = 60.0  # for a round that was interrupted


class Trainer:
    """Takes local steps, rounds and the swarm's state, as its ``collaboration`` says, with a ``replica`` of the model.

    One thread at a time calls it. ``gathered`` are the gradients since the last round.
    ``over()``: this peer is to leave, and waits no more.
    """

    def __init__(
        self,
        runtime: Runner,
        services: PeerServices,
        replica: Replica,
        gathered: Gradients,
        collaboration: Collaboration,
        over: Callable[[], bool],
    ) -> None:
        self._runtime = runtime
        self._services = services
        self._replica = replica
        self._gathered = gathered
        self._collaboration = collaboration
        self._over = over
        # A round that runs while the trainer computes, and its contribution.
        self._flight: tuple[asyncio.Task[RoundResult | None], RoundInput] | None = None
        self._averaging: asyncio.Task[Any] | None = None  # the last round for which the trainer waited

    @property
    def in_flight(self) -> bool:
        """True if a round runs beside the trainer, or has ended and not landed yet."""
        return self._flight is not None

    async def stop(self) -> None:
        """End the rounds; a step that has begun is taken."""
        flight = self._flight
        self._flight = None
        if flight is not None:
            task, _ = flight
            task.cancel()
            await asyncio.wait([task])
        await self.averaged()

    def wait_for_peers(self) -> bool:
        """Wait before the first step until enough peers train; return False if this one leaves."""
        collaboration = self._collaboration
        while not self._runtime.call(collaboration.wait_for_peers(self._runtime.time() + LOOK_S)):
            if self._over():
                return False
        return True

    def wait_step(self, timeout_s: float) -> RoundResult | None:
        """Wait until the swarm takes a step, and contribute: see `SwarmOptimizer.wait_step`."""
        deadline = self._runtime.time() + timeout_s
        landed = self.land(wait=True, timeout_s=timeout_s)
        self._replica.refresh()
        if landed is not None or self.in_flight:
            return landed
        self.recover()
        while True:
            until = min(deadline, self._runtime.time() + LOOK_S)
            due = self._runtime.call(self._collaboration.wait_due(until))
            result = self.act(due) or self.land(wait=True)
            self._replica.refresh()
            over = until == deadline or self._over()
            if result is not None or due is Due.CATCH_UP or (due is Due.NOTHING and over):
                return result

    def act(self, due: Due) -> RoundResult | None:
        """Do what is due; return the result of a round whose mean was applied."""
        if due in (Due.LOCAL_STEP, Due.ROUND):
            uninterrupted(self._gathered.read_checks)
            if self._gathered.dropped:
                retract = self._collaboration.retract(
                    self._gathered.dropped, due, in_row=self._gathered.dropped_in_row
                )
                due = self._runtime.call(retract)
                self._gathered.dropped = 0.0
        if due is Due.CATCH_UP:
            try:
                self.synchronize()
            except StateError as error:
                logger.warning("this peer is behind, and will try again: %s", error)
                self._services.events.emit(Fault(self._runtime.time(), "catching up", str(error)))
        elif due is Due.LOCAL_STEP:
            uninterrupted(self._gathered.step)
        elif due is Due.LANDING:
            return self.land(wait=True)
        elif due is Due.ROUND and self._replica.rule.delayed:
            self.land(wait=True)  # the last one may have ended just now
            uninterrupted(self._take_off)
        elif due is Due.ROUND:
            return self._runtime.call(self._average(uninterrupted(self._gathered.contribution)))
        return None

    async def _average(self, contribution: RoundInput, *, aside: bool = False) -> RoundResult | None:
        """Contribute, and take a step with each mean that comes of it; ``aside``: while the trainer computes on.

        Returns None if there was no round, or a device had no memory for it. An interrupt stops the round, but no
        step that has begun: parameters and record must agree.
        """
        if not aside:
            self._averaging = asyncio.current_task()
        try:
            return await self._averaged(contribution, aside=aside)
        except torch.OutOfMemoryError as error:
            # What fails in main memory too is the user's.
            if not await asyncio.to_thread(self._gathered.placement.leave_devices, error):
                raise
            text = f"a GPU's memory ended in a round: {self._gathered.placement.where} from now on"
            self._services.events.emit(Notice(self._runtime.time(), text))
            return None

    async def _averaged(self, contribution: RoundInput, *, aside: bool) -> RoundResult | None:
        result = None
        async with aclosing(self._collaboration.contribute(contribution, aside=aside)) as outcomes:
            async for outcome in outcomes:
                await _to_its_end(self._advance(contribution, outcome, aside=aside))
                if outcome.over:
                    result = outcome.result
        return result

    async def _advance(self, contribution: RoundInput, outcome: RoundOutcome, *, aside: bool) -> None:
        taken = await asyncio.to_thread(self._apply, contribution, outcome, aside=aside)
        await self._collaboration.on_applied(outcome, taken)

    def _apply(self, contribution: RoundInput, outcome: RoundOutcome, *, aside: bool) -> StepTaken:
        """Take a step with a mean."""
        with self._replica.lock:  # a checkpoint must have the step and its error feedback, or neither
            self._replica.apply(outcome.mean)
            if outcome.counted:
                self._gathered.on_delivered(contribution)
            taken = self._replica.evidence.of_step(self._replica.step, self._replica.lineage)
        if outcome.over and not aside:
            self._gathered.forget()
        return taken

    async def averaged(self) -> None:
        """Wait until an interrupted round has ended, and a step that had begun is taken and recorded."""
        if self._averaging is not None:
            await asyncio.wait([self._averaging], timeout=_END_S)

    def _take_off(self) -> None:
        """Begin a round that runs beside the trainer, which goes on with a new sum."""
        contribution = self._gathered.contribution()
        if self._replica.rule.local:
            self._replica.depart()
        self._flight = self._runtime.call(self._begin(contribution)), contribution
        self._gathered.forget()
        self._replica.refresh()

    async def _begin(self, contribution: RoundInput) -> asyncio.Task[RoundResult | None]:
        return asyncio.create_task(self._average(contribution, aside=True), name="delayed update")

    def land(self, *, wait: bool = False, timeout_s: float | None = None) -> RoundResult | None:
        """Return the result of the round beside the trainer if it has ended; ``wait`` for it at most ``timeout_s``."""
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
            self._gathered.on_returned(contribution)
            raise
        if result is None:
            self._gathered.on_returned(contribution)
        elif self._replica.rule.local:
            self._replica.land()
        return result

    def synchronize(self, *, tries: int = 1) -> None:
        """Load the swarm's state, if this peer's own does not count; raises `StateError` if that fails."""
        while (caught_up := self._wait_caught_up()) is not None:
            tries -= 1
            try:
                return uninterrupted(partial(self._catch_up, *caught_up))
            except StateError:  # the donors' fault, if there are others; else it is another model
                if not (tries and self._collaboration.progress.election.branch().peers):
                    raise

    def _wait_caught_up(self) -> CaughtUp | None:
        try:
            return self._runtime.call(self._collaboration.catch_up())
        except MismatchError as error:
            if "model: " not in str(error):
                raise
            progress = self._collaboration.progress
            donors = sorted(progress.election.branch().peers - {progress.known.me})
            kinds = self._runtime.call(kinds_at(self._services.peers, progress.prefix, donors))
            differs = differing_kinds(self._replica.kinds, kinds)
            if not (kinds and differs):
                raise
            raise MismatchError(f"{error}. Other tensors: {differs}") from error

    def _catch_up(self, snapshot: Snapshot, means: Iterable[Mean]) -> None:
        try:
            self._replica.load_snapshot(snapshot)
            self._replica.follow(means)
            self._gathered.forget()
            loaded = self._collaboration.on_loaded(self._replica.step, self._replica.lineage, snapshot.donors)
            self._runtime.call(loaded)
        except StateError:
            self._runtime.call(self._collaboration.rounds.distrust(snapshot.donors))
            raise
        finally:
            self.recover()  # `CatchUp` moved the record before the state was loaded

    def recover(self) -> None:
        """Make the record say what the replica is, if they differ: this peer catches up then."""
        own = self._collaboration.progress.known.own
        if self._flight is None and (own.step, own.lineage) != (self._replica.step, self._replica.lineage):
            self.adopt(syncing=True)

    def adopt(self, *, syncing: bool = False) -> None:
        """Move this peer's record to the replica's step and lineage; ``syncing``: it still needs the swarm's state."""
        adopt = partial(self._collaboration.adopt, self._replica.step, self._replica.lineage, syncing=syncing)
        self._runtime.call(on_loop(adopt))


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Do ``work`` to its end even if this task is cancelled; the cancellation is raised afterwards."""
    task = asyncio.create_task(work, name="apply")
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
