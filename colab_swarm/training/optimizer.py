"""`SwarmOptimizer`: a torch optimizer whose step is the whole swarm's.

Whose turn an optimizer is: the trainer's, unless the peer is paused, or leaves because the session ends.

Somebody else than the trainer may close an optimizer, on another thread: when the platform's session is about to end.
It must not change the model while the trainer computes with it. So it asks (`OptimizerLock.end`), and the trainer's
own next call hands over, closes, and raises why.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from colab_swarm.averaging.round import RoundResult
from colab_swarm.errors import StateError
from colab_swarm.markup import facts
from colab_swarm.runtime import PauseGate, Runner
from colab_swarm.tensors.statedict import copied
from colab_swarm.training.catch_up import CaughtUp, Values
from colab_swarm.training.checkpoint import CheckpointFolder, KeptSteps, load_checkpoint, save_checkpoint
from colab_swarm.training.collaboration import Collaboration, Due
from colab_swarm.training.progress import ProgressRecord
from colab_swarm.training.replica import Gradients, LocalSteps, Replica, TorchFace, UpdateRule, uninterrupted
from colab_swarm.training.settings import PeerServices, TrainingSettings


class OptimizerLock:
    """One thread at a time, and none after the end.

    Attributes:
        closed: set at the end.

    Args:
        runtime: waits at the gate.
        gate: closed while the peer is paused.
        close: hands over for so many seconds, and closes.
    """

    def __init__(self, runtime: Runner, gate: PauseGate, close: Callable[[float], None]) -> None:
        self._runtime, self._gate, self._close = runtime, gate, close
        self._lock = threading.RLock()
        self._hand_over_s: float | None = None
        self._why = "this optimizer has left its swarm: make a new one with swarm.optimizer(…)"
        self.closed = threading.Event()

    @contextmanager
    def of_trainer(self) -> Iterator[None]:
        """Around what the trainer calls.

        Raises:
            RuntimeError: it is closed, or was to be; or the trainer itself has paused the peer.
        """
        self._wait_open()
        with self._lock:
            if self.closed.is_set():
                raise RuntimeError(self._why)
            yield
            hand_over_s, self._hand_over_s = self._hand_over_s, None
            if hand_over_s is not None:
                self._close(hand_over_s)
                raise RuntimeError(self._why)

    @property
    def ending(self) -> bool:
        """Whether the trainer is to come to an end of what it does, to hand over and close."""
        return self._hand_over_s is not None

    @contextmanager
    def of_closer(self) -> Iterator[None]:
        """Around what closes."""
        with self._lock:
            yield

    def end(self, why: str, *, hand_over_s: float) -> None:
        """Let the trainer's next call hand over, close and raise ``why``. Who trains no more has to be closed."""
        self._why, self._hand_over_s = why, hand_over_s

    def _wait_open(self) -> None:
        if self._gate.closed_by_this_thread:
            raise RuntimeError(
                "this peer is paused by the `with` block around this line: train outside of it"
            )
        if self._gate.closed:
            print(
                "This peer is paused, and this cell waits. To go on: swarm.unpause(), or the panel's button; where "
                "buttons do not react while a cell runs, interrupt it first (■)."
            )
            self._runtime.call(self._gate.wait_open())


@dataclass(frozen=True)
class OptimizerSnapshot:
    """How far the swarm is, as one peer's optimizer knows it.

    Attributes:
        optimizer: what it steps.
        step: updates of the swarm that this peer's parameters have.
        own_samples: accumulated here for the next one.
        samples, target_batch_size: accumulated by all peers, and what the next step takes.
        samples_per_s: of all peers together.
        peers: that train.
        budget: what the budget led to, in words; empty without one.
    """

    optimizer: str
    step: int
    own_samples: float
    samples: float
    target_batch_size: float
    samples_per_s: float
    peers: int
    budget: str

    def _repr_html_(self) -> str:
        told: dict[str, object] = {
            "step of the swarm": f"{self.step:,}",
            "samples for the next step": f"{self.samples:,.0f} of {self.target_batch_size:,.0f}, "
            f"{self.own_samples:,.0f} of them here",
            "speed": f"{self.samples_per_s:,.1f} samples/s from {self.peers} peers",
        }
        return facts(
            f"SwarmOptimizer({self.optimizer})", told | ({"budget": self.budget} if self.budget else {})
        )


LOOK_S = 10.0

"""How often who waits for the swarm's next step looks whether the session ends."""


