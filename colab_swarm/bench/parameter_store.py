"""What one update of 5 M parameters takes in each store (VC-ASGD, section IV-D: 0.87 s in Redis, 1.29 s in MySQL).

An update is all that a parameter server does but measuring accuracy: it claims a result, reads it, reads the
parameters, computes ``W_s <- alpha W_s + (1 - alpha) W_c`` and has the new ones in the store. Servers of stores are
started here, as they come, on this machine; updates are made by a process such as a coordinator starts.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np

from colab_swarm.bench.report import BenchReport
from colab_swarm.bench.store_servers import Absent, mariadb_server, postgresql_server, redis_server
from colab_swarm.workunits.state import Accepted, Unit
from colab_swarm.workunits.store import KEEP_MEMORY, ParameterStore, open_store
from colab_swarm.workunits.weights import assimilate

NUMEL = 5_000_000
ALPHA = 0.95
LEASE_S = 60.0


@contextmanager
def _memory() -> Iterator[str]:
    yield "memory"


@contextmanager
def _sqlite() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield str(Path(folder) / "job.db")


@contextmanager
def _durable_redis() -> Iterator[str]:
    with redis_server(durable=True) as url:
        yield url


STORES: dict[str, tuple[Callable[[], AbstractContextManager[str]], str]] = {
    "memory": (_memory, "of this process"),
    "sqlite": (_sqlite, "durable"),
    "redis": (redis_server, "in memory, as the paper has it; published 870 ms"),
    "redis_durable": (_durable_redis, "appendonly yes"),
    "postgresql": (postgresql_server, "durable, strong consistency"),
    "mariadb": (mariadb_server, "durable, strong consistency; published 1,290 ms (MySQL)"),
}
SQL = ("mariadb", "postgresql")
"""Of these, the first that is installed is `store.sql_ms`."""


def run(quick: bool) -> BenchReport:
    """Time updates in every store whose program is installed."""
    report, took_ms = BenchReport("parameter-store", quick), {}
    updates = 5 if quick else 20
    for name, (opened, note) in STORES.items():
        try:
            with opened() as url:
                took_ms[name] = _time_apart(url, updates)
        except Absent as absent:
            print(f"{name} is left out: {absent}", flush=True)
            continue
        what = f"median of {updates}; {note}"
        report.add(f"store.{name}_ms", took_ms[name], "ms", what)
    sql = next((name for name in SQL if name in took_ms), None)
    if sql is not None:
        report.add("store.sql_ms", took_ms[sql], "ms", sql)
        if "redis" in took_ms:
            ratio = took_ms[sql] / took_ms["redis"]
            report.add("store.sql_to_redis", ratio, "times", f"{sql}; published 1.5")
    return report


def _time_apart(url: str, updates: int) -> float:
    command = [sys.executable, "-m", __name__, url, str(NUMEL), str(updates)]
    return float(subprocess.check_output(command, env=os.environ | KEEP_MEMORY))


def time_updates(url: str, numel: int, updates: int) -> float:
    """Median milliseconds of an update of ``numel`` parameters in the store at ``url``."""
    store, rng = open_store(url, "bench"), np.random.default_rng(0)
    store.begin(rng.random(numel, np.float32))
    result, took_s = rng.random(numel, np.float32).tobytes(), []
    for subset in range(updates + 1):
        name = f"{subset:032x}"
        accepted = Accepted(
            at=0.0,
            unit=Unit(1, subset),
            assignment=name,
            result=f"result-{name}",
            alpha=ALPHA,
            base=0,
            change=1.0,
        )
        store.append([accepted], put={accepted.result: result})
        took_s.append(_update(store))
    store.close()
    return 1000 * statistics.median(took_s[1:])  # the first grows files and memory


def _update(store: ParameterStore) -> float:
    began = time.perf_counter()
    claimed = store.claim("bench", now=1.0, lease_s=LEASE_S)
    assert claimed is not None
    result = np.frombuffer(store.blob(claimed.result), "<f4")

    store.assimilate(claimed, lambda values: assimilate(values, result, ALPHA), server="bench", now=1.0)
    return time.perf_counter() - began


if __name__ == "__main__":
    print(time_updates(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
