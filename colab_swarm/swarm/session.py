"""What one peer does in a session: its training, pausing, and leaving before the platform ends the session."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from colab_swarm.events import Fault
from colab_swarm.notebook.platforms import SessionClock, wait_for_end
from colab_swarm.runtime import Runner
from colab_swarm.snapshot import SessionTime
from colab_swarm.training.arrays import ArrayAverages
from colab_swarm.training.assistant import Assistant
from colab_swarm.training.settings import PeerServices

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from colab_swarm.elastic.optimizer import ElasticOptimizer
    from colab_swarm.elastic.steps import ElasticSettings
    from colab_swarm.swarm.network import NetworkSession
    from colab_swarm.training.optimizer import SwarmOptimizer
    from colab_swarm.training.replica import UpdateRule
    from colab_swarm.training.settings import TrainingSettings

logger = logging.getLogger(__name__)
PATIENCE_S = 120.0  # for the trainer's next step when the session ends
HAND_OVER_S = 60.0  # for a last round then


@dataclass(frozen=True)
class PeerContext:
    """What every part of a `Swarm` uses; ``network`` is None in a simulation."""

    runtime: Runner
    services: PeerServices
    network: NetworkSession | None
    run_id: str
    name: str


class SwarmTraining:
    """The models that one peer trains with others.

    Attributes:
        optimizers, elastic: by the model's name.
        averages: averages of arrays.
        latest: the newest optimizer, which the panel shows; None if this peer trains nothing.
        assistance: this peer's help to others as a reducer; None without.
    """

    def __init__(self, context: PeerContext) -> None:
        self._context = context
        self.averages = ArrayAverages(context.services, context.run_id)
        self.latest: SwarmOptimizer | None = None
        self.optimizers: dict[str, SwarmOptimizer] = {}
        self.elastic: dict[str, ElasticOptimizer] = {}
        self.assistance: Assistant | None = None

    def optimizer(self, name: str, settings: TrainingSettings, rule: UpdateRule) -> SwarmOptimizer:
        """Start training a model; a model of the same name is replaced."""
        from colab_swarm.training.optimizer import SwarmOptimizer
        from colab_swarm.training.state import CheckpointFolder

        context = self._context
        if name in self.optimizers:
            self.optimizers.pop(name).close()
        store = None if context.network is None else context.network.store
        folder = None if store is None else CheckpointFolder(store.checkpoints(name), keep=2)
        optimizer = SwarmOptimizer(context.runtime, context.services, settings, rule, context.name, folder)
        self.latest = self.optimizers[name] = optimizer
        return optimizer

    def elastic_optimizer(
        self, name: str, settings: ElasticSettings, optimizer: Optimizer
    ) -> ElasticOptimizer:
        """Join an elastic group; a group of the same name is replaced."""
        from colab_swarm.elastic.group import enter_group
        from colab_swarm.elastic.optimizer import ElasticOptimizer

        runtime, services = self._context.runtime, self._context.services
        if name in self.elastic:
            self.elastic.pop(name).close()
        enter, events = partial(enter_group, services), services.events
        self.elastic[name] = ElasticOptimizer(runtime, optimizer, settings, enter, events, services.pace)
        return self.elastic[name]

    def serve_as_reducer(self, name: str | None) -> Assistant:
        """Start helping others; an earlier help ends."""
        if self.assistance is not None:
            self.assistance.stop()
        assistant = Assistant(
            self._context.runtime,
            self._context.services,
            self._context.run_id,
            name=self._context.name,
            collaboration=name,
        )
        self._context.runtime.call(assistant.start())
        self.assistance = assistant
        return assistant

    def on_pause(self) -> None:
        """Let every optimizer notice that the pause gate opened or closed. Thread-safe."""
        for optimizer in list(self.optimizers.values()):  # buttons call this on other threads
            self._context.runtime.call(optimizer.collaboration.on_gate())

    def closings(self, hand_over_s: float) -> list[Callable[[], object]]:
        """Return the calls that hand over and end all training, in order."""
        closings: list[Callable[[], object]] = []
        closings += [partial(one.close, hand_over_s=hand_over_s) for one in self.optimizers.values()]
        closings += [elastic.close for elastic in self.elastic.values()]
        return closings if self.assistance is None else [*closings, self.assistance.stop]

    def kill(self) -> None:
        """End like a killed process. For simulated crashes, on the runtime's loop."""
        for optimizer in self.optimizers.values():
            optimizer.collaboration.kill()
        for elastic in self.elastic.values():
            elastic.kill()
        if self.assistance is not None:
            self.assistance.kill()


class SwarmSession:
    """One peer's session on its platform.

    Attributes:
        stops: called before the peer leaves because its session ends: hosts and volunteers give their work back.
    """

    def __init__(self, context: PeerContext, training: SwarmTraining, leave: Callable[[], None]) -> None:
        self._context, self._training, self._leave = context, training, leave
        self._clock: SessionClock | None = None
        self.stops: list[Callable[[], None]] = []

    @property
    def folder(self) -> Path | None:
        """The folder that saves this peer; None without one."""
        store = None if self._context.network is None else self._context.network.store
        return None if store is None else store.folder

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause inside the block; see `Swarm.paused`."""
        try:
            with self._context.services.gate.block():
                self._training.on_pause()
                yield
        finally:
            self._training.on_pause()

    def pause(self, wanted: bool) -> None:
        """Pause or continue; see `Swarm.pause`."""
        gate = self._context.services.gate
        if wanted:
            gate.hold()
        else:
            gate.release()
        self._training.on_pause()

    def time(self) -> SessionTime | None:
        """Return how long this session may last and when this peer leaves; None if no end is known."""
        return None if self._clock is None else self._clock.read(self._context.runtime.time())

    def begin(self, clock: SessionClock | None) -> None:
        """Leave by this clock; None: no end is known."""
        self._clock = clock
        if clock is not None:
            self._context.runtime.call(self._start_timer(clock))

    async def _start_timer(self, clock: SessionClock) -> None:
        assert self._context.network is not None
        self._context.network.node.linker.spawn(self._leave_in_time(clock))  # until the node is closed

    async def _leave_in_time(self, clock: SessionClock) -> None:
        await wait_for_end(clock, self._context.services.events)
        # leaving blocks, and ends the task that this is
        threading.Thread(target=self._end, args=(clock,), name="colab-swarm-leave", daemon=True).start()

    def _end(self, clock: SessionClock) -> None:
        """Hand over, give work back, leave; a failure skips none of these. On its own thread."""
        ends: list[Callable[[], None]] = [partial(self._hand_over, clock), *self.stops, self._leave]
        for end in ends:
            try:
                end()
            except Exception as error:
                logger.exception("leaving at the session's end failed")
                now = self._context.runtime.time()
                self._context.services.events.emit(Fault.of(now, "leaving at the session's end", error))

    def _hand_over(self, clock: SessionClock) -> None:
        again = "join again in a new one"
        if self.folder is not None:
            again = f"continue in a new one with cs.resume({str(self.folder)!r})"
        why = f"this peer has handed over and left before its session ends ({clock.reason}): {again}"
        clock_s, most_s = self._context.runtime.time, clock.leave_before_s / 4
        deadline = clock_s() + min(PATIENCE_S, most_s)
        optimizers = list(self._training.optimizers.values())
        for optimizer in optimizers:
            optimizer.end(why, hand_over_s=min(HAND_OVER_S, most_s))
        for optimizer in optimizers:  # `leave` closes those that the user no longer steps
            optimizer.closed.wait(max(0.0, deadline - clock_s()))
