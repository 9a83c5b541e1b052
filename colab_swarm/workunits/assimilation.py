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

from colab_swarm.errors import StoreError
from colab_swarm.workunits.job import Evaluator, Job, WorkPlan
from colab_swarm.workunits.messages import Backoff
from colab_swarm.workunits.state import Measured
from colab_swarm.workunits.store import KEEP_MEMORY, ParameterStore
from colab_swarm.workunits.weights import Floats, assimilate

LATEST = 100
KNOWN = 5
"""After this many accepted results the usual change of the parameters is known."""
FIRST_CHANGE = 1000.0
"""Until then a change may be this many times the parameters' norm, or the norm if each were 1."""
MOST = 1e18
"""Of a value: no mean of such values is infinite, and no square."""
PIECE = 1 << 16


def moved(values: Floats, base: Floats) -> float:
    """Return the L2 norm of ``values - base``, both (numel,), summed in float64; not finite if a value is not."""
    total = 0.0
    with np.errstate(over="ignore", invalid="ignore"):  # a stranger's values may overflow
        for start in range(0, len(values), PIECE):
            piece = slice(start, start + PIECE)
            change = np.subtract(values[piece], base[piece], dtype=np.float64)
            total += float(change @ change)
    return float(np.sqrt(total))


class Validator:
    """Check results one by one; the dispatcher compares replicas. ``plan``: of the job."""

    def __init__(self, plan: WorkPlan) -> None:
        self._max_change = plan.max_change
        self._changes: deque[float] = deque(maxlen=LATEST)

    def learn(self, change: float) -> None:
        """Take note of the ``change`` (L2 norm) of an accepted result."""
        self._changes.append(change)

    def judge(self, values: Floats, base: Floats) -> str | None:
        """Return why a result is refused; None if it is good. ``base``: parameters of about its start."""
        if len(values) != len(base):
            return f"{len(values):,} values, {len(base):,} expected"
        bad = len(values) - int(np.count_nonzero(np.abs(values) <= MOST))
        if bad:
            return (
                f"{bad:,} of {len(values):,} values are not finite, or beyond {MOST:g}: "
                "a lower learning rate may help"
            )
        change = moved(values, base)
        if len(self._changes) < KNOWN:
            most = FIRST_CHANGE * max(float(np.linalg.norm(base)), len(base) ** 0.5)
            return (
                None if change <= most else f"training moved the parameters by {change:.3g}, over {most:.3g}"
            )
        usual = statistics.median(self._changes)
        if change <= self._max_change * usual:
            return None
        return (
            f"training moved the parameters by {change:.3g}, usually it is {usual:.3g} "
            f"and {self._max_change:g} times as much is allowed (max_change)"
        )


@dataclass
class Staffing:
    """Choose how many parameter servers run, following the backlog one server at a time. Free of I/O.

    Attributes:
        most: servers at once; by default the processors of this machine, less one for the coordinator.
        crowd: waiting results per server above which servers are too few.
        grow_s: time for which they must be too few before another starts.
        shrink_s: time for which nothing must have waited before one stops. Starting a process takes seconds.
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


logger = logging.getLogger(__name__)

LEASE_S = 120.0
"""A result whose server died goes to another after this time."""


class ParameterServer:
    """Assimilate results of the store until stopped; measure the accuracy after each. ``name`` is for the log."""

    def __init__(self, store: ParameterStore, evaluator: Evaluator, name: str) -> None:
        self._store, self._evaluator, self._name = store, evaluator, name
        self._measured: list[Measured] = []  # not in the log yet

    def run(self, stop: threading.Event) -> None:
        """Serve until ``stop`` is set, then finish the current update. Store errors are retried."""
        rng = random.Random()
        idle, trouble = Backoff(rng, 0.01, 0.1), Backoff(rng, 0.1, 30.0)
        wait_s = 0.0
        while not stop.wait(wait_s):
            try:
                busy = self.run_once(time.time())
            except StoreError as error:
                wait_s = trouble.failed()
                logger.warning("%s retries the store in %.1f s: %s", self._name, wait_s, error)
            else:
                trouble.succeeded()
                if busy:
                    idle.succeeded()
                wait_s = 0.0 if busy else idle.failed()

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


FAREWELL_S = 30.0
LONGEST_PAUSE_S = 60.0


class ThreadWorker:
    """A parameter server on a thread, for stores that other processes cannot open."""

    def __init__(self, store: ParameterStore, job: Job, name: str) -> None:
        self._stop = threading.Event()
        self._store, self._job, self._name = store, job, name
        self._thread = threading.Thread(target=self._run, name=f"parameter server {name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            ParameterServer(self._store, Evaluator(self._job), self._name).run(self._stop)
        except Exception:  # the pool replaces it
            logger.exception("parameter server %s failed", self._name)

    def alive(self) -> bool:
        """Return True while it runs."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End it after its current update."""
        self._stop.set()

    def wait(self, timeout_s: float) -> None:
        """Wait until it has ended; a thread cannot be killed."""
        self._thread.join(timeout_s)


def code_of_servers(job: Job) -> str:
    """Return the job's code for servers in processes, with the settings of its plan that measuring needs."""
    plan = f"seed={job.plan.seed}, validation_samples={job.plan.validation_samples}"
    return f"{job.code}\njob = job.with_plan({plan})\n"


class ProcessWorker:
    """A parameter server in its own process; ``store`` is an address, ``job`` a name, ``code`` a file."""

    def __init__(self, store: str, job: str, code: Path, name: str) -> None:
        module = "colab_swarm.workunits.server_process"
        options = ["--name", job, "--code", str(code), "--server", name]
        with code.with_name("parameter-servers.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *options],
                stdin=subprocess.PIPE,  # it closes with this process, which ends the server
                text=True,
                stdout=log,
                stderr=log,
                env=os.environ | KEEP_MEMORY,
                start_new_session=True,
            )
        assert self._process.stdin is not None  # it is a pipe
        self._input = self._process.stdin
        with contextlib.suppress(OSError):  # it is dead already: the pool notices
            self._input.write(f"{store}\n")  # it may hold a password, so it is not an argument
            self._input.flush()

    def alive(self) -> bool:
        """Return True while it runs."""
        return self._process.poll() is None

    def stop(self) -> None:
        """End it after its current update."""
        self._process.terminate()

    def wait(self, timeout_s: float) -> None:
        """Wait until it has ended; after ``timeout_s`` kill it."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(OSError):
            self._input.close()


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
        """Number of servers that run."""
        return sum(one.alive() for one in self._running)

    def keep(self, wanted: int, *, now: float) -> None:
        """Start or stop servers until ``wanted`` run."""
        alive = [one for one in self._running if one.alive()]
        if died := len(self._running) - len(alive):
            self.deaths += died
            self._pause_until = now + min(LONGEST_PAUSE_S, 2.0 ** min(self.deaths, 16))
            logger.warning("%d parameter servers died, %d so far", died, self.deaths)
        self._running, surplus = alive[:wanted], alive[wanted:]
        for one in surplus:
            one.stop()
        self._stopping = [one for one in self._stopping + surplus if one.alive()]
        while len(self._running) < wanted and now >= self._pause_until:
            self._started += 1
            self._running.append(self._start(f"server-{self._started}"))

    def close(self) -> None:
        """Stop all servers and wait for them."""
        workers, self._running = self._running + self._stopping, []
        for one in workers:
            one.stop()
        for one in workers:
            one.wait(FAREWELL_S)
