"""Whether a result can be used: anybody may send one.

A parameter server: takes results from the store's queue and makes them part of the parameters.

Any number of them works on one store, each on a thread or in a process of its own. They know nothing of each other,
of the coordinator, or of what they did before: all that counts is in the store.
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
from typing import Protocol

import numpy as np

from colab_swarm.errors import StoreError
from colab_swarm.workunits.job import Job, WorkPlan
from colab_swarm.workunits.messages import Backoff, BackoffSettings
from colab_swarm.workunits.state import Measured
from colab_swarm.workunits.store import KEEP_MEMORY, ParameterStore
from colab_swarm.workunits.training import Evaluator
from colab_swarm.workunits.weights import Floats, assimilate

LATEST = 100

KNOWN = 5

"""From so many accepted results on it is known how far training usually moves the parameters."""

FIRST_CHANGE = 1000.0

"""Until then it may move them so many times as far as they are from zero, or as if each were 1."""

MOST = 1e18

"""Of a value. No mean of such values is infinite, and no square."""

PIECE = 1 << 16


def moved(values: Floats, base: Floats) -> float:
    """L2 norm of ``values - base``, both (numel,), summed in float64; not finite if one of the values is not."""
    total = 0.0
    with np.errstate(over="ignore", invalid="ignore"):  # it may be anything, and then says so
        for start in range(0, len(values), PIECE):
            piece = slice(start, start + PIECE)
            change = np.subtract(values[piece], base[piece], dtype=np.float64)
            total += float(change @ change)
    return float(np.sqrt(total))


class Validator:
    """Judges results one by one; replicas are compared by the dispatcher. ``plan``: of the job."""

    def __init__(self, plan: WorkPlan) -> None:
        self._max_change = plan.max_change
        self._changes: deque[float] = deque(maxlen=LATEST)

    def learn(self, change: float) -> None:
        """A result was accepted that had moved the parameters by ``change`` (L2 norm)."""
        self._changes.append(change)

    def judge(self, values: Floats, base: Floats) -> str | None:
        """Why a result is no use; None if it is good.

        Args:
            values: of the result.
            base: parameters of about the time when training began.
        """
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


@dataclass(frozen=True)
class StaffingSettings:
    """When servers come and go.

    Attributes:
        most: servers at once; by default the processors of this machine, less one for the coordinator.
        crowd: results that wait, for each server, from which on there are too few servers.
        grow_s: how long there must be too few of them before another comes.
        shrink_s: how long nothing must have waited before one goes. Longer: to start a process takes seconds.
    """

    most: int = max(1, (os.cpu_count() or 1) - 1)
    crowd: float = 2.0
    grow_s: float = 2.0
    shrink_s: float = 30.0


class Staffing:
    """Follows the backlog, one server at a time. Free of I/O; ``now`` is in seconds."""

    def __init__(self, settings: StaffingSettings | None = None) -> None:
        self._settings = settings or StaffingSettings()
        self._few_since = self._idle_since = math.inf

    def on_backlog(self, waiting: int, servers: int, *, now: float) -> int:
        """How many servers there should be, if ``waiting`` results wait for the ``servers`` that there are."""
        settings = self._settings
        crowded = waiting > settings.crowd * servers
        self._few_since = min(self._few_since, now) if crowded else math.inf
        self._idle_since = min(self._idle_since, now) if waiting == 0 else math.inf
        wanted = servers
        if now - self._few_since >= settings.grow_s:
            wanted, self._few_since = servers + 1, now
        elif now - self._idle_since >= settings.shrink_s:
            wanted, self._idle_since = servers - 1, now
        return max(1, min(settings.most, wanted))


logger = logging.getLogger(__name__)

LEASE_S = 120.0

"""A result whose server died goes to another after that."""

IDLE = BackoffSettings(first_s=0.01, most_s=0.1)

TROUBLE = BackoffSettings(first_s=0.1, most_s=30.0)


class ParameterServer:
    """Assimilates results until it is stopped.

    Args:
        store: of the job.
        evaluator: measures the parameters after each result.
        name: of this server, for people.
    """

    def __init__(self, store: ParameterStore, evaluator: Evaluator, name: str) -> None:
        self._store, self._evaluator, self._name = store, evaluator, name
        self._measured: list[Measured] = []  # and not in the log yet

    def run(self, stop: threading.Event) -> None:
        """Until ``stop`` is set; the update at hand is finished. Faults of the store are waited out."""
        idle, trouble = Backoff(IDLE, random.Random()), Backoff(TROUBLE, random.Random())
        wait_s = 0.0
        while not stop.wait(wait_s):
            try:
                busy = self.run_once(time.time())
            except StoreError as error:
                wait_s = trouble.failed()
                logger.warning("%s waits %.1f s for the store: %s", self._name, wait_s, error)
            else:
                trouble.succeeded()
                if busy:
                    idle.succeeded()
                wait_s = 0.0 if busy else idle.failed()

    def run_once(self, now: float) -> bool:
        """Assimilate one result; False if none waits.

        Args:
            now: seconds since the epoch.

        Raises:
            StoreError: the store failed; what was not written will be taken again, here or elsewhere.
        """
        self._log()
        accepted = self._store.claim(self._name, now=now, lease_s=LEASE_S)
        if accepted is None:
            return False
        try:
            result = np.frombuffer(self._store.blob(accepted.result), "<f4")
        except KeyError:
            return True  # this took so long that another has assimilated it
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

LONGEST_REST_S = 60.0


class PoolWorker(Protocol):
    """One parameter server at work."""

    def alive(self) -> bool:
        """Whether it still runs."""

    def dismiss(self) -> None:
        """Let it end after the update that it is at."""

    def wait(self, timeout_s: float) -> None:
        """Until it has ended; it is ended by force if it takes longer."""


class ThreadWorker:
    """A parameter server on a thread, for stores that only this process sees."""

    def __init__(self, store: ParameterStore, job: Job, name: str) -> None:
        self._stop = threading.Event()
        self._store, self._job, self._name = store, job, name
        self._thread = threading.Thread(target=self._run, name=f"parameter server {name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            ParameterServer(self._store, Evaluator(self._job), self._name).run(self._stop)
        except Exception:  # the crew replaces it
            logger.exception("parameter server %s failed", self._name)

    def alive(self) -> bool:
        """See `PoolWorker`."""
        return self._thread.is_alive()

    def dismiss(self) -> None:
        """See `PoolWorker`."""
        self._stop.set()

    def wait(self, timeout_s: float) -> None:
        """See `PoolWorker`; a thread cannot be forced."""
        self._thread.join(timeout_s)


def code_of_servers(job: Job) -> str:
    """The job's text for servers in processes, with what its plan says now of measuring."""
    told = f"seed={job.plan.seed}, validation_samples={job.plan.validation_samples}"
    return f"{job.code}\njob = job.with_plan({told})\n"


