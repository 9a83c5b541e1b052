"""Results are checked and become parameters, once each, whatever the store and the servers do meanwhile."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colab_swarm.errors import StoreError
from colab_swarm.workunits.servers import STORE, ParameterServer, ServerPool
from colab_swarm.workunits.sql_store import MEMORY, SqlStore
from colab_swarm.workunits.state import Accepted, AnyEntry, Assimilated, Measured
from colab_swarm.workunits.store import ParameterStore, Update
from colab_swarm.workunits.weights import KNOWN, Floats, Schema, assimilate, moved
from tests.swarm import wait
from tests.workunits.digits import digits_job
from tests.workunits.local import CODE
from tests.workunits.servers import accepted


def fill(store: ParameterStore, numel: int, *subsets: int) -> None:
    store.begin(np.zeros(numel, np.float32))
    for one in map(accepted, subsets):
        store.append([one], put={one.result: np.ones(numel, "<f4").tobytes()})


def entries(store: ParameterStore, kind: type) -> list[object]:
    return [entry for _, entry in store.entries() if isinstance(entry, kind)]


JOB = digits_job()
NUMEL = Schema.of(JOB.first_model()).numel


class Shaky(SqlStore):
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
def test_faults_of_the_store_are_waited_out() -> None:
    store = Shaky(MEMORY, "digits")
    fill(store, NUMEL, 0, 1, 2)
    server = ParameterServer(store, JOB, "server-1")
    server.start()
    wait(lambda: len(entries(store, Measured)) == 3, timeout_s=60)
    server.stop()
    server.join(10)
    assert not server.is_alive() and store.faults == set()
    assert len(entries(store, Assimilated)) == 3
    np.testing.assert_array_equal(store.parameters().values, np.full(NUMEL, 0.875, np.float32))


@pytest.mark.slow
def test_a_server_process_serves_until_its_parent_dies(tmp_path: Path) -> None:
    path, code = tmp_path / "tiny.db", tmp_path / "job.py"
    code.write_text(f"{CODE}\nimport os\nassert {STORE!r} not in os.environ\n")
    store = SqlStore(str(path), "tiny")
    fill(store, 15, 0)
    program = "from colab_swarm.workunits.servers import serve; serve()"
    command = [sys.executable, "-c", program, "tiny", str(code), "server-1"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", STORE: str(path)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=env) as orphan:
        wait(lambda: len(entries(store, Measured)) == 1, timeout_s=60)
        orphan.communicate()  # closes its input
    assert orphan.returncode == 1
    store.close()


BASE = np.zeros(5418, np.float32)


def judge(values: Floats, base: Floats = BASE, changes: Sequence[float] = (), most: float = 1e9) -> float:
    schema = Schema((("weight", base.shape),))
    return schema.judge(schema.encode(values), base, changes, 10, most)[1]


def fault(values: Floats, base: Floats = BASE, changes: Sequence[float] = ()) -> str:
    try:
        judge(values, base, changes)
    except ValueError as error:
        return str(error)
    return ""


def test_a_result_that_moved_much_farther_than_usual_is_refused_after_the_first_ones() -> None:
    values, changes = BASE.copy(), [3.0] * KNOWN
    values[0] = 31.0
    assert judge(values, changes=changes[1:]) == 31.0
    assert fault(values, changes=changes) == (
        "training moved the parameters by 31, usually it is 3 and 10 times as much is allowed (max_change)"
    )
    values[0] = 30.0
    assert not fault(values, changes=changes)


def test_results_that_go_as_far_as_they_may_add_up_and_do_not_multiply() -> None:
    first = np.full(400, 0.2, np.float32)  # of norm 4
    server, most, changes = first, 10 * float(np.linalg.norm(first)), list[float]()
    for _ in range(4 * KNOWN):
        with pytest.raises(ValueError, match="training moved the parameters by"):
            judge(server + np.float32(1.1 * most / 20), server, changes, most)
        result = server + np.float32(0.999 * most / 20)
        changes.append(judge(result, server, changes, most))
        server = assimilate(server, result, 0.5)
    assert np.linalg.norm(server) < 4 + 4 * KNOWN * most / 2
    assert "beyond" in fault(server + np.float32(1e25), server)
    huge = np.full(200_000, np.finfo(np.float32).max)  # no overflow
    assert moved(huge, -huge) == pytest.approx(2 * float(huge[0]) * 200_000**0.5)


class Fellow:
    def __init__(self, name: str) -> None:
        self.name = name
        self.living = True

    def is_alive(self) -> bool:
        return self.living

    def stop(self) -> None:
        self.living = False

    def join(self, timeout_s: float) -> None:
        assert not self.living


def pool() -> tuple[ServerPool, list[Fellow]]:
    """With all that it ever hired."""
    hired: list[Fellow] = []

    def hire(name: str) -> Fellow:
        hired.append(Fellow(name))
        return hired[-1]

    return ServerPool(hire), hired


def test_the_dead_are_replaced_after_ever_longer_rests() -> None:
    servers, hired = pool()
    rests, now = list[float](), 0.0
    servers.keep(1, now=0.0)
    for _ in range(8):
        hired[-1].living = False
        died_at = now
        servers.keep(1, now=now)
        while not servers.size:
            now += 1.0
            servers.keep(1, now=now)
        rests.append(now - died_at)
    assert rests == [2, 4, 8, 16, 32, 60, 60, 60] and servers.deaths == 8


WAVES = {range(start, start + 10): (start // 10) % 2 * 5 for start in range(20, 200, 10)}


@pytest.mark.parametrize(
    ("waiting", "sizes"),
    [
        ({range(0, 20): 50}, {0: 1, 2: 1, 3: 2, 5: 3, 7: 4, 20: 4}),
        ({range(0, 10): 50, range(10, 40): 1, range(40, 200): 0}, {50: 4, 72: 3, 200: 1}),
        ({range(0, 20): 50, **WAVES}, {200: 4}),
    ],
    ids=["grows", "shrinks", "waves"],
)
def test_servers_follow_a_backlog_that_lasts(
    monkeypatch: pytest.MonkeyPatch, waiting: dict[range, int], sizes: dict[int, int]
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 5)  # one is the coordinator's
    servers, hired = pool()
    servers.keep(1, now=0.0)
    found = [1]
    for seconds, backlog in waiting.items():
        for second in map(float, seconds):
            servers.keep(servers.wanted(backlog, now=second), now=second)
            found.append(servers.size)
            assert sum(fellow.living for fellow in hired) == servers.size
    assert {second: found[second] for second in sizes} == sizes
    servers.close()
    assert servers.deaths == 0 and not any(fellow.living for fellow in hired)
