"""The one background thread and its event loop; blocking calls into it.

A task on Jupyter's own loop gets no time while a cell is busy, so every coroutine of the package runs on a thread
of its own. Rules: all threads are daemons (a non-daemon thread makes a kernel restart skip atexit);
the host's signal handlers and its loop are never touched; blocking calls are short waits, so that an interrupt is
seen at once on every platform, and an interrupt cancels the coroutine.

A gate before the work that goes on in the background: closed while the user wants the machine for something else.

There are two ways to close it: for a block of code (``with swarm.paused():``), which nests, and until further notice,
as a panel's button does. It is open when no block is under way and nobody holds it.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import contextmanager
from typing import Any, ClassVar, ParamSpec, Protocol, TypeVar

LOOK_S = 0.2

"""How often who waits at the gate looks whether it is open."""


class PauseGate:
    """Any thread may close it, open it, or ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: Counter[int] = Counter()  # by thread
        self._held = False

    @property
    def closed(self) -> bool:
        """Whether background work is to stand still."""
        return self._held or bool(self._blocks)

    @property
    def closed_by_this_thread(self) -> bool:
        """Whether the calling thread is inside a block: waiting for the end of it would never end."""
        return threading.get_ident() in self._blocks

    def hold(self) -> None:
        """Close it until `release`. Idempotent."""
        self._held = True

    def release(self) -> None:
        """Take a `hold` back; blocks that are under way keep it closed. Idempotent."""
        self._held = False

    @contextmanager
    def block(self) -> Iterator[None]:
        """Closed inside the block; blocks may be nested."""
        thread = threading.get_ident()
        with self._lock:
            self._blocks[thread] += 1
        try:
            yield
        finally:
            with self._lock:
                self._blocks[thread] -= 1
                self._blocks += Counter()  # drops what is zero

    async def wait_open(self) -> None:
        """Return as soon as it is open."""
        while self.closed:
            await asyncio.sleep(LOOK_S)

    def __repr__(self) -> str:
        return f"Gate({'closed' if self.closed else 'open'})"


P = ParamSpec("P")

T = TypeVar("T")

POLL_S = 0.2


class Runner(Protocol):
    """Whoever runs our coroutines: the background thread, or a simulation on virtual time."""

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run ``coroutine``, wait for its result; an interrupt cancels it and is raised."""

    def time(self) -> float:
        """What the clock of the loop shows, seconds; any thread."""

    def while_waiting(self, work: Callable[[], None]) -> None:
        """Let the thread that says so call ``work`` now and then while it waits in `call`, and nothing else any more.

        Args:
            work: a method, which is forgotten when its object is; quick, and raises nothing.
        """


class Pool(ThreadPoolExecutor):
    """Threads for what blocks. At the end of the process, when Python takes no more work for threads and peers are
    leaving, it is done at once."""

    def submit(self, work: Callable[P, T], /, *args: P.args, **named: P.kwargs) -> Future[T]:
        """See `ThreadPoolExecutor.submit`."""
        try:
            return super().submit(work, *args, **named)
        except RuntimeError:
            done: Future[T] = Future()
            try:
                done.set_result(work(*args, **named))
            except BaseException as error:
                done.set_exception(error)
            return done


class Runtime:
    """One daemon thread with its own event loop."""

    _shared: ClassVar[Runtime | None] = None
    _shared_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        # never asyncio.run or get_event_loop: somebody may have applied nest_asyncio in this kernel
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(Pool(thread_name_prefix="colab-swarm-pool"))
        self._meanwhile = threading.local()  # .work of each thread
        self._thread = threading.Thread(target=self._run, name="colab-swarm", daemon=True)
        self._thread.start()

    @classmethod
    def shared(cls) -> Runtime:
        """The runtime of this process, started on first use."""
        with cls._shared_lock:
            if cls._shared is None or not cls._shared._thread.is_alive():
                cls._shared = cls()
            return cls._shared

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run ``coroutine`` on the runtime thread and wait for its result.

        Raises:
            RuntimeError: called from the runtime thread itself, where waiting would never end.
            KeyboardInterrupt: the user interrupted; the coroutine is being cancelled.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError(
                "a blocking call from the runtime thread would never end: `await` the coroutine instead"
            )
        if not self._thread.is_alive():
            coroutine.close()
            raise RuntimeError("the runtime thread has stopped (a fork of the process?): restart the kernel")
        future: Future[T] | None = None
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            return wait_interruptibly(future, getattr(self._meanwhile, "work", None))
        except KeyboardInterrupt:
            if future is not None:
                future.cancel()
            raise

    def time(self) -> float:
        """See `Runner`."""
        return self._loop.time()

    def while_waiting(self, work: Callable[[], None]) -> None:
        """See `Runner`."""
        self._meanwhile.work = weakref.WeakMethod(work)

    def close(self) -> None:
        """Stop the loop and join the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


def wait_interruptibly(
    future: Future[T], meanwhile: Callable[[], Callable[[], None] | None] | None = None
) -> T:
    """The future's result, waited for in short steps: one long wait cannot be interrupted on Windows.

    Args:
        meanwhile: gives what is to be done after each of them, or None.
    """
    while True:
        try:
            return future.result(POLL_S)
        except NotYet:
            if future.done():  # the coroutine itself raised a TimeoutError
                return future.result()
            if meanwhile is not None and (work := meanwhile()) is not None:
                work()
