"""Virtual time, and a runtime in which the peers' ordinary blocking code runs on it.

The clock of a `VirtualTimeLoop` jumps to the next timer as soon as no callback is ready. It stands still while
callbacks are ready. So a simulated day takes only as long as its computations, and a run depends only on its seeds.

In a `SimRuntime`, each simulated peer runs the user's training function in its own thread. Exactly one thread runs
at any moment: the loop's thread, or the thread of one peer. A peer's thread runs until its next blocking call, while
virtual time stands still. So there are no races between threads.
"""

import asyncio
import selectors
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar, TypeVarTuple

from colab_swarm.net.peers import end_tasks
from colab_swarm.runtime import wait_interruptibly

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that does not wait for ``timeout`` seconds, but moves the loop's clock forward by this time."""

    loop: "VirtualTimeLoop"

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return []  # callbacks are ready, so the system need not be asked each time
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise RuntimeError("deadlock: every task is waiting and no timer is set")
        self.loop.now += timeout
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An asyncio event loop on virtual time, which starts at 0."""

    def __init__(self) -> None:
        self.now = 0.0
        selector = _JumpingSelector()
        selector.loop = self
        super().__init__(selector)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor: Any, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Call ``func`` immediately, because a pool thread would finish at a time that no seed determines."""
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # raised where the future is awaited
            done.set_exception(error)
        return done


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` on a new virtual clock, then cancel all tasks that it left; raises RuntimeError at a deadlock."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


class SimulationStopped(BaseException):
    """Raised in a peer's thread when the simulation is closed; no `Exception`, so that user code does not catch it."""


class _Turn:
    """Passes control back and forth between the loop's thread and one peer's thread."""

    def __init__(self) -> None:
        self.answered = threading.Semaphore(0)
        self.parked = threading.Semaphore(0)
        self.wanted: Coroutine[Any, Any, Any] | None = None
        self.task: asyncio.Task[Any] | None = None
        self.stopped = False

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Let the loop run ``coroutine``, and wait until it is done. Called on the peer's thread."""
        if self.stopped:
            coroutine.close()
            raise SimulationStopped
        self.wanted = coroutine
        self.parked.release()
        self.answered.acquire()
        if self.stopped or self.task is None:
            raise SimulationStopped
        return self.task

    def next_call(self) -> Coroutine[Any, Any, Any] | None:
        """Wait for the peer's next call; return None if its thread has ended. Called on the loop's thread."""
        self.parked.acquire()
        return self.wanted


class SimRuntime:
    """A `Runner` on virtual time, for the thread that made it and for the peers' threads that it starts."""

    def __init__(self) -> None:
        self.loop = VirtualTimeLoop()
        self._turns: dict[int, _Turn] = {}

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        turn = self._turns.get(threading.get_ident())
        if turn is None:
            return self._drive(coroutine)
        result: T = turn.run(coroutine).result()
        return result

    def time(self) -> float:
        return self.loop.now

    def while_waiting(self, work: Callable[[], None]) -> None:
        pass  # no thread waits on virtual time

    def _drive(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the loop in another thread until ``coroutine`` is done: a notebook's own thread has a running loop."""
        task = self.loop.create_task(coroutine)
        task.add_done_callback(lambda _: self.loop.stop())
        done: Future[None] = Future()

        def body() -> None:
            try:
                self.loop.run_forever()
                done.set_result(None)
            except RuntimeError as error:  # a deadlock: no timer and no callback is left
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
        """Run blocking ``work`` in a thread that takes turns with the loop; an error of ``work`` is raised here."""
        turn = _Turn()
        finished = Future[T]()

        def body() -> None:
            self._turns[threading.get_ident()] = turn
            try:
                finished.set_result(work())
            except BaseException as error:  # raised in the awaiting task, even SimulationStopped
                finished.set_exception(error)
            finally:
                del self._turns[threading.get_ident()]
                turn.wanted = None
                turn.parked.release()

        threading.Thread(target=body, name=name, daemon=True).start()
        call = turn.next_call()
        try:
            while call is not None:
                turn.task = asyncio.ensure_future(call)
                await asyncio.wait([turn.task])
                turn.answered.release()
                call = turn.next_call()
        except asyncio.CancelledError:
            if turn.task is not None:
                turn.task.cancel()
            turn.stopped = True
            turn.answered.release()
            turn.next_call()  # from now on, every call of the peer raises SimulationStopped
            raise
        error = finished.exception()
        if isinstance(error, SystemExit | KeyboardInterrupt):  # raised here, these would end the loop
            raise RuntimeError(f"{name} called for the end of the whole process") from error
        return finished.result()

    def close(self) -> None:
        """Cancel all tasks, end the peers' threads and close the loop. Idempotent."""
        if not self.loop.is_closed():
            self._drive(self._cancel_all())
            self.loop.close()

    async def _cancel_all(self) -> None:
        await end_tasks(*asyncio.all_tasks().difference({asyncio.current_task()}))
