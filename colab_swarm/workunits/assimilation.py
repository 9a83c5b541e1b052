"""What happens to a result: the validator checks it, a parameter server merges it into the parameters.

Any number of parameter servers work on one store, each on a thread or in a process of its own. They know nothing of
each other or of the coordinator, and hold no state: all that counts is in the store.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from colab_swarm.errors import StoreError
from colab_swarm.workunits.job import Evaluator, Job, WorkPlan
from colab_swarm.workunits.messages import Backoff
from colab_swarm.workunits.state import Measured
from colab_swarm.workunits.store import KEEP_MEMORY, ParameterStore, open_store
from colab_swarm.workunits.weights import Floats, assimilate, moved

logger = logging.getLogger(__name__)
LATEST = 100
KNOWN = 5
"""After this many accepted results the usual change of the parameters is known."""
FIRST_CHANGE = 1000.0
"""Until then a change may be this many times the parameters' norm, or the norm if each were 1."""
MOST = 1e18
"""Of a value: no mean of such values is infinite, and no square."""
LEASE_S = 120.0
"""A result whose server died goes to another after this time."""
IDLE_S, FAREWELL_S, LONGEST_PAUSE_S = 0.05, 30.0, 60.0


class Validator:
    """Check results one by one; the dispatcher compares replicas. ``plan``: of the job."""

    def __init__(self, plan: WorkPlan) -> None:
        self._max_change = plan.max_change
        self._changes: deque[float] = deque(maxlen=LATEST)

    def learn(self, change: float) -> None:
        """Take note of the ``change`` (L2 norm) of an accepted result."""
        self._changes.append(change)

    def judge(self, values: Floats, base: Floats) -> float:
        """Return the L2 norm of a result's change; raise ValueError if the result is refused.

        ``base``: parameters of about its start.
        """
        if len(values) != len(base):
            raise ValueError(f"{len(values):,} values, {len(base):,} expected")
        if bad := len(values) - int(np.count_nonzero(np.abs(values) <= MOST)):
            raise ValueError(
                f"{bad:,} of {len(values):,} values are not finite, or beyond {MOST:g}: a lower learning rate may help"
            )
        change = moved(values, base)
        if len(self._changes) < KNOWN:
            most = FIRST_CHANGE * max(float(np.linalg.norm(base)), len(base) ** 0.5)
            limit = f"over {most:.3g}"
        else:
            usual = statistics.median(self._changes)
            most = self._max_change * usual
            limit = (
                f"usually it is {usual:.3g} and {self._max_change:g} times as much is allowed (max_change)"
            )
        if change > most:
            raise ValueError(f"training moved the parameters by {change:.3g}, {limit}")
        return change


@dataclass
class Staffing:
    """Choose how many parameter servers run, following the backlog one server at a time. Free of I/O.

    Attributes:
        most: servers at once; by default the processors of this machine, less one for the coordinator.
        crowd: waiting results per server above which servers are too few.
        grow_s, shrink_s: time for which they must be too few, or nothing must have waited. Starting one takes seconds.
    """

    most: int = max(1, (os.cpu_count() or 1) - 1)
    crowd: float = 2.0
    grow_s: float = 2.0
    shrink_s: float = 30.0
    _few_since: float = math.inf
    _idle_since: float = math.inf

    def on_backlog(self, waiting: int, servers: int, *, now: float) -> int:
        """Return how many servers to run, if ``waiting`` results wait for ``servers``; ``now`` in seconds."""
        self._few_since = min(self._few_since, now) if waiting > self.crowd * servers else math.inf
        self._idle_since = min(self._idle_since, now) if waiting == 0 else math.inf
        wanted = servers
        if now - self._few_since >= self.grow_s:
            wanted, self._few_since = servers + 1, now
        elif now - self._idle_since >= self.shrink_s:
            wanted, self._idle_since = servers - 1, now
        return max(1, min(self.most, wanted))


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


def code_of_servers(job: Job) -> str:
    """Return the job's code for servers in processes, with the settings of its plan that measuring needs."""
    plan = f"seed={job.plan.seed}, validation_samples={job.plan.validation_samples}"
    return f"{job.code}\njob = job.with_plan({plan})\n"


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
    store = open_store(url, job)
    ParameterServer(store, Evaluator(Job.load(code)), name).run(stop)
    store.close()


def _exit_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


class WorkerPool:
    """Keep as many parameter servers running as wanted. Dead ones are replaced, after ever longer pauses.

    ``start`` starts a server with the name given; ``deaths`` counts servers that ended without being stopped.
    """

    def __init__(self, start: Callable[[str], ThreadWorker | ProcessWorker]) -> None:
        self._start, self.deaths = start, 0
        self._running: list[ThreadWorker | ProcessWorker] = []
        self._stopping: list[ThreadWorker | ProcessWorker] = []
        self._started, self._pause_until = 0, 0.0

    @property
    def size(self) -> int:
        return sum(one.is_alive() for one in self._running)

    def keep(self, wanted: int, *, now: float) -> None:
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
