"""Stores for tests: each test of them runs against every kind whose server is installed."""

import itertools

import numpy as np

from colab_swarm.bench import vc_asgd
from colab_swarm.workunits.state import Accepted, Assimilated, Unit
from colab_swarm.workunits.store import ParameterStore, open_store
from colab_swarm.workunits.weights import Floats

SERVERS = {name: getattr(vc_asgd, f"{name}_server") for name in ("redis", "postgresql", "mariadb")}
SHARED = ("sqlite", *SERVERS)
KINDS = ("memory", *SHARED)
_numbers = itertools.count()


def new_job() -> str:
    return f"job-{next(_numbers)}"


def accepted(subset: int, *, epoch: int = 1) -> Accepted:
    name = f"{epoch:016x}{subset:016x}"
    return Accepted(at=5.0, unit=Unit(epoch, subset), assignment=name, alpha=0.5, change=1.0)


def begun(url: str, job: str, *, units: int = 0, numel: int = 3) -> ParameterStore:
    """A store with zeros for parameters and ``units`` results that wait."""
    store = open_store(url, job)
    store.begin(np.zeros(numel, np.float32))
    for subset in range(units):
        one = accepted(subset)
        store.append([one], put={one.result: b"result"})
    return store


def plus_one(values: Floats) -> Floats:
    return values + np.float32(1)


def check_invariants(store: ParameterStore) -> None:
    """What is true of every store at any time: no unit twice, versions without gaps, nothing lost."""
    log = store.entries()
    positions = [position for position, _ in log]
    assert positions == sorted(set(positions))
    done = [entry for _, entry in log if isinstance(entry, Assimilated)]
    assert [entry.version for entry in done] == list(range(1, len(done) + 1))
    assert len({entry.unit for entry in done}) == len(done)
    assert store.parameters().version == len(done)


def close_checked(store: ParameterStore) -> None:
    check_invariants(store)
    store.close()
