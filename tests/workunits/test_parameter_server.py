"""Parameter servers: results become parameters, once each, whatever the store does meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colab_swarm.errors import StoreError
from colab_swarm.workunits.assimilation import LEASE_S, ParameterServer
from colab_swarm.workunits.job import Evaluator
from colab_swarm.workunits.state import Accepted, AnyEntry, Assimilated, Measured, Unit
from colab_swarm.workunits.store import MEMORY, ParameterStore, SqliteStore, Update
from tests.workunits.digits import digits_job

CODE = """
import numpy as np, torch
import colab_swarm.workunits.job as work
data = np.zeros((8, 4), np.float32), np.zeros(8, np.int64)
job = work.Job("tiny", lambda: torch.nn.Linear(4, 2), data, data)
"""


def accepted(subset: int) -> Accepted:
    return Accepted(
        at=0.0,
        unit=Unit(1, subset),
        assignment=f"{subset:032x}",
        result=f"result-{subset}",
        alpha=0.5,
        base=0,
        change=1.0,
    )


def fill(store: ParameterStore, numel: int, *subsets: int) -> None:
    """Results of ones for parameters that begin with zeros."""
    store.begin(np.zeros(numel, np.float32))
    for subset in subsets:
        store.append([accepted(subset)], put={f"result-{subset}": np.ones(numel, "<f4").tobytes()})


def entries(store: ParameterStore, kind: type) -> list[object]:
    return [entry for _, entry in store.entries() if isinstance(entry, kind)]


def wait_until(condition: Callable[[], bool]) -> None:
    """Raise AssertionError if it does not hold within a minute."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture(scope="module")
def evaluator() -> Evaluator:
    return Evaluator(digits_job())


def test_a_result_is_assimilated_and_measured(evaluator: Evaluator) -> None:
    store, numel = SqliteStore(MEMORY, "digits"), evaluator.schema.numel
    fill(store, numel, 0, 1)
    server = ParameterServer(store, evaluator, "server-1")
    assert server.run_once(10.0)
    assert server.run_once(11.0)
    assert not server.run_once(12.0)
    np.testing.assert_array_equal(store.parameters().values, np.full(numel, 0.75, np.float32))
    assert [entry.unit.subset for entry in entries(store, Assimilated)] == [0, 1]  # type: ignore[attr-defined]
    measured = entries(store, Measured)
    assert [(entry.at, entry.unit) for entry in measured] == [(10.0, Unit(1, 0)), (11.0, Unit(1, 1))]  # type: ignore[attr-defined]


def test_a_server_that_lost_its_lease_changes_nothing(evaluator: Evaluator) -> None:
    store = SqliteStore(MEMORY, "digits")
    fill(store, evaluator.schema.numel, 0)
    slow = store.claim("slow", now=0.0, lease_s=LEASE_S)
    assert slow is not None
    assert ParameterServer(store, evaluator, "fast").run_once(LEASE_S)
    assert store.assimilate(slow, lambda values: values * 0, server="slow", now=LEASE_S) is None
    assert float(store.parameters().values[0]) == 0.5
    assert len(entries(store, Assimilated)) == 1


class Shaky(SqliteStore):
    """Fails each kind of call once; claims are for no time, so that none has to run out."""

    def __init__(self, path: str, job: str) -> None:
        super().__init__(path, job)
        self.faults = {"claim", "assimilate", "append"}

    def claim(self, server: str, *, now: float, lease_s: float) -> Accepted | None:
        self._fail("claim")
        return super().claim(server, now=now, lease_s=0.0)

    def append(self, entries: Sequence[AnyEntry], **blobs: Any) -> None:
        if isinstance(entries[0], Measured):
            self._fail("append")
        super().append(entries, **blobs)

    def assimilate(self, accepted: Accepted, update: Update, *, server: str, now: float) -> int | None:
        self._fail("assimilate")
        return super().assimilate(accepted, update, server=server, now=now)

    def _fail(self, call: str) -> None:
        if call in self.faults:
            self.faults.remove(call)
            raise StoreError("the store is away")


@pytest.mark.slow
def test_faults_of_the_store_are_waited_out(evaluator: Evaluator) -> None:
    store, stop = Shaky(MEMORY, "digits"), threading.Event()
    fill(store, evaluator.schema.numel, 0, 1, 2)
    thread = threading.Thread(target=ParameterServer(store, evaluator, "server-1").run, args=(stop,))
    thread.start()
    wait_until(lambda: len(entries(store, Measured)) == 3)
    stop.set()
    thread.join(10)
    assert not thread.is_alive()
    assert store.faults == set()
    assert len(entries(store, Assimilated)) == 3


def start(path: Path, code: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "colab_swarm.workunits.server_process"]
    command += ["--name", "tiny", "--code", str(code), "--server", "server-1"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert process.stdin is not None
    process.stdin.write(f"{path}\n".encode())
    process.stdin.flush()
    return process


@pytest.mark.slow
def test_a_server_process_serves_until_it_is_stopped_or_its_parent_dies(tmp_path: Path) -> None:
    path, code = tmp_path / "tiny.db", tmp_path / "job.py"
    code.write_text(CODE)
    store = SqliteStore(path, "tiny")
    fill(store, 10, 0)
    stopped, orphan = start(path, code), start(path, code)
    try:
        wait_until(lambda: len(entries(store, Measured)) == 1)
        orphan.communicate()  # closes its input
        assert orphan.returncode == 1
        fill(store, 10, 1)
        wait_until(lambda: len(entries(store, Measured)) == 2)
        stopped.terminate()
        assert stopped.wait(60) == 0
    finally:
        for process in (stopped, orphan):
            process.kill()
            process.communicate()
        store.close()
