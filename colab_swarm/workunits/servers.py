"""Parameter servers: they merge accepted results into the parameters.

Any number of them work on one store, each on a thread or in a process of its own. They know nothing of each other or of
the coordinator, and hold no state.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from colab_swarm.errors import StoreError
from colab_swarm.workunits.job import Evaluator, Job
from colab_swarm.workunits.messages import Backoff
from colab_swarm.workunits.state import Measured
from colab_swarm.workunits.store import KEEP_MEMORY, ParameterStore, open_store
from colab_swarm.workunits.weights import Floats, assimilate

logger = logging.getLogger(__name__)
CROWD, GROW_S, SHRINK_S = 2.0, 2.0, 30.0
LEASE_S = 120.0
"""A result whose server died goes to another after this time."""
IDLE_S, FAREWELL_S, LONGEST_PAUSE_S = 0.05, 30.0, 60.0
MOST_SERVERS = max(1, (os.cpu_count() or 1) - 1)
"""By default: less one processor for the coordinator."""


class ParameterServer:
    """Assimilate results of the store until stopped; measure the accuracy after each. ``name`` is for the log."""

    def __init__(self, store: ParameterStore, evaluator: Evaluator, name: str) -> None:
        self._store, self._evaluator, self._name = store, evaluator, name
        self._measured: list[Measured] = []  # not in the log yet

    def run(self, stop: threading.Event) -> None:
        """Serve until ``stop`` is set, then finish the current update. Store errors are retried."""
        trouble, wait_s = Backoff(random.Random(), 0.1, 30.0), 0.0
        while not stop.wait(wait_s):
            try:
                wait_s = 0.0 if self.run_once(time.time()) else IDLE_S
                trouble.succeeded()
            except StoreError as error:
                wait_s = trouble.failed()
                logger.warning("%s retries the store in %.1f s: %s", self._name, wait_s, error)

    def run_once(self, now: float) -> bool:
        """Assimilate one result; return False if none waits. After a StoreError the result is claimed again."""
        self._log()
        accepted = self._store.claim(self._name, now=now, lease_s=LEASE_S)
        if accepted is None:
            return False
        try:
            result = np.frombuffer(self._store.blob(accepted.result), "<f4")
        except KeyError:
            return True  # another server has assimilated it after our lease ended
        updated = result

        def update(server: Floats) -> Floats:
            nonlocal updated
            updated = assimilate(server, result, accepted.alpha)
            return updated

        if self._store.assimilate(accepted, update, server=self._name, now=now) is not None:
            accuracy = self._evaluator.accuracy(updated)
            self._measured.append(Measured(at=now, unit=accepted.unit, accuracy=accuracy))
            self._log()
        return True

    def _log(self) -> None:
        if self._measured:
            self._store.append(self._measured)
            self._measured = []


class ThreadWorker(threading.Thread):
    """A parameter server on a thread, for stores that other processes cannot open."""

    def __init__(self, store: ParameterStore, job: Job, name: str) -> None:
        super().__init__(name=f"parameter server {name}", daemon=True)
        self._store, self._job, self._end = store, job, threading.Event()
        self.start()

    def run(self) -> None:
        try:
            ParameterServer(self._store, Evaluator(self._job), self.name.rpartition(" ")[2]).run(self._end)
        except Exception:  # the pool replaces it
            logger.exception("%s failed", self.name)

    def stop(self) -> None:
        self._end.set()


class ProcessWorker:
    """A parameter server in its own process; ``store`` is an address, ``job`` a name, ``code`` a file.

    The first line of the process's input is the store's address: it may hold a password, and arguments are visible to
    every user of the machine. When the input closes, this process is dead, and the server exits at once.
    """

    def __init__(self, store: str, job: str, code: Path, name: str) -> None:
        with code.with_name("parameter-servers.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import serve; serve()", job, str(code), name],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=os.environ | KEEP_MEMORY,
                start_new_session=True,
            )
        assert self._process.stdin is not None  # it is a pipe
        self._input = self._process.stdin
        with contextlib.suppress(OSError):  # it is dead already: the pool notices
            self._input.write(f"{store}\n".encode())
            self._input.flush()

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        self._process.terminate()

    def join(self, timeout_s: float) -> None:
        """Wait until it has ended; after ``timeout_s`` kill it."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(OSError):
            self._input.close()


def serve() -> None:
    """Serve in a process that a `ProcessWorker` started, until SIGTERM, or until its input closes."""
    job, code, name = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    url = sys.stdin.readline().strip()
    threading.Thread(target=_exit_with_parent, name="parent watch", daemon=True).start()
    torch.set_num_threads(1)  # the coordinator adds servers until all processors are busy
    with contextlib.closing(open_store(url, job)) as store:
        ParameterServer(store, Evaluator(Job.load(code)), name).run(stop)


def _exit_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


class WorkerPool:
    """Keep as many parameter servers running as wanted. Dead ones are replaced, after ever longer pauses.

    ``start`` starts a server with the name given. ``deaths`` counts servers that ended without being stopped.
    """

    def __init__(
        self, start: Callable[[str], ThreadWorker | ProcessWorker], most: int = MOST_SERVERS
    ) -> None:
        self._start, self._most, self.deaths = start, most, 0
        self._running: list[ThreadWorker | ProcessWorker] = []
        self._stopping: list[ThreadWorker | ProcessWorker] = []
        self._started, self._pause_until = 0, 0.0
        self._few_since = self._idle_since = math.inf

    @property
    def size(self) -> int:
        return sum(one.is_alive() for one in self._running)

    def wanted(self, waiting: int, *, now: float) -> int:
        """Return how many servers to run while ``waiting`` results wait: one more or one less at a time.

        A server is added when for `GROW_S` more than `CROWD` results per server wait, up to ``most``; one is removed
        when for `SHRINK_S` none waits.
        """
        wanted = self.size
        self._few_since = min(self._few_since, now) if waiting > CROWD * wanted else math.inf
        self._idle_since = min(self._idle_since, now) if waiting == 0 else math.inf
        if now - self._few_since >= GROW_S:
            wanted, self._few_since = wanted + 1, now
        elif now - self._idle_since >= SHRINK_S:
            wanted, self._idle_since = wanted - 1, now
        return max(1, min(self._most, wanted))

    def keep(self, wanted: int, *, now: float) -> None:
        """Start, stop and replace servers, so that ``wanted`` run; ``now`` in seconds."""
        alive = [one for one in self._running if one.is_alive()]
        if died := len(self._running) - len(alive):
            self.deaths += died
            self._pause_until = now + min(LONGEST_PAUSE_S, 2.0 ** min(self.deaths, 16))
            logger.warning("%d parameter servers died, %d so far", died, self.deaths)
        self._running, surplus = alive[:wanted], alive[wanted:]
        for one in surplus:
            one.stop()
        self._stopping = [one for one in self._stopping + surplus if one.is_alive()]
        while len(self._running) < wanted and now >= self._pause_until:
            self._started += 1
            self._running.append(self._start(f"server-{self._started}"))

    def close(self) -> None:
        workers, self._running = self._running + self._stopping, []
        for one in workers:
            one.stop()
        for one in workers:
            one.join(FAREWELL_S)
