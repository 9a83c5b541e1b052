"""A peer's session on its platform: pausing while the user needs the machine, and leaving before the session ends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from colab_swarm.events import Fault
from colab_swarm.notebook.platforms import SessionClock, wait_for_end
from colab_swarm.snapshot import SessionTime
from colab_swarm.swarm.membership import PeerContext
from colab_swarm.swarm.network import NetworkSession
from colab_swarm.swarm.trained import SwarmTraining

logger = logging.getLogger(__name__)
PATIENCE_S = 120.0
"""How long to wait for the trainer's next step when the session ends."""
HAND_OVER_S = 60.0
"""How long a last round may take then."""


class SwarmSession:
    """One peer's session.

    Args:
        context: of the peer.
        training: what it trains; it hands over first.
        leave: leaves the swarm.

    Attributes:
        stops: called before the peer leaves because its session ends, so that work others wait for goes back.
    """

    def __init__(self, context: PeerContext, training: SwarmTraining, leave: Callable[[], None]) -> None:
        self._context, self._training, self._leave = context, training, leave
        self._clock: SessionClock | None = None
        self.stops: list[Callable[[], None]] = []

    @property
    def folder(self) -> Path | None:
        """Folder that saves this peer; None if nothing does."""
        keeping = None if self._context.network is None else self._context.network.keeping
        return None if keeping is None else keeping.folder

    # --- pausing --------------------------------------------------------------------------------------------------

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
        """Pause, or continue. Idempotent."""
        gate = self._context.services.gate
        if wanted:
            gate.hold()
        else:
            gate.release()
        self._training.on_pause()

    # --- the session's end ----------------------------------------------------------------------------------------

    def time(self) -> SessionTime | None:
        """Return how long this session may last and when this peer leaves; None if no end is known."""
        return None if self._clock is None else self._clock.read(self._context.runtime.time())

    def begin(self, clock: SessionClock | None) -> None:
        """Leave by this clock; None: no end is known."""
        self._clock = clock
        if clock is not None and self._context.network is not None:
            self._context.runtime.call(self._begin_timer(self._context.network, clock))

    async def _begin_timer(self, network: NetworkSession, clock: SessionClock) -> None:
        network.node.linker.spawn(self._leave_in_time(clock))  # until the node is closed

    async def _leave_in_time(self, clock: SessionClock) -> None:
        await wait_for_end(clock, self._context.services.events)
        # leaving blocks, and ends the task that this is
        threading.Thread(target=self._end, args=(clock,), name="colab-swarm-leave", daemon=True).start()

    def _end(self, clock: SessionClock) -> None:
        """Let the trainer hand over, give work back, leave; a failure skips none of these. On its own thread."""
        most_s = clock.leave_before_s / 4
        hand_over: Callable[[], object] = partial(
            self._hand_over, clock, min(PATIENCE_S, most_s), min(HAND_OVER_S, most_s)
        )
        endings: list[Callable[[], object]] = [hand_over, *self.stops, self._leave]
        for end in endings:
            try:
                end()
            except Exception as error:
                logger.exception("leaving at the session's end failed")
                fault = Fault.of(self._context.runtime.time(), "leaving at the session's end", error)
                self._context.services.events.emit(fault)

    def _hand_over(self, clock: SessionClock, patience_s: float, hand_over_s: float) -> None:
        again = "join again in a new one"
        if self.folder is not None:
            again = f"go on in a new one with cs.resume({str(self.folder)!r})"
        why = f"this peer has handed over and left before its session ends ({clock.reason}): {again}"
        deadline = self._context.runtime.time() + patience_s
        optimizers = list(self._training.optimizers.values())
        for optimizer in optimizers:
            optimizer.turn.end(why, hand_over_s=hand_over_s)
        for optimizer in optimizers:  # one that nobody calls any more is closed by `leave`
            optimizer.turn.closed.wait(max(0.0, deadline - self._context.runtime.time()))
