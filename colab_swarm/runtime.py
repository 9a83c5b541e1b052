"""The one background thread and its event loop, the gate that pauses it, the device thread, free memory.

A task on Jupyter's event loop gets no time while a cell is busy, so all coroutines of the package run on a
thread of the package. All threads are daemons, because a non-daemon thread makes a kernel restart skip atexit.
The package changes neither Jupyter's event loop nor the signal handlers of the process, with one exception: an
interrupt waits until a step has ended (`uninterrupted`).
"""

import asyncio
import errno
import logging
import os
import random
import re
import signal
import threading
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any, ClassVar, ParamSpec, Protocol, TypeVar

from colab_swarm.errors import PeerError
from colab_swarm.events import EventLog, Fault

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
LOOK_S = 0.2  # a task that waits at the gate checks it this often
POLL_S = 0.2
_FULL_S = 60.0  # least time between two log lines that no more files can be opened


def loop_now() -> float:
    return asyncio.get_running_loop().time()


def own_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop of asyncio itself, even if this process has another event loop policy."""
    # Some servers set uvloop as the policy. The links' buffered protocols get no bytes on a loop of uvloop.
    kind: type[asyncio.AbstractEventLoop] = getattr(asyncio, "ProactorEventLoop", asyncio.SelectorEventLoop)
    loop = kind()
    loop.set_exception_handler(_HandleException())
    return loop


async def on_loop(work: Callable[[], T]) -> T:
    """Return ``work()``, as a coroutine, because `Runner.call` runs only coroutines."""
    return work()


class BackgroundTasks:
    """The background tasks of one service, on the event loop; ``what`` names them in a `Fault`."""

    def __init__(self, what: str, events: EventLog, rng: random.Random) -> None:
        self._what = what
        self._events = events
        self._rng = rng
        self._tasks: dict[asyncio.Task[Any], None] = {}

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work, name=self._what)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    def every(self, period_s: float, work: Callable[[], Awaitable[object]], *, rest: float = 0.0) -> None:
        """Call ``work`` after each period until `cancel`, also after a failed call.

        The pause before a call is at least ``rest`` times as long as the last call took.
        """
        self.spawn(self._repeat(period_s, work, rest))

    async def _repeat(self, period_s: float, work: Callable[[], Awaitable[object]], rest: float) -> None:
        took_s = 0.0
        now = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(max(period_s, rest * took_s) * self._rng.uniform(0.8, 1.0))
            began = now()
            try:
                await work()
            except PeerError as error:
                logger.info("%s will retry: %s", self._what, error)
            except Exception as error:
                logger.exception("%s failed", self._what)
                self._events.emit(Fault.of(now(), self._what, error))
            took_s = now() - began

    def cancel(self) -> list[asyncio.Task[Any]]:
        """Cancel all tasks and return them; they may need a moment to end."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        return tasks


class _HandleException:
    """Logs the exceptions that a loop caught; that no more files can be opened is logged once a minute."""

    def __init__(self) -> None:
        self._told_at = float("-inf")

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
            return
        # asyncio reports this for each waiting connection, a hundred times a second
        if loop.time() - self._told_at >= _FULL_S:
            self._told_at = loop.time()
            logger.warning("%s: no connection can be accepted. See `ulimit -n`", error.strerror)


def wake(event: asyncio.Event) -> None:
    """Set the event and clear it again: all tasks that wait for it continue."""
    event.set()
    event.clear()


async def wait_until(deadline: float | None, event: asyncio.Event) -> None:
    """Return when the event is set, or at ``deadline`` (loop time; None: no deadline)."""
    with suppress(TimeoutError):
        async with asyncio.timeout_at(deadline):
            await event.wait()


class PauseGate:
    """A gate at which background work waits while it is closed. Thread-safe.

    It is closed inside ``with swarm.paused():`` blocks, which may nest, and from `hold` to `release`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: Counter[int] = Counter()  # by thread
        self._held = False

    @property
    def closed(self) -> bool:
        return self._held or bool(self._blocks)

    @property
    def closed_by_this_thread(self) -> bool:
        """Whether the calling thread is inside a block; it must not wait for the end of this block."""
        return threading.get_ident() in self._blocks

    def hold(self) -> None:
        self._held = True

    def release(self) -> None:
        self._held = False

    @contextmanager
    def block(self) -> Iterator[None]:
        thread = threading.get_ident()
        with self._lock:
            self._blocks[thread] += 1
        try:
            yield
        finally:
            with self._lock:
                self._blocks[thread] -= 1
                self._blocks += Counter()  # drops zeros

    async def wait_open(self) -> None:
        while self.closed:
            await asyncio.sleep(LOOK_S)

    def __repr__(self) -> str:
        return f"PauseGate({'closed' if self.closed else 'open'})"


class Runner(Protocol):
    """Runs coroutines: the background thread, or a simulation on virtual time."""

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run ``coroutine`` and return its result; an interrupt cancels the coroutine and raises KeyboardInterrupt."""

    def time(self) -> float:
        """Return the time of the loop's clock, in seconds. Thread-safe."""

    def while_waiting(self, work: Callable[[], None]) -> None:
        """Call the method ``work`` while a `call` of this thread waits, and at its end; ``work`` is held weakly."""


