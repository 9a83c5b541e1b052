"""One thread owns the accelerator, so that two threads never call one module, such as an expert, at a time."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def accelerator() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class DeviceThread(Executor):
    """Runs submitted functions one after the other, in order; errors go to the caller's future.

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
