"""`TrainingPart`: what a trainer does next, whatever carries its rounds. Does not import torch."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from colab_swarm.averaging.round import RoundResult
from colab_swarm.dht.service import BackgroundTasks
from colab_swarm.events import BatchDropped, StepFinished
from colab_swarm.net.peers import PeerId
from colab_swarm.runtime import loop_now, wait_until
from colab_swarm.training.catch_up import CaughtUp
from colab_swarm.training.election import Branch
from colab_swarm.training.progress import Progress
from colab_swarm.training.records import ProgressRecord
from colab_swarm.training.settings import PeerServices, RoundInput, TrainingSettings
from colab_swarm.training.throughput import ThroughputEstimator

Due: TypeAlias = Literal["nothing", "a local step", "a round", "catching up"]
"""What a trainer does next; it must catch up if the swarm moved on without it."""

Apply: TypeAlias = Callable[..., bytes]
"""Takes a step with a mean, off the event loop, and returns the new lineage: see `SwarmOptimizer`."""


class TrainingPart(ABC):
    """One trainer's part in the swarm; ``own`` is its first record.

    It runs on the runtime's event loop; the optimizer drives it from the user's thread.
    """

    def __init__(self, services: PeerServices, settings: TrainingSettings, own: ProgressRecord) -> None:
        self.services = services
        self._settings = settings
        round_samples = settings.target_batch_size * settings.local_steps
        self.progress = Progress(services.peers.id, own, settings.prefix, round_samples=round_samples)
        self._throughput = ThroughputEstimator(loop_now())
        self._wake = asyncio.Event()
        self._moved = asyncio.Event()
        self._averaging_aside = False
        self._tasks = BackgroundTasks("progress", services.events, services.rng)
        self._settling: asyncio.Task[None] | None = None
        self._steps_alone = 0  # since the last round
        self._computed = 0.0  # samples

    @property
    def bucket_bytes(self) -> tuple[int, int]:
        """Bytes sent and received that went over no link."""
        return 0, 0

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    async def stop(self) -> None:
        """Serve the last round to its end, then leave."""

    @abstractmethod
    def kill(self) -> None:
        """Leave without notice."""

    @property
    @abstractmethod
    def behind(self) -> bool:
        """True if the swarm moved on without this peer."""

    @abstractmethod
    async def refresh(self) -> Branch:
        """Read the other peers' progress now, and return the swarm's branch."""

    @abstractmethod
    async def catch_up(self) -> CaughtUp | None:
        """Return the swarm's state, or None if this peer's own state counts.

        Raises `StateError` if the state is not to be had, and this peer has none.
        """

    @abstractmethod
    async def on_loaded(self) -> None:
        """The trainer has loaded what `catch_up` returned."""

    @abstractmethod
    async def adopt(self, step: int, lineage: bytes, *, syncing: bool = False) -> None:
        """Move this peer's record to a state that it has loaded or, ``syncing``, still needs."""

    @abstractmethod
    async def distrust(self, donors: Sequence[PeerId]) -> None:
        """Take the vote of peers that gave a state which does not load."""

    @abstractmethod
    def _due(self) -> Due: ...

    @abstractmethod
    async def _end_idle(self) -> None:
        """An idle trainer goes on."""

    @abstractmethod
    def _check(self) -> None:
        """Raise what keeps this peer from training, such as `MismatchError`."""

    @abstractmethod
    async def _take_round(self, given: RoundInput, apply: Apply, *, aside: bool) -> RoundResult | None:
        """Average, `_settle` and return the result; None if there is no mean."""

    async def report(self, samples: float, *, dropped: str | None = None) -> Due:
        """Count a micro-batch and return what to do next; ``dropped``: why it does not count.

        Raises `MismatchError` if most others train with other settings.
        """
        if self.services.pace is not None:
            await asyncio.sleep(self.services.pace(samples))
        self._check()
        await self.on_gate()
        self._throughput.on_batch(samples, loop_now())
        await self._end_idle()
        own = self.progress.known.own
        if dropped is not None:
            self.services.events.emit(BatchDropped(loop_now(), dropped))
        else:
            self._computed += samples
            speed = self._throughput.samples_per_s
            batch_s = self._throughput.batch_s
            self._update(samples=own.samples + samples, samples_per_s=speed, batch_s=batch_s)
        return self._due()

    def _update(self, **changes: object) -> None:
        before = self.progress.known.own
        self.progress.known.own = msgspec.structs.replace(self.progress.known.own, **changes)
        if changes.keys() & {"syncing", "paused", "idle"} and self.progress.known.own != before:
            self._moved.set()

    def _due_alone(self, samples: float) -> Due:
        """Return what is due after these samples of all peers since the last round."""
        steps = samples / self._settings.target_batch_size
        if self._settings.local_steps == 1 or steps < self._steps_alone + 1:
            return "nothing"
        self._steps_alone += 1
        return "a local step"

    async def on_gate(self) -> None:
        """Publish that this peer was paused or resumed, so that no round waits for it."""
        if (paused := self.services.gate.closed) != self.progress.known.own.paused:
            # Idle first (see `_end_idle`): two peers that resume together must not outvote a third.
            self._update(paused=paused, idle=not paused)
            if paused:
                self._throughput.wait()
            else:
                self._throughput.work(loop_now())
            self._wake.set()

    async def wait_due(self, deadline: float) -> Due:
        await self.on_gate()
        self._throughput.wait()
        await self._end_idle()
        while (due := self._due()) == "nothing" and loop_now() < deadline:
            self._check()
            self._wake.clear()
            await wait_until(deadline, self._wake)
        self._throughput.work(loop_now())
        return due

    async def average(self, given: RoundInput, apply: Apply, *, aside: bool = False) -> RoundResult | None:
        """Average in the round of this peer's step, apply the mean and advance one step.

        An interrupt does not stop ``apply``: parameters and record must agree.
        ``aside``: the trainer computes on meanwhile. Returns None if there is no mean.
        """
        if given.loss is not None:
            self._update(loss=given.loss)
        if aside:
            self._averaging_aside = True
            self._steps_alone = 0
            self._update(samples=0.0)
        try:
            result = await self._take_round(given, apply, aside=aside)
            if result is None and aside:
                self._update(samples=self.progress.known.own.samples + given.samples)  # for the next try
            return result
        finally:
            self._averaging_aside = False
            self._wake.set()

    async def _settle(self, applying: Coroutine[Any, Any, None]) -> None:
        self._settling = asyncio.create_task(applying, name="apply")
        await asyncio.shield(self._settling)

    def _advance(self, lineage: bytes, result: RoundResult, *, aside: bool) -> None:
        """Move one step further, after the mean of a round was applied."""
        if not aside:
            self._steps_alone = 0
        self.progress.known.advance(lineage, samples=self.progress.known.own.samples if aside else 0.0)
        self._moved.set()
        step = self.progress.known.own.step
        samples = result.samples
        now = loop_now()
        everyone = [member.id for member in result.group.members]
        self.progress.on_round(everyone, step, lineage, samples=samples, now=now)
        self.services.events.emit(
            StepFinished(now, step, sum(samples.values()), self.progress.known.own.loss)
        )

    async def settled(self) -> None:
        """Wait until an update that an interrupt does not stop is applied and recorded."""
        if self._settling is not None:
            await asyncio.wait([self._settling])