@dataclass(frozen=True)
class _Flight:
    """A round that goes on while the trainer computes: with what it began, and what will come of it."""

    task: asyncio.Task[RoundResult | None]
    values: Values
    weight: float

    async def wait(self) -> None:
        await asyncio.wait([self.task])


class SwarmOptimizer(TorchFace):
    """Accumulates gradients at this peer's own pace and steps once the swarm has its target batch.

    The averaged gradient is ``sum_i n_i * grad_i / sum_i n_i`` over the peers (DeDLOC, section 3.1), where
    ``grad_i`` is the mean over ``n_i`` samples: n peers train as one process with the joined batch would.
    """

    def __init__(
        self,
        runtime: Runner,
        services: PeerServices,
        settings: TrainingSettings,
        rule: UpdateRule,
        name: str,
        kept: CheckpointFolder | None = None,
    ) -> None:
        """Use `Swarm.optimizer`. ``name`` is this peer's, for people; ``kept``: where its progress is kept."""
        self._runtime = runtime
        self._replica = Replica(rule)
        self._gathered = (
            LocalSteps(self._replica)
            if rule.local
            else Gradients(self._replica, error_feedback=settings.error_feedback)
        )
        self._settings = settings
        self._flight: _Flight | None = None
        self.turn = OptimizerLock(
            runtime, services.gate, lambda hand_over_s: self.close(hand_over_s=hand_over_s)
        )
        self._kept = None if kept is None else KeptSteps(kept, services.events, runtime.time)
        came_back = self._kept is not None and self._kept.load_into(self._replica, self._gathered)
        self._collaboration = runtime.call(self._start(services, name, syncing=not came_back))
        try:
            if not came_back or self._collaboration.progress.behind:
                self._synchronize()
        except BaseException:  # an interrupt included: its place in the swarm must be free for the next try
            try:
                self.close()
            except BaseException:  # a simulation that was stopped runs nothing for its peers any more
                self._collaboration.kill()
                raise
            raise

    async def _start(self, services: PeerServices, name: str, *, syncing: bool) -> Collaboration:
        replica = self._replica
        own = ProgressRecord(
            step=replica.step,
            lineage=replica.lineage,
            samples=0.0,
            samples_per_s=0.0,
            syncing=syncing,
            reduces=False,  # told with the addresses, which may change
            name=name,
            local_steps=1 if self._settings.local_steps == "auto" else self._settings.local_steps,
        )
        collaboration = Collaboration(
            services,
            self._settings,
            own=own,
            numel=replica.flat.numel,
            schema=replica.schema,
            snapshot=replica.snapshot,
        )
        try:
            await collaboration.start()
        except BaseException:  # an interrupt included
            collaboration.kill()
            raise
        self._saving = None if self._kept is None else asyncio.create_task(self._kept.keep_saving(self))
        return collaboration

    # --- what a trainer uses --------------------------------------------------------------------------------------

    @property
    def global_step(self) -> int:
        """Updates of the swarm that this peer's parameters have."""
        return self._replica.step

    @property
    def lineage(self) -> bytes:
        """Digest of the parameters' history: equal lineages mean equal parameters."""
        return self._replica.lineage

    @property
    def collaboration(self) -> Collaboration:
        """The conversation behind this optimizer."""
        return self._collaboration

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *, samples: float, loss: float | None = None
    ) -> RoundResult | None:
        """Count the gradient of the last ``backward()`` and step with the swarm if its batch is full.

        Call it after each micro-batch; gradients are zeroed. Under AMP: ``scaler.step(optimizer, samples=n)``.

        Args:
            closure: not supported, must be None.
            samples: number of samples whose mean loss was differentiated, > 0.
            loss: that mean loss, for the charts.

        Returns:
            The averaging round's result if the global step advanced, else None. With delayed updates the round goes
            on while you compute: its result comes from the first call after its end, and the model has the new
            parameters when the next round begins.

        Raises:
            ValueError: ``samples`` is not a positive number.
            StateError: this peer fell behind and nobody could give it the state.
            RuntimeError: this peer has left: you closed it, or the platform's session is about to end, and what was
                accumulated is handed over; the text says how to go on.
        """
        if closure is not None:
            raise ValueError(
                "a closure cannot be re-run by a swarm: call loss.backward() and step(samples=n)"
            )
        if not (isinstance(samples, int | float) and math.isfinite(samples) and samples > 0):
            raise ValueError(
                f"samples={samples!r}: pass the number of samples in the batch, such as len(input_ids)"
            )
        with self._trainers_turn():
            landed = self._land()
            self._recover()
            dropped = uninterrupted(lambda: self._gathered.add(float(samples), loss))
            report = self._collaboration.report(float(samples), self._gathered.mean_loss, dropped=dropped)
            return self._act(self._runtime.call(report)) or landed

    def wait_step(self, timeout_s: float = 600.0) -> RoundResult | None:
        """Wait until the swarm takes its next step, contributing what is accumulated.

        For a peer that has no more data for now. The model has the newest parameters then. Returns None after
        ``timeout_s``, or when the swarm went on without this peer: it has caught up then, and what it had accumulated
        is gone.
        """
        with self._trainers_turn():
            return self._wait_step(timeout_s)

    def _wait_step(self, timeout_s: float) -> RoundResult | None:
        landed = self._land(wait=True)
        self._replica.show()
        if landed is not None:
            return landed
        self._recover()
        deadline = self._runtime.time() + timeout_s
        while True:
            until = min(deadline, self._runtime.time() + LOOK_S)
            due = self._runtime.call(self._collaboration.wait_due(until))
            result = self._act(due) or self._land(wait=True)
            self._replica.show()
            over = until == deadline or self.turn.ending
            if result is not None or due is Due.CATCH_UP or (due is Due.NOTHING and over):
                return result

    def save(self, target: str | Path | CheckpointFolder) -> None:
        """Write a checkpoint (parameters, optimizer, scheduler, step, lineage, error feedback) to a file, or into a
        folder that keeps the last few. Any thread may; a step that is due waits until the state is copied.

        Raises:
            StateError: it could not be written (disk full?); an older file there is untouched.
        """
        with self._replica.still():
            state = copied({**self._replica.state(), **self._gathered.state()})
        if isinstance(target, CheckpointFolder):
            target.save(state["step"], state)
        else:
            save_checkpoint(target, state)

    def load(self, source: str | Path | CheckpointFolder) -> None:
        """Go on from a checkpoint, of a folder the latest that can be read; if the swarm is further, its state is
        fetched at the next step.

        Raises:
            StateError: there is none, it is damaged, or it belongs to another model; nothing was changed.
        """
        with self._trainers_turn():
            self._land(wait=True)
            state = source.latest() if isinstance(source, CheckpointFolder) else load_checkpoint(source)
            if state is None:
                raise StateError(f"{source} holds no checkpoint that can be read")
            uninterrupted(lambda: self._restart(state))

    def _restart(self, state: Any) -> None:
        feedback = self._gathered.feedback_of(state)
        self._replica.load(state)
        self._gathered.feedback = feedback
        self._gathered.forget()
        self._runtime.call(self._level_with_replica(syncing=False))

    async def _level_with_replica(self, *, syncing: bool) -> None:
        self._collaboration.level_with(self._replica.step, self._replica.lineage, syncing=syncing)

    def close(self, *, hand_over_s: float = 0.0) -> None:
        """Leave the collaboration; the model keeps the newest parameters. Idempotent.

        Args:
            hand_over_s: how long to wait for a last round that takes what is accumulated; with 0 it is lost.
        """
        with self.turn.of_closer():
            if self.turn.closed.is_set():
                return
            if hand_over_s > 0 and self._gathered.samples and not self._collaboration.progress.own.paused:
                self._wait_step(hand_over_s)
            self.turn.closed.set()
            flight, self._flight = self._flight, None
            self._runtime.call(self._stop(flight))
            self._replica.show()
            if self._kept is not None:
                self._kept.save(self)

    async def _stop(self, flight: _Flight | None) -> None:
        if flight is not None:
            flight.task.cancel()
            await asyncio.wait([flight.task])
        if self._saving is not None:
            self._saving.cancel()
        await self._collaboration.stop()

    # --- accumulate, average, apply -------------------------------------------------------------------------------

    def _act(self, due: Due) -> RoundResult | None:
        if due is Due.CATCH_UP:
            self._synchronize()
        elif due is Due.LOCAL_STEP:
            uninterrupted(self._step_alone)
        elif due is Due.ROUND and self._replica.rule.delayed:
            uninterrupted(self._take_off)
        elif due is Due.ROUND:
            return self._round()
        return None

    def _step_alone(self) -> None:
        assert isinstance(self._gathered, LocalSteps)
        self._gathered.step()
        self._collaboration.on_local_step()

    def _contribution(self) -> Values:
        return self._gathered.contribution(self._collaboration.services.averager.holds)

    def _round(self) -> RoundResult | None:
        values = uninterrupted(self._contribution)
        average = self._collaboration.average(values, self._gathered.samples, self._gathered.sending())
        result = self._runtime.call(average)
        if result is not None:
            uninterrupted(lambda: self._take(values, result))
        return result

    def _take(self, values: Values, result: RoundResult) -> None:
        """Apply the mean and say so, with no interrupt in between: parameters and record belong together."""
        self._apply(self._gathered.samples, values)
        self._gathered.forget()
        self._runtime.call(self._advance(result))

    def _apply(self, weight: float, mean: Values) -> bytes:
        """Take the step and settle what compression cut off: to a save in between both belong together."""
        with self._replica.still():
            lineage = self._replica.apply(mean)
            self._gathered.on_delivered(weight)
            return lineage

    async def _advance(self, result: RoundResult) -> None:
        self._collaboration.advance(self._replica.lineage, result)

    # --- delayed updates ------------------------------------------------------------------------------------------

    def _take_off(self) -> None:
        """Begin a round with what is accumulated, show the model the last one's update, and go on."""
        values, weight = self._contribution(), self._gathered.samples
        self._flight = _Flight(self._runtime.call(self._begin(values, weight)), values, weight)
        self._gathered.forget()
        self._replica.show()

    async def _begin(self, values: Values, weight: float) -> asyncio.Task[RoundResult | None]:
        sending, apply = self._gathered.sending(), partial(self._apply, weight)
        aside = self._collaboration.average_aside(values, weight, sending, apply)
        return asyncio.create_task(aside, name="delayed update")

    def _land(self, *, wait: bool = False) -> RoundResult | None:
        """The result of the round on its way if it has ended; what it could not deliver is accumulated again."""
        flight = self._flight
        if flight is None or not (wait or flight.task.done()):
            return None
        self._runtime.call(flight.wait())
        self._flight = None
        result = flight.task.result()
        if result is None:
            self._gathered.on_returned(flight.values, flight.weight)
        return result

    def _synchronize(self) -> None:
        caught_up = self._runtime.call(self._collaboration.catch_up())
        if caught_up.snapshot is not None:
            uninterrupted(lambda: self._catch_up(caught_up))

    def _catch_up(self, caught_up: CaughtUp) -> None:
        assert caught_up.snapshot is not None
        try:
            self._replica.load_snapshot(caught_up.snapshot)
            for mean in caught_up.means:
                self._replica.apply(mean)
            self._gathered.forget()
        finally:
            self._recover()  # at once: the swarm takes this peer for level already

    def _recover(self) -> None:
        """If an interrupt or a bad state kept this peer from the step that its record tells, catch up anew."""
        own = self._collaboration.progress.own
        if self._flight is None and (own.step, own.lineage) != (self._replica.step, self._replica.lineage):
            self._runtime.call(self._level_with_replica(syncing=True))

    @contextmanager
    def _trainers_turn(self) -> Iterator[None]:
        """Around what the trainer calls; says what an interrupt leaves behind."""
        try:
            with self.turn.of_trainer():
                yield
        except KeyboardInterrupt:
            if self._kept is not None:
                self._kept.save_soon(self)
            print(
                f"Interrupted at step {self.global_step} of the swarm. {self._gathered.samples:g} samples that are "
                "accumulated here go into the next step: run the cell again to go on, or swarm.leave() to end."
            )
            raise

    def snapshot(self) -> OptimizerSnapshot:
        """How far the swarm is; safe from any thread."""
        progress, choice = self._collaboration.progress, self._collaboration.choice
        records = progress.records.values()
        return OptimizerSnapshot(
            optimizer=type(self._replica.rule.optimizer).__name__,
            step=self.global_step,
            own_samples=self._gathered.samples,
            samples=sum(record.samples for record in records),
            target_batch_size=self._settings.target_batch_size,
            samples_per_s=progress.samples_per_s(),
            peers=len(records),
            budget="" if choice is None else str(choice),
        )

    def __repr__(self) -> str:
        inner = type(self._replica.rule.optimizer).__name__
        target = self._settings.target_batch_size
        here = f"{self._gathered.samples:g} of {target:g} samples here"
        choice = self._collaboration.choice
        budget = "" if choice is None else f", {choice}"
        return f"SwarmOptimizer({inner}, step={self.global_step}, {here}{budget})"

    def _repr_html_(self) -> str:
        return self.snapshot()._repr_html_()
