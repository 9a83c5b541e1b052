"""The one background thread and its event loop, the gate that pauses it, the device thread, free memory.

A task on Jupyter's own loop gets no time while a cell is busy, so all coroutines of the package run
on a thread of their own. All threads are daemons, because a non-daemon thread makes a kernel
restart skip atexit. The host's loop is never touched, nor are its signal handlers, except that an interrupt
is put off while a step is taken: `uninterrupted`.
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
LOOK_S = 0.2  # between two looks of a task that waits at the gate
POLL_S = 0.2
_FULL_S = 60.0  # between two lines that no more files can be opened


def loop_now() -> float:
    return asyncio.get_running_loop().time()


def own_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop of asyncio's own, whatever the event loop policy of this process."""
    # The links' buffered protocols get no bytes on a loop of uvloop, which some servers set as the policy.
    kind: type[asyncio.AbstractEventLoop] = getattr(asyncio, "ProactorEventLoop", asyncio.SelectorEventLoop)
    loop = kind()
    loop.set_exception_handler(_HandleException())
    return loop


async def on_loop(work: Callable[[], T]) -> T:
    """Return ``work()``; for `Runner.call`, which runs coroutines only."""
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
        """Call ``work`` after each period until `cancel`, even if it failed; slow work rests longer."""
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
        """Cancel all; return the tasks, which are ending."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        return tasks


class _HandleException:
    """Logs what a loop caught; that no more files can be opened is one line a minute."""

    def __init__(self) -> None:
        self._told_at = float("-inf")

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
            return
        # asyncio says so for each connection that waits, a hundred times a second
        if loop.time() - self._told_at >= _FULL_S:
            self._told_at = loop.time()
            logger.warning("%s: no connection can be accepted. See `ulimit -n`", error.strerror)


def wake(event: asyncio.Event) -> None:
    """Set the event for a moment: all that wait for it go on."""
    event.set()
    event.clear()


async def wait_until(deadline: float | None, event: asyncio.Event) -> None:
    """Return when the event is set, or at ``deadline`` (loop time; None: there is none)."""
    with suppress(TimeoutError):
        async with asyncio.timeout_at(deadline):
            await event.wait()


class PauseGate:
    """Closed in blocks (``with swarm.paused():``), which nest, and from `hold` to `release`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: Counter[int] = Counter()  # by thread
        self._held = False

    @property
    def closed(self) -> bool:
        return self._held or bool(self._blocks)

    @property
    def closed_by_this_thread(self) -> bool:
        """Whether the calling thread is inside a block: it must not wait for its end."""
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
        """Run ``coroutine`` and wait for its result; an interrupt cancels it and is raised."""

    def time(self) -> float:
        """Return the loop's clock, seconds. Thread-safe."""

    def while_waiting(self, work: Callable[[], None]) -> None:
        """Call the method ``work``, held weakly, at the end of each `call` of this thread, and while it waits."""


class Pool(ThreadPoolExecutor):
    """Threads for blocking work; when the process ends, and Python starts no more, it works at once."""

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
        """Do as `Runner.call`; RuntimeError on the runtime thread itself, where waiting never ends."""
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
    """Wait in short steps, as Windows needs; after each, do the work that ``meanwhile`` returns."""
    while True:
        try:
            return future.result(POLL_S)
        except NotYet:
            if future.done():  # the coroutine itself raised a TimeoutError
                return future.result()
            if meanwhile is not None and (work := meanwhile()) is not None:
                work()


def uninterrupted(work: Callable[[], T]) -> T:
    """Run ``work`` to its end even if the user interrupts; the interrupt is raised afterwards.

    Only the main thread is interrupted, and only by the signal's handler, which waits here.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):  # interrupts are ignored, or not Python's
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
    """Runs functions one after the other; errors go to the caller's future.

    One thread owns a device, so that two threads never call one module, such as an expert.
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
        """Accept no more functions; queued ones still run in any case. Idempotent."""
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
    """Return the available main memory within a container's limit; None if it is not reported."""
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
