"""`SwarmOptimizer`: a torch optimizer whose step is the whole swarm's.

Another thread may close an optimizer when the platform's session is about to end. It must not
change the model while the trainer computes with it. So it requests the end (`OptimizerLock.end`);
the trainer's next call then hands over its samples, closes, and raises the reason.

A `ProgressSaver` saves checkpoints in the state folder, from a copy and on a thread of its own: every two minutes, or
less often where that takes long, and once more after an interrupt and at the end.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from colab_swarm.averaging.round import RoundResult
from colab_swarm.errors import StateError
from colab_swarm.events import EventLog, Fault
from colab_swarm.markup import facts
from colab_swarm.runtime import PauseGate, Runner
from colab_swarm.tensors.chunks import Snapshot
from colab_swarm.tensors.codecs import Floats
from colab_swarm.tensors.statedict import copied
from colab_swarm.training.collaboration import Collaboration, Due
from colab_swarm.training.progress import ProgressRecord
from colab_swarm.training.replica import (
    Gradients,
    LocalSteps,
    Replica,
    UpdateRule,
    WrappedOptimizer,
    uninterrupted,
)
from colab_swarm.training.settings import PeerServices, TrainingSettings
from colab_swarm.training.state import CheckpointFolder, load_checkpoint, save_checkpoint

logger = logging.getLogger(__name__)

LOOK_S = 10.0
"""How often a trainer that waits for the swarm's next step checks whether the session ends."""
SAVE_S = 120.0
MOST_OF_TIME = 0.05
"""Largest part of the time that saving may take."""


class OptimizerLock:
    """Lets one thread at a time use an optimizer, and none after its end.

    Args:
        runtime: waits at the gate.
        gate: closed while the peer is paused.
        close: ``close(hand_over_s)`` hands over the accumulated samples and closes.

    Attributes:
        lock: hold it to close the optimizer.
        closed: set at the end.
    """

    def __init__(self, runtime: Runner, gate: PauseGate, close: Callable[[float], None]) -> None:
        self._runtime, self._gate, self._close = runtime, gate, close
        self.lock = threading.RLock()
        self._hand_over_s: float | None = None
        self._why = "this optimizer has left its swarm: make a new one with swarm.optimizer(…)"
        self.closed = threading.Event()

    @contextmanager
    def of_trainer(self) -> Iterator[None]:
        """Hold the lock for a call of the trainer.

        Raises:
            RuntimeError: the optimizer is closed or about to close, or the trainer itself has paused the peer.
        """
        if self._gate.closed_by_this_thread:
            raise RuntimeError(
                "this peer is paused by the `with` block around this line: train outside of it"
            )
        if self._gate.closed:
            print(
                "This peer is paused, and this cell waits. To continue: swarm.unpause(), or the panel's button; where "
                "buttons do not react while a cell runs, interrupt it first (■)."
            )
            self._runtime.call(self._gate.wait_open())
        with self.lock:
            if self.closed.is_set():
                raise RuntimeError(self._why)
            yield
            hand_over_s, self._hand_over_s = self._hand_over_s, None
            if hand_over_s is not None:
                self._close(hand_over_s)
                raise RuntimeError(self._why)

    @property
    def ending(self) -> bool:
        """True if the trainer should finish its call, hand over and close."""
        return self._hand_over_s is not None

    def end(self, why: str, *, hand_over_s: float) -> None:
        """Let the trainer's next call hand over, close and raise ``why``; an idle trainer must be closed instead."""
        self._why, self._hand_over_s = why, hand_over_s


