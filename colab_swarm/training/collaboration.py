"""One trainer's part in the swarm: what it does next, whatever carries its rounds. Does not import torch.

It runs on the runtime's event loop; the optimizer drives it from the user's thread. Each public
call is an event of the table in `colab_swarm.training.trainer_state`.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from enum import Enum

from colab_swarm.errors import PeerError
from colab_swarm.events import BatchDropped, Loaded, Notice, StepFinished
from colab_swarm.markup import count
from colab_swarm.net.peers import PeerId
from colab_swarm.runtime import loop_now, wait_until
from colab_swarm.training.records import StepTaken
from colab_swarm.training.rounds import CaughtUp, RoundOutcome, Rounds
from colab_swarm.training.settings import RoundInput
from colab_swarm.training.trainer_state import TrainerEvent, TrainerState, next_state

logger = logging.getLogger(__name__)


class Due(Enum):
    """What a trainer does next."""

    NOTHING = "nothing"
    LOCAL_STEP = "a local step"
    ROUND = "a round"
    LANDING = "waiting for the round beside it"
    CATCH_UP = "catching up"  # the swarm moved on without it


# Gradients in a row that are not finite: so many get the likely causes, and then one of so many a line.
_MANY_DROPPED = 20
_FEW_LINES = 100
_LIKELY_CAUSES = (
    ". Likely causes: a learning rate that is too high, NaN in the data, a division by zero or log(0) in the loss, "
    "float16 without a GradScaler"
)
_IN_A_ROUND = (TrainerState.AVERAGING, TrainerState.APPLYING)


class Collaboration:
    """One trainer's part in the swarm, by its ``rounds``."""

    def __init__(self, rounds: Rounds) -> None:
        self.rounds = rounds
        self.progress = rounds.progress
        self.state = TrainerState.JOINING
        self._services = rounds.services
        self._aside = False  # a round runs beside the trainer, which computes on
        self._steps_alone = 0  # since the last round
        self._private_steps = 0  # global steps that no other peer took part in, since the last that one did
        self._told_in_row = 0  # dropped batches in a row, at the last line on them
        self._told_of_weights = False  # since the last step, whether a word on rounds without weight was said
        self._dropped = ""  # what a peer that catches up loses, in words; empty if it had no state
        self._complete = False  # whether enough peers have trained at the same time, for the first step

    def _enter(self, event: TrainerEvent) -> None:
        self.state = next_state(self.state, event)

    async def start(self) -> None:
        """Enter the run; a trainer that resumes may compute at once."""
        self.on_gate()
        await self.rounds.start()
        if not self.progress.known.own.syncing:
            self._enter(TrainerEvent.JOINED)
        self.on_gate()

    async def stop(self) -> None:
        """Serve the last round to its end, then leave."""
        self._enter(TrainerEvent.LEAVES)
        await self.rounds.stop()
        self._enter(TrainerEvent.LEFT)

    def kill(self) -> None:
        """Leave without notice."""
        self._enter(TrainerEvent.LEFT)
        self.rounds.kill()

    def on_gate(self) -> None:
        """Publish that this peer was paused or resumed, so that no round waits for it."""
        paused = self._services.gate.closed
        known = self.progress.known
        if paused != known.own.paused:
            # Idle first (see `_end_idle`): two peers that resume together must not outvote a third.
            known.update(paused=paused, idle=not paused)
            known.news.set()
            if paused:
                self.rounds.throughput.wait()
            else:
                self.rounds.throughput.work(loop_now())
        if paused and self.state in (TrainerState.COMPUTING, TrainerState.WAITING):
            self._enter(TrainerEvent.PAUSED)
        elif not paused and self.state is TrainerState.PAUSED:
            self._enter(TrainerEvent.RESUMED)

    async def wait_for_peers(self, deadline: float) -> bool:
        """Wait before the first step until enough peers train, or the ``deadline`` (loop time); return if they do."""
        if self._complete or self.progress.known.own.syncing:
            return True
        self.rounds.check()
        if self.rounds.enough_peers:
            self._complete = True
            return True
        self.rounds.throughput.wait()
        try:
            await self.rounds.wait_for_peers(deadline)
        finally:  # also if the user interrupts the wait; it says nothing of the micro-batch's time
            self.rounds.throughput.active_at = loop_now()
        return False

    async def report(
        self, samples: float, *, dropped: float = 0.0, in_row: int = 1, changed: bool = False
    ) -> Due:
        """Count a micro-batch and return what to do next.

        ``dropped``: samples, of this one or counted before, whose gradient was not finite; ``in_row``: the last
        gradients of which none was. ``changed``: the parameters were changed outside a step.

        Raises `MismatchError` if most others train with other settings.
        """
        if self._services.pace is not None:
            await asyncio.sleep(self._services.pace(samples))
        self.progress.known.update(changed=changed)
        self.rounds.check()
        self.on_gate()
        self._enter(TrainerEvent.REPORTED)
        self.rounds.until = float("inf")
        self.rounds.throughput.on_batch(samples, loop_now())
        await self._end_idle()
        self._count(samples, dropped, in_row)
        return self._take_due()

    async def retract(self, dropped: float, due: Due, *, in_row: int = 1) -> Due:
        """Take back samples that were counted before ``due`` was known; return what to do now."""
        if due is Due.LOCAL_STEP:
            self._steps_alone -= 1
        self._count(0.0, dropped, in_row)
        return self._take_due()

    def _count(self, samples: float, dropped: float, in_row: int) -> None:
        if dropped:
            self._tell_of_dropped(dropped, in_row)
        known = self.progress.known
        throughput = self.rounds.throughput
        if not known.own.batch_s:
            # The others count its micro-batches from now on.
            known.urgent.set()
        known.update(
            samples=max(known.own.samples + samples - dropped, 0.0),
            samples_per_s=throughput.samples_per_s,
            batch_s=throughput.batch_s,
            counted_at=self._services.peers.time(),
        )
        self.rounds.on_batch(samples - dropped)

    def _tell_of_dropped(self, dropped: float, in_row: int) -> None:
        """Say that gradients were not finite; of many in a row, give the likely causes once, then few lines."""
        if in_row < self._told_in_row:
            self._told_in_row = 0
        text = f"a gradient of {dropped:g} samples was not finite (NaN or Inf)"
        if in_row >= _MANY_DROPPED:
            text = (
                f"{in_row} batches in a row had gradients that were not finite (NaN or Inf), and none counts"
            )
        is_first_of_many = in_row >= _MANY_DROPPED > self._told_in_row
        told = in_row < _MANY_DROPPED or is_first_of_many or in_row >= self._told_in_row + _FEW_LINES
        if is_first_of_many:
            text += _LIKELY_CAUSES
        if told:
            self._told_in_row = in_row
        self._services.events.emit(BatchDropped(loop_now(), text, told))

    async def wait_due(self, deadline: float) -> Due:
        """Wait until there is something to do, or the ``deadline`` (loop time)."""
        self.on_gate()
        self.rounds.until = deadline
        self.rounds.throughput.wait()
        try:
            await self._end_idle()
            while (due := self._take_due(waiting=True)) is Due.NOTHING and loop_now() < deadline:
                if self.state is TrainerState.COMPUTING:
                    self._enter(TrainerEvent.RAN_OUT)
                    # No other peer expects samples of a micro-batch that does not run.
                    self.progress.known.update(counted_at=0.0)
                    self.progress.known.urgent.set()
                self.rounds.check()
                self.progress.known.news.clear()
                await wait_until(deadline, self.progress.known.news)
        finally:  # also if the user interrupts the wait
            if self.state is TrainerState.WAITING:
                self._enter(TrainerEvent.WENT_ON)
            self.rounds.throughput.work(loop_now())
        return due

    async def _end_idle(self) -> None:
        """Look for the others' steps before an idle trainer goes on: it has no vote until then."""
        if self.progress.known.own.idle:
            with suppress(PeerError):
                await self.rounds.refresh()
            if not self.rounds.behind:
                self.progress.known.update(idle=False)

    def _take_due(self, *, waiting: bool = False) -> Due:
        """Return what to do now; a local step is handed out once."""
        own = self.progress.known.own
        now = loop_now()
        if own.paused:
            return Due.NOTHING
        if not self._aside:
            if own.syncing or self.rounds.behind:
                return Due.CATCH_UP
            if self.rounds.round_due(now, waiting=waiting):
                return Due.ROUND
        settings = self.rounds.settings
        if settings.local_steps == 1:
            return Due.NOTHING
        # A round that hangs must not turn into a contribution of hundreds of local steps.
        if self._aside and self._steps_alone >= settings.local_steps:
            self.rounds.throughput.wait()
            return Due.LANDING
        steps = self.rounds.samples(now, aside=self._aside) / settings.target_batch_size
        if steps < self._steps_alone + 1:
            return Due.NOTHING
        self._steps_alone += 1
        return Due.LOCAL_STEP

    async def contribute(
        self, contribution: RoundInput, *, aside: bool = False
    ) -> AsyncGenerator[RoundOutcome, None]:
        """Yield the means of the round of this peer's step; none if there was no round.

        The caller applies each one, and calls `on_applied`, before it asks for the next.
        ``aside``: the trainer computes on meanwhile.
        """
        known = self.progress.known
        if contribution.loss is not None:
            known.update(loss=contribution.loss)
        if aside:
            self._aside = True
            self._steps_alone = 0
            known.update(samples=0.0)
        over = False
        try:
            self._begin_averaging()
            async with aclosing(self.rounds.contribute(contribution)) as outcomes:
                async for outcome in outcomes:
                    if self.state is TrainerState.LEFT:  # it was killed meanwhile
                        return
                    self._end_averaging(TrainerEvent.MEAN_ARRIVED)
                    yield outcome
                    over = outcome.over  # now that its mean is applied
                    if not over:
                        self._begin_averaging()
        finally:
            if self.state in _IN_A_ROUND:
                self._end_averaging(TrainerEvent.NO_MEAN)
            if aside and not over:
                known.update(samples=known.own.samples + contribution.samples)  # for the next try
            self._aside = False
            if aside and self.rounds.throughput.waiting:
                self.rounds.throughput.work(loop_now())
            self.on_gate()
            known.news.set()
        self._tell_of_weights(contribution, over=over)
        if not (over or aside):
            self.rounds.check()

    def _tell_of_weights(self, contribution: RoundInput, *, over: bool) -> None:
        """Say that a round without any weight trains nothing; once, until there is a step again."""
        if over:
            self._told_of_weights = False
        if over or contribution.weight or not contribution.samples or self._told_of_weights:
            return
        self._told_of_weights = True
        text = (
            f"a round trained nothing: this peer's {contribution.samples:g} samples have the weight 0, and no mean of "
            f"others came. The weight counts {self.rounds.settings.weight_unit}; are all labels masked (-100), as by a "
            "wrong template?"
        )
        logger.warning("%s", text)
        self._services.events.emit(Notice(loop_now(), text, logged=True))

    def _begin_averaging(self) -> None:
        self._enter(TrainerEvent.CONTRIBUTED)
        if not self._aside:
            self.rounds.throughput.wait()

    def _end_averaging(self, event: TrainerEvent) -> None:
        self._enter(event)
        if not self._aside:
            self.rounds.throughput.work(loop_now())

    async def on_applied(self, outcome: RoundOutcome, taken: StepTaken) -> None:
        """Move one step further: the trainer took a step with the mean."""
        self._enter(TrainerEvent.APPLIED)
        known = self.progress.known
        # Samples that a trainer computed beside its round, or before its own round is over, count for the next.
        keeps = self._aside or not outcome.over
        if not keeps:
            self._steps_alone = 0
        samples = known.own.samples if keeps else 0.0
        known.advance(taken.lineage, samples=samples, rates=taken.rates)
        known.urgent.set()
        result = outcome.result
        now = loop_now()
        step = known.own.step
        self._private_steps += 1
        if result.samples.keys() - {known.me}:
            self._private_steps = 0
        self.progress.on_round(result.samples, step, taken.lineage, now=now)
        self._services.events.emit(StepFinished(now, step, sum(result.samples.values()), known.own.loss))
        await self.rounds.on_applied(outcome, taken)

    async def catch_up(self) -> CaughtUp | None:
        """Return the swarm's state, or None if this peer's own state counts.

        Raises `StateError` if the state is not to be had, and this peer has none; `MismatchError` if the swarm
        trains with other settings.
        """
        own = self.progress.known.own
        has_state = not own.syncing
        if has_state:
            steps = count(self._private_steps, "step")
            self._dropped = f"{steps} that it took alone and {own.samples:g} samples are dropped"
        self._enter(TrainerEvent.FELL_BEHIND)
        self.progress.known.update(syncing=True, samples=0.0, idle=False)
        try:
            caught_up = await self.rounds.take_state(has_state=has_state)
        finally:
            self.rounds.throughput.active_at = loop_now()
        if caught_up is None:
            self._dropped = ""
            self._catch_up_done()
        return caught_up

    async def on_loaded(self, step: int, lineage: bytes, donors: tuple[PeerId, ...]) -> None:
        """The trainer has loaded what `catch_up` returned, of these donors, and is at this step and lineage."""
        own = self.progress.known.own
        self._steps_alone = 0
        if (own.step, own.lineage) != (step, lineage):
            self.rounds.adopt(step, lineage)
        if self._dropped:
            text = f"this peer was behind: it goes on at step {step}; {self._dropped}"
            self._services.events.emit(Notice(loop_now(), text))
            self._dropped = ""
        self._private_steps = 0
        self.rounds.on_loaded(donors)
        self._catch_up_done()
        if self._services.events.detailed:
            digest = await self.rounds.state_digest()
            self._services.events.emit(Loaded(loop_now(), step, lineage.hex(), digest))

    def _catch_up_done(self) -> None:
        self.progress.known.update(syncing=False)
        self._enter(TrainerEvent.CAUGHT_UP)
        self.on_gate()

    def adopt(self, step: int, lineage: bytes, *, syncing: bool = False) -> None:
        """Move this peer's record to a state that it has loaded or, ``syncing``, still needs."""
        self._steps_alone = 0
        self.rounds.adopt(step, lineage, syncing=syncing)