class ProcessWorker:
    """A parameter server as a process.

    Args:
        store: its address.
        job: name of the job.
        code: file with the job's text.
        name: of the server.
    """

    def __init__(self, store: str, job: str, code: Path, name: str) -> None:
        module = "colab_swarm.workunits.server_process"
        told = ["--name", job, "--code", str(code), "--server", name]
        with code.with_name("parameter-servers.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *told],
                stdin=subprocess.PIPE,  # it ends with this process, and the server with it
                text=True,
                stdout=log,
                stderr=log,
                env=os.environ | KEEP_MEMORY,
                start_new_session=True,
            )
        assert self._process.stdin is not None  # it is a pipe
        self._input = self._process.stdin
        with contextlib.suppress(OSError):  # it is dead already, which will be noticed
            self._input.write(f"{store}\n")  # it may hold a password, so it is no argument
            self._input.flush()

    def alive(self) -> bool:
        """See `PoolWorker`."""
        return self._process.poll() is None

    def dismiss(self) -> None:
        """See `PoolWorker`."""
        self._process.terminate()

    def wait(self, timeout_s: float) -> None:
        """See `PoolWorker`."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(OSError):
            self._input.close()


class WorkerPool:
    """Keeps as many servers at work as wanted. Those that die are replaced, after ever longer rests.

    Args:
        hire: starts a server of the name given.
    """

    def __init__(self, hire: Callable[[str], PoolWorker]) -> None:
        self._hire = hire
        self._hands: list[PoolWorker] = []
        self._leaving: list[PoolWorker] = []
        self._hired = self._deaths = 0
        self._rest_until = 0.0

    @property
    def size(self) -> int:
        """Servers at work."""
        return sum(hand.alive() for hand in self._hands)

    @property
    def deaths(self) -> int:
        """Servers that ended unasked."""
        return self._deaths

    def keep(self, wanted: int, *, now: float) -> None:
        """Hire or dismiss until ``wanted`` are at work."""
        living = [hand for hand in self._hands if hand.alive()]
        if died := len(self._hands) - len(living):
            self._deaths += died
            self._rest_until = now + min(LONGEST_REST_S, 2.0 ** min(self._deaths, 16))
            logger.warning("%d parameter servers ended unasked, %d so far", died, self._deaths)
        self._hands, dismissed = living[:wanted], living[wanted:]
        for hand in dismissed:
            hand.dismiss()
        self._leaving = [hand for hand in self._leaving + dismissed if hand.alive()]
        while len(self._hands) < wanted and now >= self._rest_until:
            self._hired += 1
            self._hands.append(self._hire(f"server-{self._hired}"))

    def close(self) -> None:
        """Dismiss all and wait for them."""
        hands, self._hands = self._hands + self._leaving, []
        for hand in hands:
            hand.dismiss()
        for hand in hands:
            hand.wait(FAREWELL_S)
