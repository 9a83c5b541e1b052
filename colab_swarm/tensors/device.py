"""The one thread that computes: it owns the accelerator, so that an expert is never called by two at a time."""

from __future__ import annotations

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
    """Where experts live: the first CUDA device if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class DeviceThread(Executor):
    """Computes what it is given, one after the other, in order; a fault is its giver's and never the thread's end.

    A daemon, which the pool threads of `concurrent.futures` are not: they would keep a notebook's kernel from ending.
    It begins with the first thing to compute; on virtual time the loop computes itself, and there is no thread.
    """

    def __init__(self) -> None:
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._lock = threading.Lock()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See `concurrent.futures.Executor.submit`.

        Raises:
            RuntimeError: it was shut down.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the device thread has ended: its server is closed")
            self._tasks.put((future, lambda: fn(*args, **kwargs)))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="colab-swarm-device", daemon=True)
                self._thread.start()
        return future

    def run(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Compute ``function()`` on the thread; to be awaited on the running loop."""
        return asyncio.get_running_loop().run_in_executor(self, function)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take nothing more; what was given is still computed. Idempotent."""
        with self._lock:
            self._closed = True
            self._tasks.put(None)
        if wait and self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, function = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:  # SystemExit in a user's module, too, is an answer
                future.set_exception(error)
            del task, future, function  # arrays are not kept while waiting for the next
