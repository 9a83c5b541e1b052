"""A peer for as long as its session lasts: it stands still when its user needs the machine, and leaves in time."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Unpack

from colab_swarm.collaborator import Collaborator
from colab_swarm.events import Fault
from colab_swarm.member import Who
from colab_swarm.presence import Presence
from colab_swarm.runtime import Runs
from colab_swarm.session_clock import SessionClock, wait_for_end
from colab_swarm.snapshot import SessionTime
from colab_swarm.training.settings import Services

logger = logging.getLogger(__name__)
PATIENCE_S = 120.0
"""How long the trainer's next step is waited for when the session ends."""
HAND_OVER_S = 60.0
"""How long a last round may take then."""


class SessionPeer(Collaborator, ABC):
    """One peer of a run, in one session of a platform."""

    def __init__(self, runtime: Runs, services: Services, **who: Unpack[Who]) -> None:
        super().__init__(runtime, services, **who)
        self._clock: SessionClock | None = None
        self._stops: list[Callable[[], None]] = []

    @abstractmethod
    def leave(self, *, hand_over_s: float = 0.0) -> None:
        """Leave the run and close all links."""

    @property
    def folder(self) -> Path | None:
        """What keeps this peer; None if nothing does."""
        keeping = None if self._presence is None else self._presence.keeping
        return None if keeping is None else keeping.folder

    # --- pausing --------------------------------------------------------------------------------------------------

    @contextmanager
    def paused(self) -> Iterator[None]:
        """``with swarm.paused():`` lets this peer's background work stand still while you need the machine.

        Hosted experts and work units wait, and no round waits for this peer. Afterwards it catches up. Links stay, and
        what others ask of the state that is here is still answered. Blocks may be nested; do not train inside.
        """
        try:
            with self._services.gate.block():
                self._tell_paused()
                yield
        finally:
            self._tell_paused()

    def pause(self) -> None:
        """Let background work stand still until `unpause`, and training cells wait. Idempotent."""
        self._services.gate.hold()
        self._tell_paused()

    def unpause(self) -> None:
        """Go on after `pause`; a ``with swarm.paused():`` that is under way lasts to its end. Idempotent."""
        self._services.gate.release()
        self._tell_paused()

    def _tell_paused(self) -> None:
        for optimizer in (
            list(self._optimizers.values()) if not self.left else ()
        ):  # buttons call on other threads
            self._runtime.call(optimizer.collaboration.heed_gate())

    # --- the session's end ----------------------------------------------------------------------------------------

    @property
    def session(self) -> SessionTime | None:
        """How long this session may last, and when this peer leaves it; None where no end is known."""
        return None if self._clock is None else self._clock.read(self._runtime.time())

    def begin_session(self, clock: SessionClock | None) -> None:
        """Leave by this clock; None: no end is known."""
        self._clock = clock
        if clock is not None and self._presence is not None:
            self._runtime.call(self._begin_timer(self._presence, clock))

    async def _begin_timer(self, presence: Presence, clock: SessionClock) -> None:
        presence.node.linker.spawn(self._leave_in_time(clock))  # until the node is closed

    async def _leave_in_time(self, clock: SessionClock) -> None:
        await wait_for_end(clock, self.events)
        # leaving blocks, and ends the task that this is
        threading.Thread(
            target=self._end_session, args=(clock,), name="colab-swarm-leave", daemon=True
        ).start()

    def at_session_end(self, stop: Callable[[], None]) -> None:
        """Before this peer leaves because the session ends, call ``stop``: work that others wait for goes back."""
        self._stops.append(stop)

    def _end_session(self, clock: SessionClock) -> None:
        """On a thread of its own: let the trainer hand over, give work back, leave; a failure skips none of these."""
        most_s = clock.leave_before_s / 4
        hand_over = partial(
            self._let_trainers_leave, clock, min(PATIENCE_S, most_s), min(HAND_OVER_S, most_s)
        )
        parts: list[Callable[[], None]] = [hand_over, *self._stops, self.leave]
        for end in parts:
            try:
                end()
            except Exception as error:
                logger.exception("leaving at the session's end failed")
                self.events.emit(Fault.of(self._runtime.time(), "leaving at the session's end", error))

    def _let_trainers_leave(self, clock: SessionClock, patience_s: float, hand_over_s: float) -> None:
        again = "join again in a new one"
        if self.folder is not None:
            again = f"go on in a new one with cs.resume({str(self.folder)!r})"
        why = f"this peer has handed over and left before its session ends ({clock.reason}): {again}"
        deadline = self._runtime.time() + patience_s
        optimizers = list(self._optimizers.values())
        for optimizer in optimizers:
            optimizer.turn.end(why, hand_over_s=hand_over_s)
        for optimizer in optimizers:  # one that nobody calls any more is closed by `leave`
            optimizer.turn.closed.wait(max(0.0, deadline - self._runtime.time()))