class ProgressSaver:
    """Saves one optimizer's progress in the state folder.

    Args:
        folder: of the checkpoints.
        events: gets a `Fault` when a checkpoint cannot be written; training continues without it.
        clock: the time of events.
    """

    def __init__(self, folder: CheckpointFolder, events: EventLog, clock: Callable[[], float]) -> None:
        self._folder, self._events, self._clock = folder, events, clock
        self._saved_step = -1
        self._lock = threading.Lock()

    def load_into(self, replica: Replica, gathered: Gradients) -> bool:
        """Load the newest checkpoint; returns False if there is none yet.

        Raises:
            StateError: it belongs to another model; nothing was changed.
        """
        state = self._folder.latest()
        if state is None:
            return False
        try:
            feedback = gathered.feedback_of(state)
            replica.load(state)
        except StateError as error:
            where = f"it is saved in {self._folder.path}: to start again, move that folder away"
            raise StateError(f"{error}; {where}") from error
        gathered.feedback = feedback
        return True

    def save(self, optimizer: SwarmOptimizer) -> None:
        """Save the optimizer's state if it is new."""
        with self._lock:
            step = optimizer.global_step
            if step == self._saved_step:
                return
            try:
                optimizer.save(self._folder)
                for path in self._folder.paths():
                    if path > self._folder.file_of(optimizer.global_step):
                        path.unlink(missing_ok=True)  # of a branch that the swarm has left
            except (StateError, OSError) as error:
                logger.warning("progress was not saved: %s", error)
                self._events.emit(Fault(self._clock(), "saving progress", str(error)))
            else:
                self._saved_step = step

    async def keep_saving(self, optimizer: SwarmOptimizer) -> None:
        """Save periodically, until cancelled."""
        pause_s = SAVE_S
        while True:
            await asyncio.sleep(pause_s)
            began = time.monotonic()
            await asyncio.to_thread(self.save, optimizer)
            pause_s = max(SAVE_S, (time.monotonic() - began) / MOST_OF_TIME)


