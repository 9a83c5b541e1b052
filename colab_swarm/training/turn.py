"""Whose turn an optimizer is: the trainer's, unless the peer is paused, or leaves because the session ends.

Somebody else than the trainer may close an optimizer, on another thread: when the platform's session is about to end.
It must not change the model while the trainer computes with it. So it asks (`Turn.end`), and the trainer's own next
call hands over, closes, and raises why.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from colab_swarm.pausing import Gate
from colab_swarm.runtime import Runs


class Turn:
    """One thread at a time, and none after the end.

    Attributes:
        closed: set at the end.

    Args:
        runtime: waits at the gate.
        gate: closed while the peer is paused.
        close: hands over for so many seconds, and closes.
    """

    def __init__(self, runtime: Runs, gate: Gate, close: Callable[[float], None]) -> None:
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
