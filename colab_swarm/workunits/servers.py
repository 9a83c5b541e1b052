"""Parameter servers merge accepted results into the parameters, and measure the accuracy after each.

Any number of servers work on one store, each on its own thread or in its own process. A server knows nothing of the
other servers, and keeps the state of the job only in the store.
"""

import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import nn

from colab_swarm.errors import StoreError
from colab_swarm.net.patience import backoff
from colab_swarm.workunits.job import Job, Rows, measure
from colab_swarm.workunits.state import Accepted, Measured
from colab_swarm.workunits.store import KEEP_MEMORY, ParameterStore, open_store
from colab_swarm.workunits.weights import Floats, Schema, assimilate

logger = logging.getLogger(__name__)

LEASE_S = 120.0
"""If a server dies, the result that it claimed goes to another server after this time."""
IDLE_S = 0.05
RETRY_S = (0.1, 30.0)
"""Waits before a retry while the store fails: the first wait and the longest wait."""
FAREWELL_S = 30.0
LONGEST_PAUSE_S = 60.0
"""Longest pause between the death of a server and the start of a new server."""
CROWD = 2.0
"""Another server is needed if more results than this wait per server."""
GROW_S = 2.0
SHRINK_S = 30.0
STORE = "COLAB_SWARM_STORE"
"""Environment variable of a server process with the store's address."""


class ParameterServer(threading.Thread):
    """Assimilates results of the store until it is stopped, and measures the accuracy after each.

    For a store that other processes cannot open, the server is a thread. A separate process only calls `run`. The
    server itself loads the model and the validation data. If loading fails, the server dies.
    """

    def __init__(self, store: ParameterStore, job: Job, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._store = store
        self._job = job
        self._end = threading.Event()
        # measured, and not in the log yet
        self._measured: Measured | None = None

    @cached_property
    def _loaded(self) -> tuple[nn.Module, Schema, Rows]:
        model = self._job.first_model()
        return model, Schema.of(model), self._job.validation_rows()

    def stop(self) -> None:
        """Make `run` end after the current update."""
        self._end.set()

    def run(self) -> None:
        """Serve until `stop`. After an error of the store, retry."""
        waits_s = backoff(random.Random(), *RETRY_S)
        wait_s = 0.0
        while not self._end.wait(wait_s):
            try:
                worked = self.run_once(time.time())
            except StoreError as error:
                wait_s = next(waits_s)
                logger.warning("%s retries the store in %.1f s: %s", self.name, wait_s, error)
                continue
            waits_s = backoff(random.Random(), *RETRY_S)
            wait_s = 0.0 if worked else IDLE_S

    def run_once(self, now: float) -> bool:
        """Assimilate one result; return False if no result waits. After a StoreError, the next call continues."""
        if self._measured is None:
            # load the model and its data first, so that no result is claimed if they cannot be loaded
            model, schema, rows = self._loaded
            accepted = self._store.claim(self.name, now=now, lease_s=LEASE_S)
            if accepted is None:
                return False
            values = self._assimilate(accepted, now)
            # after this server's lease ended, another server has assimilated the result
            if values is None:
                return True
            schema.load(model, values)
            accuracy = measure(self._job, model, rows)
            self._measured = Measured(at=now, unit=accepted.unit, accuracy=accuracy)
        self._store.append([self._measured])
        self._measured = None
        return True

    def _assimilate(self, accepted: Accepted, now: float) -> Floats | None:
        """Return the parameters after a result, or None if the result was assimilated before."""
        try:
            result = np.frombuffer(self._store.blob(accepted.result), "<f4")
        except KeyError:
            return None
        new: Floats | None = None

        def update(parameters: Floats) -> Floats:
            nonlocal new
            new = assimilate(parameters, result, accepted.alpha)
            return new

        version = self._store.assimilate(accepted, update, server=self.name, now=now)
        return None if version is None else new


class ServerProcess:
    """A parameter server in a separate process: ``store`` is an address, ``job`` a name, ``code`` a file.

    The address may contain a password, and all users of the machine can see a process's arguments. So the address is in
    the environment of the process. If the process that started the server dies, the server's standard input closes, and
    the server exits immediately.
    """

    def __init__(self, store: str, job: str, code: Path, name: str) -> None:
        with code.with_name("parameter-servers.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import serve; serve()", job, str(code), name],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=os.environ | KEEP_MEMORY | {STORE: store},
                start_new_session=True,
            )

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        self._process.terminate()

    def join(self, timeout_s: float) -> None:
        # the end of the block closes the input of the process
        with self._process:
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()


def serve() -> None:
    """Serve in the process of a `ServerProcess`, until SIGTERM, or until the process's input closes."""
    job, code, name = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    threading.Thread(target=_exit_with_parent, name="parent watch", daemon=True).start()
    # the coordinator adds servers until all processors are busy
    torch.set_num_threads(1)
    with closing(open_store(os.environ.pop(STORE), job)) as store:
        server = ParameterServer(store, Job.load(code), name)
        # on another thread, because the handler on this thread could deadlock on the event's lock
        signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.stop).start())
        server.run()


def _exit_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


class ServerPool:
    """The parameter servers of a job. ``deaths`` counts the servers that ended without being stopped."""

    def __init__(self, start: Callable[[str], ParameterServer | ServerProcess]) -> None:
        self._start = start
        self.deaths = 0
        # one processor is for the coordinator
        processors = os.cpu_count() or 1
        self._most = max(1, processors - 1)
        self._running: list[ParameterServer | ServerProcess] = []
        self._stopping: list[ParameterServer | ServerProcess] = []
        self._started = 0
        self._pause_until = 0.0
        # 1 if more servers are needed, -1 if fewer, and since when
        self._trend = 0
        self._since = 0.0

    @property
    def size(self) -> int:
        return sum(server.is_alive() for server in self._running)

    def wanted(self, waiting: int, *, now: float) -> int:
        """Return how many servers to run while ``waiting`` results wait.

        This is one server more than now if more than `CROWD` results per server wait at each call for `GROW_S`. It is
        one server less if no result waits for `SHRINK_S`. It is at least 1, and leaves a processor to the coordinator.
        """
        size = self.size
        trend = 0
        patience_s = SHRINK_S
        if waiting > CROWD * size:
            trend = 1
            patience_s = GROW_S
        elif waiting == 0:
            trend = -1
        if trend != self._trend:
            self._trend = trend
            self._since = now
        if now - self._since >= patience_s:
            size += trend
            self._since = now
        return max(1, min(self._most, size))

    def keep(self, wanted: int, *, now: float) -> None:
        """Run ``wanted`` servers. Replace dead servers after a pause, which is longer after each death."""
        alive = [server for server in self._running if server.is_alive()]
        died = len(self._running) - len(alive)
        if died:
            self.deaths += died
            self._pause_until = now + min(LONGEST_PAUSE_S, 2.0 ** min(self.deaths, 16))
            logger.warning("%d parameter servers died, %d so far", died, self.deaths)
        self._running = alive[:wanted]
        surplus = alive[wanted:]
        for server in surplus:
            server.stop()
        self._stopping = [server for server in self._stopping + surplus if server.is_alive()]
        while len(self._running) < wanted and now >= self._pause_until:
            self._started += 1
            self._running.append(self._start(f"server-{self._started}"))

    def close(self) -> None:
        servers = self._running + self._stopping
        self._running = []
        for server in servers:
            server.stop()
        for server in servers:
            server.join(FAREWELL_S)
