"""How long one update of 5 M parameters takes in each store (VC-ASGD, section IV-D: Redis 0.87 s, MySQL 1.29 s).

An update is all work of a parameter server except measuring accuracy: it claims a result, reads it, reads the
parameters, computes ``W_s <- alpha W_s + (1 - alpha) W_c`` and writes the new ones. The servers of stores run on this
machine with their default settings. A process like that of a coordinator makes the updates.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from colab_swarm.bench.report import BenchReport
from colab_swarm.bench.store_servers import Absent, mariadb_server, postgresql_server, redis_server
from colab_swarm.bench.workers import Parent, Worker
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


STORES: dict[str, tuple[Callable[[], AbstractContextManager[str]], str]] = {
    "memory": (_memory, "of this process"),
    "sqlite": (_sqlite, "durable"),
    "redis": (redis_server, "in memory, as the paper has it; published 870 ms"),
    "redis_durable": (partial(redis_server, durable=True), "appendonly yes"),
    "postgresql": (postgresql_server, "durable, strong consistency"),
    "mariadb": (mariadb_server, "durable, strong consistency; published 1,290 ms (MySQL)"),
}
SQL = ("mariadb", "postgresql")
"""`store.sql_ms` is the figure of the first of these that is installed."""


def run(quick: bool) -> BenchReport:
    """Time updates in every store whose program is installed."""
    report, took_ms, updates = BenchReport("parameter-store", quick), {}, 5 if quick else 20
    for name, (opened, note) in STORES.items():
        try:
            with (
                opened() as url,
                Worker(time_updates, url, NUMEL, updates, environment=KEEP_MEMORY) as worker,
            ):
                took_ms[name] = worker.receive()["ms"]
        except Absent as absent:
            print(f"{name} is left out: {absent}", flush=True)
            continue
        report.add(f"store.{name}_ms", took_ms[name], "ms", f"median of {updates}; {note}")
    sql = next((name for name in SQL if name in took_ms), None)
    if sql is not None:
        report.add("store.sql_ms", took_ms[sql], "ms", sql)
        if "redis" in took_ms:
            ratio = took_ms[sql] / took_ms["redis"]
            report.add("store.sql_to_redis", ratio, "times", f"{sql}; published 1.5")
    return report


def time_updates(parent: Parent, url: str, numel: int, updates: int) -> None:
    """Worker: report the median milliseconds of an update of ``numel`` parameters in the store at ``url``."""
    store, rng = open_store(url, "bench"), np.random.default_rng(0)
    store.begin(rng.random(numel, np.float32))
    result, took_s = rng.random(numel, np.float32).tobytes(), []
    for subset in range(updates + 1):
        name = f"{subset:032x}"
        unit, file = Unit(1, subset), f"result-{name}"
        accepted = Accepted(at=0.0, unit=unit, assignment=name, result=file, alpha=ALPHA, base=0, change=1.0)
        store.append([accepted], put={file: result})
        took_s.append(_update(store))
    store.close()
    parent.send(ms=1000 * statistics.median(took_s[1:]))  # the first grows files and memory


def _update(store: ParameterStore) -> float:
    began = time.perf_counter()
    claimed = store.claim("bench", now=1.0, lease_s=LEASE_S)
    assert claimed is not None
    result = np.frombuffer(store.blob(claimed.result), "<f4")
    store.assimilate(claimed, lambda values: assimilate(values, result, ALPHA), server="bench", now=1.0)
    return time.perf_counter() - began
