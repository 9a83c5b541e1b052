"""`SwarmOptimizer`: a torch optimizer whose step the whole swarm takes together.

Only one thread at a time uses an optimizer. When another thread learns that the session is about to end, it must not
change the model while the first thread trains. So it calls `LoopHooks.end`, and the next ``step()`` closes the
optimizer.

With a state folder, a background thread saves checkpoints there, from a copy of the state. It saves every two
minutes, or less often if saving takes long. Further checkpoints follow after an interrupt and at the end.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from colab_swarm.averaging.result import RoundResult
from colab_swarm.errors import MismatchError, PeerError, StateError, StepError, require
from colab_swarm.events import Notice
from colab_swarm.runtime import Runner, uninterrupted
from colab_swarm.training.agreement import FROZEN_BASE, agreement_of
from colab_swarm.training.drawn import NextStep
from colab_swarm.training.flat import parameters_of, refuse_stray_step
from colab_swarm.training.gradients import Gradients
from colab_swarm.training.hooks import LoopHooks
from colab_swarm.training.link_rounds import LinkRounds
from colab_swarm.training.records import LINEAGE_BYTES, Agreement, ProgressRecord
from colab_swarm.training.replica import Replica, UpdateRule, WrappedOptimizer
from colab_swarm.training.rounds import Rounds, TrainedModel
from colab_swarm.training.saving import ProgressSaver, TrainerCheckpoint
from colab_swarm.training.schedule import NO_SCHEDULER_HERE, GlobalScheduler
from colab_swarm.training.settings import PeerServices, TrainingSettings
from colab_swarm.training.state import CheckpointFolder, load_checkpoint
from colab_swarm.training.timing import StepTimes
from colab_swarm.training.trainer import Trainer

logger = logging.getLogger(__name__)

_PASS_LOSS = "the scheduler goes by the swarm's loss: pass loss=…, as in optimizer.step(samples=…, loss=loss)"

RoundsFor = Callable[[PeerServices, TrainingSettings, ProgressRecord, TrainedModel], Rounds]


class SwarmOptimizer(WrappedOptimizer):
    """Accumulates gradients at this peer's pace, and steps once all peers together have the target batch.

    The averaged gradient is ``sum_i n_i * grad_i / sum_i n_i`` over the peers (DeDLOC, section 3.1),
    where ``grad_i`` is peer i's mean over its ``n_i`` samples. One process with the joined batch would compute the
    same gradient. ``step(weight=…)`` replaces ``n_i``.

    ``param_groups``, ``state``, ``defaults`` and ``state_dict()`` are those of the wrapped optimizer. Only read
    them: with delayed updates (``overlap=True``), a change of ``param_groups`` has no effect. ``hooks`` are for
    frameworks whose loop calls ``step()``: see `LoopHooks`.
    """

    made_by = "swarm.optimizer(…)"
    grad_scale: torch.Tensor | None  # set by a GradScaler
    _agreement: Agreement

    def __init__(
        self,
        runtime: Runner,
        services: PeerServices,
        settings: TrainingSettings,
        rule: UpdateRule,
        name: str,
        folder: CheckpointFolder | None = None,
        before: "SwarmOptimizer | None" = None,
        rounds: RoundsFor = LinkRounds,
    ) -> None:
        """Use `Swarm.optimizer` instead of this constructor.

        This peer's progress is saved in ``folder``. ``before`` is the present optimizer of this name. The new optimizer
        closes it, unless the other peers would refuse the new optimizer.
        """
        self._runtime = runtime
        self._services = services
        self.settings = settings
        text = "the optimizer has lr=None, which peers cannot compare: Adafactor(…, lr=1e-3, relative_step=False)"
        require(None not in [group.get("lr", 0.0) for group in rule.optimizer.param_groups], text)
        self._replica = Replica(rule)
        super().__init__(rule.optimizer, self._replica.stepping)
        self._gathered = Gradients(
            self._replica,
            services.averager.holds,
            error_feedback=bool(settings.communication.error_feedback),
            device_memory=settings.device_memory,
        )
        frozen_base = ""
        if before is not None and before.rule.model is rule.model and before._replica.moved:
            frozen_base = dict(before._agreement).get(FROZEN_BASE, "")
        self._agreement = agreement_of(self._replica, settings, frozen_base=frozen_base)
        if rule.model is None and not all(one.requires_grad for one in parameters_of(rule.optimizer)):
            logger.warning(
                "the optimizer has frozen parameters, which are not compared with those of the other peers: pass "
                "model=… to swarm.optimizer(…), which also averages the model's buffers"
            )
        self._next = NextStep(lambda: self._replica.model, settings.batch_size)
        self.scheduler = GlobalScheduler(self, self._replica.schedule)  # stands for the given scheduler
        self._told: set[str] = set()
        self._lock = threading.RLock()  # held by the trainer's calls, and to close
        self._checkpoint = TrainerCheckpoint(self._replica, self._gathered)
        self.hooks = LoopHooks(services.peers.id, self._checkpoint, self._next, self._warn)
        self._saver = ProgressSaver(services, folder, self._checkpoint, runtime.time)
        if before is not None:
            self._replace(before)
        if before is not None and before._agreement == self._agreement:
            self._checkpoint.take_up(before._checkpoint.state())
            resumed = True
            if before.rule.model is not rule.model:
                self._tell_once(
                    f"this model takes the weights of step {self.global_step} that were trained here as "
                    f"{settings.prefix.rpartition('/')[-1]!r}: to begin anew, pass another name=… to swarm.optimizer(…)"
                )
        else:
            resumed = self._checkpoint.resume(folder)
        self.rounds = runtime.call(self._start(rounds, name, syncing=not resumed))
        self._guard = rule.optimizer.register_step_pre_hook(refuse_stray_step)
        self.times = StepTimes(self._replica.model[0].device)
        self._trainer = Trainer(
            runtime, services, self._replica, self._gathered, self.rounds, lambda: self.hooks.over
        )
        try:
            if not resumed or self.rounds.behind:
                self._trainer.synchronize(tries=3)
        except BaseException:  # also an interrupt: this optimizer's place must be free for the next attempt
            try:
                self.close()
            except BaseException:  # a stopped simulation runs nothing for its peers any more
                self.rounds.kill()
                raise
            raise

    def _replace(self, before: "SwarmOptimizer") -> None:
        """Close ``before``, the present optimizer of this name.

        Raises `MismatchError`, with nothing changed, if the other peers would refuse the new optimizer.
        """
        if not before.hooks.closed.is_set():
            with suppress(PeerError):  # then the records that were read before must do
                self._runtime.call(before.rounds.refresh())
            differs = before.rounds.refusal_of(self._agreement)
            require(not differs, f"{differs} Your first optimizer goes on as it was", MismatchError)
            before.hooks.why = (
                "a later swarm.optimizer(…) of the same name has closed this one: use what that returned"
            )
            before.hooks.is_replaced = True
            before.close()
        # Closing it has shown the newest parameters.
        self._replica.begin()

    async def _start(self, rounds: RoundsFor, name: str, *, syncing: bool) -> Rounds:
        replica = self._replica
        settings = self.settings
        own = ProgressRecord(
            replica.step,
            replica.lineage,
            samples=0.0,
            samples_per_s=0.0,
            syncing=syncing,
            name=name,
            agreement=self._agreement,
            rates=replica.digests.rates,
            min_peers=settings.min_peers or 0,
            joined_at=self._services.peers.time(),
        )
        model = TrainedModel(
            replica.numel,
            blake3(replica.schema + repr(self._agreement).encode()).digest(LINEAGE_BYTES),
            replica.snapshot,
            replica.digests.tolerance,
            lambda: self._gathered.loss.value,
        )
        started = rounds(self._services, settings, own, model)
        try:
            await started.start()
        except BaseException:  # also an interrupt
            started.kill()
            raise
        await self._saver.start()
        return started

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self._replica.groups()

    @property
    def global_step(self) -> int:
        return self._replica.step

    @property
    def vectors_at(self) -> str:
        """A text on where the vectors that the swarm averages lie, and on how much of the GPUs' memory they take."""
        return self._gathered.placement.where

    @property
    def loss(self) -> float | None:
        """This peer's mean loss over its samples of the last step; None if no loss was passed."""
        return self.rounds.view.own.loss

    def _warn(self, sentence: str) -> None:
        logger.warning("%s", sentence)
        self._services.events.emit(Notice(self._runtime.time(), sentence, logged=True))

    def metrics(self) -> dict[str, float]:
        """Return the swarm's step, the number of peers that train, and the samples per second of all of them.

        The speed is that of the rounds of the last half minute, waiting included. It is 0 before the second round.
        """
        view = self.rounds.view
        return {
            "swarm_step": float(self.global_step),
            "swarm_peers": float(len(view.there)),
            "swarm_samples_per_s": view.pace.samples_per_s(self._runtime.time()),
        }

    @property
    def lineage(self) -> bytes:
        """Chain of digests of all means that led to the parameters: equal lineages mean equal parameters."""
        return self._replica.lineage

    def __setattr__(self, name: str, value: object) -> None:
        # A torch scheduler replaces the step of its optimizer.
        if hasattr(value, "_wrapped_by_lr_sched"):
            self._replica.schedule.check()
            raise ValueError(NO_SCHEDULER_HERE)
        super().__setattr__(name, value)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float | torch.Tensor] | None = None,
        *,
        samples: float | None = None,
        weight: float | None = None,
        loss: float | torch.Tensor | None = None,
    ) -> RoundResult | None:
        """Count the gradient of the last ``backward()``, and step with the swarm if its batch is full.

        Call ``step`` after each micro-batch, or after several micro-batches whose gradients add up. The call clears the
        gradients. With float16, call ``scaler.step(optimizer)`` instead. A peer that fell behind downloads the
        state here; if no other peer gives the state, the next call tries again.

        Args:
            closure: computes the gradient, and returns the loss.
            samples: number of samples that count towards the batch, > 0. By default the size of the batches that
                `Swarm.batches` gave since the last step, else the setting ``batch_size``.
            weight: weight of this gradient in the mean, >= 0; by default ``samples``. For a causal language model, pass
                the number of target tokens, and set ``weight_unit="target tokens"``. Then the mean is exactly the
                gradient of one process with the joined batch, even if the sequences have unequal lengths.
            loss: mean loss of the micro-batch. The charts show it, and a scheduler that goes by the swarm's loss
                needs it. If the loss is a tensor on a GPU, nothing waits for its value until the round.

        Returns the result of the averaging round if the global step advanced, else None. With delayed updates, the
        first call after the round's end returns this result, and the model gets the new parameters when the next round
        begins.

        Raises:
            RuntimeError: this peer has left, because you closed the optimizer or because the session ends; or a later
                optimizer of the same name replaced this optimizer.
            StepError: the call is wrong, or there is no gradient.
            MismatchError: most other peers train with other settings.
        """
        computed = None if closure is None else loss_of(closure)
        next_samples, next_weight, next_loss = self._next.take()
        samples = next_samples if samples is None else samples
        weight = next_weight if weight is None else weight
        samples, weight = self.settings.counted(samples, weight)
        if loss is None:
            loss = computed if next_loss is None else next_loss
        require(loss is not None or not self._replica.schedule.needs_loss, _PASS_LOSS)
        is_many = isinstance(loss, str | list | tuple) or (
            isinstance(loss, torch.Tensor) and loss.numel() != 1
        )
        if is_many:
            raise StepError(
                f"loss={loss!r:.60}: pass the mean loss of the micro-batch, a number or a tensor of one value"
            )
        if self.hooks.closed.is_set() and self.hooks.ends_quietly:
            return None
        self.times.begin(self._runtime.time())
        with self._trainer_call():
            return self._count(samples, weight, loss)

    def _count(self, samples: float, weight: float, loss: float | torch.Tensor | None) -> RoundResult | None:
        """Count a gradient, and then take the action that is due."""
        for sentence in (*self._gathered.check(), self._replica.take_written()):
            self._tell_once(sentence)
        landed = self._trainer.land()
        self._trainer.recover()
        scale = getattr(self, "grad_scale", None)
        uninterrupted(lambda: self._gathered.add(samples, weight, loss, scale=scale))
        with self._replica.lock:
            self._replica.schedule.check()
        result = self._trainer.count(samples, landed=landed)
        self.times.end(self._runtime.time(), self._trainer.due)
        return result

    def _tell_once(self, sentence: str) -> None:
        if sentence and sentence not in self._told:
            self._told.add(sentence)
            self._warn(sentence)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """True tells a GradScaler to skip no step: this optimizer drops a gradient that overflows by itself.

        Accelerate replaces ``step``, to see which steps are skipped, and zeroes gradients itself.
        """
        return "step" not in vars(self)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the last ``backward()``; gradients that ``step()`` has counted stay in the sum."""
        self._next.on_cleared()
        super().zero_grad(set_to_none)

    def wait_step(self, timeout_s: float = 600.0) -> RoundResult | None:
        """Wait until the swarm takes its next step, and contribute the accumulated samples.

        Call this at a peer that has no more data for now. Afterwards, the model has the newest parameters. Returns None
        after ``timeout_s``, or if the swarm moved on without this peer. In the second case this peer has caught up,
        and its samples are lost.
        """
        self.times.begin(self._runtime.time())
        with self._trainer_call():
            self._tell_once(self._replica.take_written())
            return self._trainer.wait_step(timeout_s)

    def save(self, target: str | Path | CheckpointFolder) -> None:
        """Write a checkpoint to a file, or into a folder that holds the last few checkpoints. Thread-safe.

        Checkpoints of later steps in the folder are set aside, as `CheckpointFolder` explains.
        The entry ``together`` of a checkpoint is the last step at which this peer knows that its state was bit-equal
        to the swarm's. At this step the peer began the run, or loaded another peer's state. Late joiners load a state,
        and so do peers whose rounding differed too far.
        Raises `StateError` if the checkpoint could not be written; then an older file of that name is unchanged.
        """
        self._checkpoint.save(target)

    def load(self, source: str | Path | CheckpointFolder) -> None:
        """Continue from a checkpoint, or from the latest readable checkpoint of a folder.

        If the swarm is at a later step, this peer downloads the swarm's state at its next ``step()``. Raises
        `StateError`, with nothing changed, if there is no checkpoint, or if it is damaged or belongs to another model.
        """
        with self._trainer_call():
            self._trainer.land(wait=True)
            state = source.latest() if isinstance(source, CheckpointFolder) else load_checkpoint(source)
            require(state is not None, f"{source} holds no checkpoint that can be read", StateError)

            def restart() -> None:
                self._checkpoint.take_up(state)
                self._trainer.adopt()

            uninterrupted(restart)

    def close(self, *, hand_over_s: float = 0.0) -> None:
        """Leave the collaboration; the model keeps the newest parameters. Idempotent.

        Waits at most ``hand_over_s`` seconds for a last round that takes the accumulated samples. Without such a round
        these samples are lost.
        """
        with self._lock:
            if self.hooks.closed.is_set():
                return

            async def stop() -> None:
                await self._trainer.stop()
                self._saver.stop()
                await self.rounds.stop()

            try:
                until = self._runtime.time() + hand_over_s
                for _ in range(2):  # the first wait may end with a round that ran beside the trainer
                    left_s = until - self._runtime.time()
                    if left_s > 0 and self._gathered.samples and not self.rounds.view.own.paused:
                        self._trainer.wait_step(left_s)
            finally:  # a checkpoint is saved even if the hand-over failed or was interrupted
                self.hooks.closed.set()
                self._guard.remove()
                self._runtime.call(stop())
                self._replica.show()
                self._saver.save()

    def _mode(self, name: str) -> Callable[[], None]:
        switch = super()._mode(name)

        def switch_between_steps() -> None:
            # A schedule-free optimizer refuses a step while it evaluates.
            self._trainer.land(wait=True)
            with self._replica.lock:
                switch()
                self._replica.refresh()
                self._replica.written.on_written()

        return switch_between_steps

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, marked with the swarm's step; `save` writes the whole state."""
        return self._saved(self._replica.optimizer_state)

    @property
    def rule(self) -> UpdateRule:
        return self._replica.rule

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state that `state_dict` returned; before, load the parameters that belong to it into the model.

        If these parameters differ from the swarm's, this peer catches up at its next step. Raises ValueError if the
        state belongs to another optimizer. To continue from a file that `save` wrote, use `load`.
        """
        with self._trainer_call():
            self._trainer.land(wait=True)
            self._load(state_dict, lambda state: uninterrupted(partial(self._replica.load_optimizer, state)))
            self._trainer.recover()

    @contextmanager
    def _trainer_call(self) -> Iterator[None]:
        gate = self._services.gate
        text = "this peer is paused by the `with` block around this line: train outside of it"
        require(not gate.closed_by_this_thread, text, RuntimeError)
        try:
            if gate.closed:
                print(
                    "This peer is paused, and this cell waits. To continue: swarm.unpause(), or the panel's button; "
                    "where buttons do not react while a cell runs, interrupt it first (■)."
                )
                self._runtime.call(gate.wait_open())
            with self._lock:
                require(not self.hooks.closed.is_set(), self.hooks.why, RuntimeError)
                yield
                hand_over_s = self.hooks.hand_over_s
                self.hooks.hand_over_s = None
                if hand_over_s is not None:
                    self.close(hand_over_s=hand_over_s)
                    require(self.hooks.ends_quietly, self.hooks.why, RuntimeError)
        except KeyboardInterrupt:
            uninterrupted(lambda: self._runtime.call(self._trainer.averaged()))
            threading.Thread(target=self._saver.save, name="colab-swarm-save", daemon=True).start()
            print(
                f"Interrupted at step {self.global_step} of the swarm. {self._gathered.samples:g} samples that are "
                "accumulated here go into the next step: run the loop again to continue, or swarm.leave() to end."
            )
            raise

    def __repr__(self) -> str:
        inner = type(self._replica.rule.optimizer).__name__
        here = f"{self._gathered.samples:g} of {self.settings.target_batch_size:g} samples here"
        return f"SwarmOptimizer({inner}, step={self.global_step}, {here})"


def loss_of(closure: Callable[[], float | torch.Tensor]) -> float | torch.Tensor:
    text = f"step({closure!r:.40}): name what you pass, as in optimizer.step(samples=…, loss=…)"
    require(callable(closure), text, StepError)
    with torch.enable_grad():
        return closure()