class Pool(ThreadPoolExecutor):
    """Threads for blocking work. While the process ends, Python starts no threads; then `submit` does the work."""

    def submit(self, work: Callable[P, T], /, *args: P.args, **named: P.kwargs) -> Future[T]:
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
    """One daemon thread with its own event loop; a `Runner`."""

    _shared: "ClassVar[Runtime | None]" = None
    _shared_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        # never asyncio.run or get_event_loop: this kernel may have applied nest_asyncio
        self._loop = own_loop()
        self._loop.set_default_executor(Pool(thread_name_prefix="colab-swarm-pool"))
        self._meanwhile = threading.local()  # .work of each thread
        self._thread = threading.Thread(target=self._loop.run_forever, name="colab-swarm", daemon=True)
        self._thread.start()

    @classmethod
    def shared(cls) -> "Runtime":
        """Return the runtime of this process, started on first use."""
        with cls._shared_lock:
            if cls._shared is None or not cls._shared._thread.is_alive():
                cls._shared = cls()
            return cls._shared

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Do as `Runner.call`. Raises RuntimeError on the runtime thread itself, where it would wait forever."""
        problem = ""
        if threading.current_thread() is self._thread:
            problem = "a blocking call from the runtime thread would never end: `await` the coroutine instead"
        elif not self._thread.is_alive():
            problem = "the runtime thread has stopped (a fork of the process?): restart the kernel"
        if problem:
            coroutine.close()
            raise RuntimeError(problem)
        future: Future[T] | None = None
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            meanwhile = getattr(self._meanwhile, "work", None)
            result = wait_interruptibly(future, meanwhile)
            if meanwhile is not None and (work := meanwhile()) is not None:
                work()
            return result
        except KeyboardInterrupt:
            if future is not None:
                future.cancel()
            raise

    def time(self) -> float:
        return self._loop.time()

    def while_waiting(self, work: Callable[[], None]) -> None:
        self._meanwhile.work = weakref.WeakMethod(work)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


def wait_interruptibly(
    future: Future[T], meanwhile: Callable[[], Callable[[], None] | None] | None = None
) -> T:
    """Return the future's result; wait in short steps, as interrupts on Windows need.

    After each step, run the function that ``meanwhile`` returns, if it returns one.
    """
    while True:
        try:
            return future.result(POLL_S)
        except NotYet:
            if future.done():  # the coroutine itself raised a TimeoutError
                return future.result()
            if meanwhile is not None and (work := meanwhile()) is not None:
                work()


def uninterrupted(work: Callable[[], T]) -> T:
    """Run ``work`` to its end even if the user interrupts it; raise the interrupt afterwards.

    Only the main thread is interrupted, and only by the handler of the signal. This function puts that handler off.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):  # interrupts are ignored, or Python does not handle them
        return work()
    interrupts: list[FrameType | None] = []

    def put_off(_number: int, frame: FrameType | None) -> None:
        interrupts.append(frame)

    signal.signal(signal.SIGINT, put_off)
    try:
        return work()
    finally:
        signal.signal(signal.SIGINT, handler)
        if interrupts:
            handler(signal.SIGINT, interrupts[-1])


class DeviceThread(Executor):
    """Runs functions one after the other; an error of a function is set in the future that `submit` returned.

    One thread owns a device, so that two threads never call one module, such as an expert, at the same time.
    The daemon thread starts with the first function. In a simulation, the event loop of
    `colab_swarm.sim` runs the functions itself.
    """

    def __init__(self) -> None:
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._lock = threading.Lock()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a function; raises RuntimeError after `shutdown`."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the device thread was shut down: it accepts no more work")
            self._tasks.put((future, lambda: fn(*args, **kwargs)))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="colab-swarm-device", daemon=True)
                self._thread.start()
        return future

    def run(self, function: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self, function)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more functions; queued functions still run. Idempotent."""
        with self._lock:
            self._closed = True
            self._tasks.put(None)
        if wait and self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, function = task
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:  # even SystemExit: the thread must survive a user's module
                    future.set_exception(error)
            del task, future, function  # do not hold arrays while waiting for the next task


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_ram_bytes(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int | None:
    """Return the available main memory, at most what the container's limit leaves; None if it is not reported."""
    try:
        available = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())
    except OSError:  # macOS and Windows
        return None
    if available is None:
        return None
    free_bytes = 1024 * int(available[1])
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = (cgroup / "memory.current").read_text().strip()
    except OSError:
        return free_bytes
    if limit.isdigit():
        return min(free_bytes, max(0, int(limit) - int(used)))
    return free_bytes
