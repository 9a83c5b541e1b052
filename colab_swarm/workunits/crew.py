"""The parameter servers of a coordinator: threads of this process, or processes of their own; the dead are replaced."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from colab_swarm.workunits.job import Job
from colab_swarm.workunits.parameter_server import ParameterServer
from colab_swarm.workunits.store import KEEP_MEMORY, Store
from colab_swarm.workunits.unit_training import Evaluator

logger = logging.getLogger(__name__)
FAREWELL_S = 30.0
LONGEST_REST_S = 60.0


class Hand(Protocol):
    """One parameter server at work."""

    def alive(self) -> bool:
        """Whether it still runs."""

    def dismiss(self) -> None:
        """Let it end after the update that it is at."""

    def wait(self, timeout_s: float) -> None:
        """Until it has ended; it is ended by force if it takes longer."""


class ThreadHand:
    """A parameter server on a thread, for stores that only this process sees."""

    def __init__(self, store: Store, job: Job, name: str) -> None:
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
        """See `Hand`."""
        return self._thread.is_alive()

    def dismiss(self) -> None:
        """See `Hand`."""
        self._stop.set()

    def wait(self, timeout_s: float) -> None:
        """See `Hand`; a thread cannot be forced."""
        self._thread.join(timeout_s)


def code_of_servers(job: Job) -> str:
    """The job's text for servers in processes, with what its plan says now of measuring."""
    told = f"seed={job.plan.seed}, validation_samples={job.plan.validation_samples}"
    return f"{job.code}\njob = job.with_plan({told})\n"


class ProcessHand:
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
        """See `Hand`."""
        return self._process.poll() is None

    def dismiss(self) -> None:
        """See `Hand`."""
        self._process.terminate()

    def wait(self, timeout_s: float) -> None:
        """See `Hand`."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(OSError):
            self._input.close()


class Crew:
    """Keeps as many servers at work as wanted. Those that die are replaced, after ever longer rests.

    Args:
        hire: starts a server of the name given.
    """

    def __init__(self, hire: Callable[[str], Hand]) -> None:
        self._hire = hire
        self._hands: list[Hand] = []
        self._leaving: list[Hand] = []
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
