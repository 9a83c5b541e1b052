"""Peers' ordinary, blocking code on virtual time: threads that take strict turns with one virtual event loop.

Each simulated peer runs the user's training function in a thread of its own. At any moment exactly one of all threads
runs: the loop's, or one peer's. A peer's thread runs from the answer to its last blocking call until its next one,
while virtual time stands still; so a run depends on its seeds alone, as if there were no threads.

Virtual time: an event loop whose clock jumps to the next timer as soon as nobody has anything to do.

A simulated day takes as long as its computations. The clock stands still while callbacks are ready, so that a
run depends on its seeds alone; for the same reason functions given to an executor run at once, in its thread.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar, TypeVarTuple

from colab_swarm.runtime import wait_interruptibly

T = TypeVar("T")

Ts = TypeVarTuple("Ts")


class _JumpingSelector(selectors.DefaultSelector):
    """Instead of waiting ``timeout`` seconds, moves the loop's clock on by as much."""

    loop: VirtualTimeLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        if timeout is None:
            raise RuntimeError("deadlock: every task is waiting and no timer is set")
        self.loop.advance(timeout)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An asyncio event loop on virtual time, which begins at 0."""

    def __init__(self) -> None:
        self._now = 0.0
        selector = _JumpingSelector()
        selector.loop = self
        super().__init__(selector)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the clock on."""
        self._now += seconds

    def run_in_executor(self, executor: Any, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Call ``func`` at once: a pool thread would finish at a moment that no seed decides."""
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # not contained: whoever awaits gets it
            done.set_exception(error)
        return done


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` on a fresh virtual clock; cancel what it leaves behind and close the loop.

    Raises:
        RuntimeError: deadlock: everything waits and no timer is set.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


def virtual_time() -> float:
    """Seconds on the clock of the running loop."""
    return asyncio.get_running_loop().time()


class SimulationStopped(BaseException):
    """Raised in a peer's thread when the simulation is closed under it; not an Exception, so that it unwinds."""


class _Turn:
    """Whose turn it is between the loop and one peer's thread."""

    def __init__(self) -> None:
        self._answer = threading.Semaphore(0)
        self._parked = threading.Semaphore(0)
        self.wanted: Coroutine[Any, Any, Any] | None = None
        self.future: asyncio.Task[Any] | None = None
        self.stopped = False

    def ask(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """On the peer's thread: hand ``coroutine`` to the loop and wait until it is done."""
        if self.stopped:
            coroutine.close()
            raise SimulationStopped
        self.wanted = coroutine
        self._parked.release()
        self._answer.acquire()
        if self.stopped or self.future is None:
            raise SimulationStopped
        return self.future

    def finish(self) -> None:
        """On the peer's thread: it ends."""
        self.wanted = None
        self._parked.release()

    def give(self) -> Coroutine[Any, Any, Any] | None:
        """On the loop's thread: let the peer run; returns what it wants next, None if it ended."""
        self._answer.release()
        return self.next_wish()

    def next_wish(self) -> Coroutine[Any, Any, Any] | None:
        """On the loop's thread: wait until the peer asks or ends."""
        self._parked.acquire()
        return self.wanted


class SimRuntime:
    """Runs coroutines on virtual time, for the thread that made it and for the peers' threads it starts."""

    def __init__(self) -> None:
        self.loop = VirtualTimeLoop()
        self._turns: dict[int, _Turn] = {}

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run ``coroutine`` on virtual time and return its result."""
        turn = self._turns.get(threading.get_ident())
        if turn is None:
            return self._drive(coroutine)
        result: T = turn.ask(coroutine).result()
        return result

    def time(self) -> float:
        """Virtual seconds."""
        return self.loop.time()

    def while_waiting(self, work: Callable[[], None]) -> None:
        """Nothing to do: nobody waits on virtual time."""

    def _drive(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the loop until ``coroutine`` is done, in a thread: in a notebook this one has a loop running already."""
        task = self.loop.create_task(coroutine)
        task.add_done_callback(lambda _: self.loop.stop())
        done: Future[None] = Future()

        def body() -> None:
            try:
                self.loop.run_forever()
                done.set_result(None)
            except RuntimeError as error:  # deadlock: nothing would ever happen again
                done.set_exception(error)

        threading.Thread(target=body, name="colab-swarm-simulation", daemon=True).start()
        try:
            wait_interruptibly(done)
        except KeyboardInterrupt:
            self.loop.call_soon_threadsafe(task.cancel)
            wait_interruptibly(done)
            raise
        return task.result()

    async def run_thread(self, work: Callable[[], T], name: str) -> T:
        """Run blocking ``work`` in a thread that takes turns with the loop; its error is raised here."""
        turn = _Turn()
        results: list[T] = []
        errors: list[BaseException] = []

        def body() -> None:
            self._turns[threading.get_ident()] = turn
            try:
                results.append(work())
            except BaseException as error:  # carried over to the awaiting task, SimulationStopped included
                errors.append(error)
            finally:
                del self._turns[threading.get_ident()]
                turn.finish()

        threading.Thread(target=body, name=name, daemon=True).start()
        await self._take_turns(turn)
        if errors and isinstance(errors[0], SystemExit | KeyboardInterrupt):  # these would end the loop
            raise RuntimeError(f"{name} called for the end of the whole process") from errors[0]
        if errors:
            raise errors[0]
        return results[0]

    async def _take_turns(self, turn: _Turn) -> None:
        wish = turn.next_wish()
        try:
            while wish is not None:
                turn.future = asyncio.ensure_future(wish)
                await asyncio.wait([turn.future])
                wish = turn.give()
        except asyncio.CancelledError:
            if turn.future is not None:
                turn.future.cancel()
            turn.stopped = True
            turn.give()  # whatever the peer asks from now on, it gets SimulationStopped
            raise

    def close(self) -> None:
        """Cancel what still runs, let the peers' threads unwind and close the loop. Idempotent."""
        if not self.loop.is_closed():
            self._drive(self._cancel_all())
            self.loop.close()

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