@dataclass(frozen=True)
class OptimizerSnapshot:
    """The progress of the swarm, as one peer's optimizer knows it.

    Attributes:
        optimizer: type of the wrapped optimizer.
        step: updates of the swarm that this peer's parameters have.
        own_samples: accumulated here for the next step.
        samples, target_batch_size: accumulated by all peers, and needed for the next step.
        samples_per_s: of all peers together.
        peers: number of training peers.
        budget: how this peer stays within its traffic budget, in words; empty without one.
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
        rows: dict[str, object] = {
            "step of the swarm": f"{self.step:,}",
            "samples for the next step": f"{self.samples:,.0f} of {self.target_batch_size:,.0f}, "
            f"{self.own_samples:,.0f} of them here",
            "speed": f"{self.samples_per_s:,.1f} samples/s from {self.peers} peers",
        }
        return facts(
            f"SwarmOptimizer({self.optimizer})", rows | ({"budget": self.budget} if self.budget else {})
        )


class SwarmOptimizer(WrappedOptimizer):
    """Accumulates gradients at this peer's own pace and steps once the swarm has its target batch.

    The averaged gradient is ``sum_i n_i * grad_i / sum_i n_i`` over the peers (DeDLOC, section 3.1), where ``grad_i``
    is the mean over ``n_i`` samples: n peers train as one process with the joined batch would.

    ``param_groups``, ``state``, ``defaults`` and ``state_dict()`` are those of the wrapped
    optimizer, to read. With delayed updates, a change of ``param_groups`` has no effect.
    """

    made_by = "swarm.optimizer(…)"

    def __init__(
        self,
        runtime: Runner,
        services: PeerServices,
        settings: TrainingSettings,
        rule: UpdateRule,
        name: str,
        folder: CheckpointFolder | None = None,
    ) -> None:
        """Use `Swarm.optimizer`. ``name`` is this peer's, for people; ``folder`` gets its progress."""
        self._runtime = runtime
        self._replica = Replica(rule)
        self._gathered = (
            LocalSteps(self._replica)
            if rule.local
            else Gradients(self._replica, error_feedback=settings.error_feedback)
        )
        self._settings = settings
        # A round that runs while the trainer computes: its task, contribution and weight.
        self._flight: tuple[asyncio.Task[RoundResult | None], Floats, float] | None = None
        self.turn = OptimizerLock(
            runtime, services.gate, lambda hand_over_s: self.close(hand_over_s=hand_over_s)
        )
        self._saver = None if folder is None else ProgressSaver(folder, services.events, runtime.time)
        resumed = self._saver is not None and self._saver.load_into(self._replica, self._gathered)
        self._collaboration = runtime.call(self._start(services, name, syncing=not resumed))
        try:
            if not resumed or self._collaboration.progress.behind:
                self._synchronize()
        except BaseException:  # also an interrupt: its place in the swarm must be free for the next attempt
            try:
                self.close()
            except BaseException:  # a stopped simulation runs nothing for its peers any more
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
            reduces=False,  # published with the addresses, which may change
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
        except BaseException:  # also an interrupt
            collaboration.kill()
            raise
        self._saving = None if self._saver is None else asyncio.create_task(self._saver.keep_saving(self))
        return collaboration

    # --- for the trainer ------------------------------------------------------------------------------------------

    @property
    def global_step(self) -> int:
        """Updates of the swarm that this peer's parameters have."""
        return self._replica.step

    @property
    def lineage(self) -> bytes:
        """Digest chain that names the branch of the parameters: equal lineages mean equal parameters."""
        return self._replica.lineage

    @property
    def collaboration(self) -> Collaboration:
        """This optimizer's part in the swarm."""
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
            The averaging round's result if the global step advanced, else None. With delayed updates the round runs
            while you compute: the first call after its end returns its result, and the model gets the new parameters
            when the next round begins.

        Raises:
            ValueError: ``samples`` is not a positive number.
            StateError: this peer fell behind and no peer could give it the state.
            RuntimeError: this peer has left: you closed it, or the platform's session is about to
                end and the accumulated samples are handed over; the text says how to continue.
        """
        self._refuse_closure(closure)
        if not (isinstance(samples, int | float) and math.isfinite(samples) and samples > 0):
            raise ValueError(
                f"samples={samples!r}: pass the number of samples in the batch, such as len(input_ids)"
            )
        with self._trainer_call():
            landed = self._land()
            self._recover()
            dropped = uninterrupted(lambda: self._gathered.add(float(samples), loss))
            report = self._collaboration.report(float(samples), self._gathered.mean_loss, dropped=dropped)
            return self._act(self._runtime.call(report)) or landed

    def wait_step(self, timeout_s: float = 600.0) -> RoundResult | None:
        """Wait until the swarm takes its next step, and contribute the accumulated samples.

        For a peer that has no more data for now. The model has the newest parameters afterwards. Returns None after
        ``timeout_s``, or if the swarm moved on without this peer: it has caught up then, and lost its samples.
        """
        with self._trainer_call():
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
        """Write a checkpoint to a file, or into a folder that holds the last few. Thread-safe.

        It has parameters, optimizer, scheduler, step, lineage and error feedback. A step waits until they are copied.

        Raises:
            StateError: it could not be written (disk full?); an older file there is untouched.
        """
        with self._replica.lock:
            state = copied({**self._replica.state(), **self._gathered.state()})
        if isinstance(target, CheckpointFolder):
            target.save(state["step"], state)
        else:
            save_checkpoint(target, state)

    def load(self, source: str | Path | CheckpointFolder) -> None:
        """Continue from a checkpoint, or from the latest readable one of a folder.

        If the swarm is further, this peer fetches its state at the next step.

        Raises:
            StateError: there is none, it is damaged, or it belongs to another model; nothing was changed.
        """
        with self._trainer_call():
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
        self._runtime.call(self._collaboration.adopt(self._replica.step, self._replica.lineage))

    def close(self, *, hand_over_s: float = 0.0) -> None:
        """Leave the collaboration; the model keeps the newest parameters. Idempotent.

        Args:
            hand_over_s: how long to wait for a last round that takes the accumulated samples; with 0 they are lost.
        """
        with self.turn.lock:
            if self.turn.closed.is_set():
                return
            try:
                if hand_over_s > 0 and self._gathered.samples and not self._collaboration.progress.own.paused:
                    self._wait_step(hand_over_s)
            finally:  # a failed or interrupted hand-over loses no checkpoint
                self.turn.closed.set()
                self._runtime.call(self._stop())
                self._replica.show()
                if self._saver is not None:
                    self._saver.save(self)

    async def _stop(self) -> None:
        flight, self._flight = self._flight, None
        if flight is not None:
            flight[0].cancel()
            await asyncio.wait([flight[0]])
        if self._saving is not None:
            self._saving.cancel()
        await self._collaboration.stop()

    # --- as any torch optimizer -----------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the last ``backward()``; accumulated ones stay."""
        self._replica.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return that of the wrapped optimizer; `save` writes everything."""
        return self._replica.rule.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Not supported: one peer's optimizer state must not differ from the others'."""
        raise TypeError(
            "peers share one optimizer state: use optimizer.load(path) with a file written by save(path)"
        )

    # --- accumulate, average, apply -------------------------------------------------------------------------------

    def _act(self, due: Due) -> RoundResult | None:
        if due is Due.CATCH_UP:
            self._synchronize()
        elif due is Due.LOCAL_STEP:
            assert isinstance(self._gathered, LocalSteps)
            uninterrupted(self._gathered.step)
        elif due is Due.ROUND and self._replica.rule.delayed:
            uninterrupted(self._take_off)
        elif due is Due.ROUND:
            return self._round()
        return None

    def _contribution(self) -> Floats:
        return self._gathered.contribution(self._collaboration.services.averager.holds)

    def _round(self) -> RoundResult | None:
        values, weight = uninterrupted(self._contribution), self._gathered.samples
        encoding, take = self._gathered.encoding(), partial(self._take, weight)
        return self._runtime.call(self._collaboration.average(values, weight, encoding, take))

    def _take(self, weight: float, mean: Floats) -> bytes:
        """Apply the mean of all samples that are accumulated here."""
        lineage = self._apply(weight, mean)
        self._gathered.forget()
        return lineage

    def _apply(self, weight: float, mean: Floats) -> bytes:
        """Take the step and settle the error feedback; a checkpoint must have both or neither."""
        with self._replica.lock:
            lineage = self._replica.apply(mean)
            self._gathered.on_delivered(weight)
            return lineage

    # --- delayed updates ------------------------------------------------------------------------------------------

    def _take_off(self) -> None:
        """Start a round with the accumulated gradients, and give the model the last round's update."""
        values, weight = self._contribution(), self._gathered.samples
        self._flight = self._runtime.call(self._begin(values, weight)), values, weight
        self._gathered.forget()
        self._replica.show()

    async def _begin(self, values: Floats, weight: float) -> asyncio.Task[RoundResult | None]:
        encoding, apply = self._gathered.encoding(), partial(self._apply, weight)
        aside = self._collaboration.average(values, weight, encoding, apply, aside=True)
        return asyncio.create_task(aside, name="delayed update")

    def _land(self, *, wait: bool = False) -> RoundResult | None:
        """Return the result of the running round if it has ended; gradients that it could not deliver come back."""
        if self._flight is None:
            return None
        task, values, weight = self._flight
        if not (wait or task.done()):
            return None
        self._runtime.call(asyncio.wait([task]))
        self._flight = None
        result = task.result()
        if result is None:
            self._gathered.on_returned(values, weight)
        return result

    def _synchronize(self) -> None:
        caught_up = self._runtime.call(self._collaboration.catch_up())
        if caught_up is not None:
            uninterrupted(lambda: self._catch_up(*caught_up))

    def _catch_up(self, snapshot: Snapshot, means: Iterable[Floats]) -> None:
        try:
            self._replica.load_snapshot(snapshot)
            for mean in means:
                self._replica.apply(mean)
            self._gathered.forget()
        finally:
            self._recover()  # at once: by its record this peer has caught up already

    def _recover(self) -> None:
        """Catch up again if an interrupt or a bad state kept this peer from the step in its record."""
        own = self._collaboration.progress.own
        if self._flight is None and (own.step, own.lineage) != (self._replica.step, self._replica.lineage):
            adopt = self._collaboration.adopt(self._replica.step, self._replica.lineage, syncing=True)
            self._runtime.call(adopt)

    @contextmanager
    def _trainer_call(self) -> Iterator[None]:
        """Hold the lock for a call of the trainer, and explain an interrupt."""
        try:
            with self.turn.of_trainer():
                yield
        except KeyboardInterrupt:
            uninterrupted(lambda: self._runtime.call(self._collaboration.settled()))
            if self._saver is not None:
                save = threading.Thread(target=self._saver.save, args=(self,), name="colab-swarm-save")
                save.daemon = True
                save.start()
            print(
                f"Interrupted at step {self.global_step} of the swarm. {self._gathered.samples:g} samples that are "
                "accumulated here go into the next step: run the cell again to continue, or swarm.leave() to end."
            )
            raise

    def snapshot(self) -> OptimizerSnapshot:
        """Return the progress of the swarm. Thread-safe."""
        progress, plan = self._collaboration.progress, self._collaboration.plan
        records = progress.records.values()
        return OptimizerSnapshot(
            optimizer=type(self._replica.rule.optimizer).__name__,
            step=self.global_step,
            own_samples=self._gathered.samples,
            samples=sum(record.samples for record in records),
            target_batch_size=self._settings.target_batch_size,
            samples_per_s=progress.samples_per_s(),
            peers=len(records),
            budget="" if plan is None else str(plan),
        )

    def __repr__(self) -> str:
        inner = type(self._replica.rule.optimizer).__name__
        target = self._settings.target_batch_size
        here = f"{self._gathered.samples:g} of {target:g} samples here"
        plan = self._collaboration.plan
        budget = "" if plan is None else f", {plan}"
        return f"SwarmOptimizer({inner}, step={self.global_step}, {here}{budget})"

    def _repr_html_(self) -> str:
        return self.snapshot()._repr_html_()
