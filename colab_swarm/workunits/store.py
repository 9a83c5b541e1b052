"""The interface of a store of a job's state (log, parameters, waiting results), and how to open one by its address.

A store outlives the coordinator. Each method is atomic: if a process is killed at any moment, a call has taken effect
completely or not at all. If the database is durable, so is each call. The coordinator and the parameter servers
use a store at the same time, from several threads and processes. If a call raises `StoreError` because the
connection broke, the call may have taken effect or not. Then read the log again.

`open_store` opens the store of an address, and only then loads the store's libraries.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TypeAlias, cast

from colab_swarm.errors import StoreError
from colab_swarm.project import install
from colab_swarm.workunits.state import Accepted, AnyEntry, Assimilated
from colab_swarm.workunits.weights import Floats

Blobs: TypeAlias = Mapping[str, bytes]
Update: TypeAlias = Callable[[Floats], Floats]
"""Returns new parameters, given the current parameters, which are read-only and valid only during the call."""
FORMS = (
    "memory, a file such as job.db or sqlite:////absolute/path, redis://HOST:6379/0, unix:///path/of/redis.sock, "
    "postgresql+psycopg://USER:PASSWORD@HOST/DATABASE or mysql+pymysql://USER:PASSWORD@HOST/DATABASE"
)
REDIS = {"redis", "rediss", "unix"}
SQL = {"postgresql+psycopg", "mysql+pymysql"}
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""Environment of server processes. With it, glibc reuses the memory of vectors, and an update takes half the time."""


@dataclass(frozen=True)
class Parameters:
    """Read-only values (numel,) after ``version`` updates. A store with eventual consistency may lose some updates."""

    version: int
    values: Floats


class ParameterStore(ABC):
    """The state of one job. If ``shared``, other processes can open the store at ``url``."""

    shared = True

    def __init__(self, url: str, job: str) -> None:
        self.url = url
        self._job = job

    @abstractmethod
    def begin(self, first: Floats) -> None:
        """Save ``first`` (numel,) as version 0 of a new job; raise StoreError if the job has another size."""

    @abstractmethod
    def append(
        self, entries: Sequence[AnyEntry], *, put: Blobs | None = None, drop: Collection[str] = ()
    ) -> None:
        """Append to the log, queue each `Accepted`, save the blobs ``put``, and delete the blobs ``drop``."""

    @abstractmethod
    def entries(self, after: int = 0) -> list[tuple[int, AnyEntry]]:
        """Return the entries of the log after position ``after``. Positions start at 1 and may have gaps."""

    @abstractmethod
    def blob(self, name: str) -> bytes:
        """Return a blob; raise KeyError if no blob has this name."""

    @abstractmethod
    def parameters(self) -> Parameters:
        """Return the newest parameters."""

    @abstractmethod
    def claim(self, server: str, *, now: float, lease_s: float) -> Accepted | None:
        """Lease the oldest free result to ``server`` until ``now + lease_s``; return None if no result is free."""

    @abstractmethod
    def assimilate(self, accepted: Accepted, update: Update, *, server: str, now: float) -> int | None:
        """Replace the parameters by ``update(parameters)``, log `Assimilated`, and delete the result.

        Returns the new version. If the result was assimilated before, change nothing and return None.
        """

    @abstractmethod
    def close(self) -> None:
        """Close files and connections. The state remains in the store."""

    def _check_size(self, first: Floats) -> None:
        numel = len(self.parameters().values)
        if numel != len(first):
            raise StoreError(
                f"the store holds a job {self._job!r} of {numel:,} parameters, but the model has {len(first):,}: "
                "give the job another name, or use another store"
            )

    def _not_begun(self) -> StoreError:
        return StoreError(f"the store holds no job {self._job!r} yet: start its coordinator first")


def assimilated(accepted: Accepted, version: int, *, server: str, now: float, began: float) -> Assimilated:
    """Return the log entry of an update that began at ``began`` on the clock `time.perf_counter`."""
    return Assimilated(
        at=now,
        unit=accepted.unit,
        assignment=accepted.assignment,
        server=server,
        version=version,
        seconds=time.perf_counter() - began,
    )


def pieces_of(data: bytes | memoryview, size: int) -> list[memoryview]:
    """Cut ``data`` into pieces of ``size`` bytes without a copy. Empty data give one empty piece."""
    view = memoryview(data)
    return [view[start : start + size] for start in range(0, max(1, len(view)), size)]


def open_store(url: str, job: str) -> ParameterStore:
    """Open the state of ``job`` at ``url``; raise StoreError if that fails.

    Raises ValueError if the address has none of the forms in `FORMS`.
    """
    scheme, _, place = url.rpartition("://")
    if scheme in REDIS:
        return _open("redis_store", "RedisStore", url, job, extra="workunits")
    if scheme in SQL:
        return _open("sql_store", "SqlStore", url, job, extra="workunits")
    if scheme == "sqlite" and place.startswith("/"):
        return _open("sql_store", "SqlStore", str(Path(place[1:]).absolute()), job, extra="train")
    # a word such as "redis" is a mistake, not a file
    is_file = not scheme and (Path(url).suffix or Path(url).name != url)
    if is_file or url == "memory":
        return _open("sql_store", "SqlStore", url, job, extra="train")
    raise ValueError(f"{scheme or url!r} is no store: use {FORMS}")


def _open(module: str, kind: str, url: str, job: str, *, extra: str) -> ParameterStore:
    try:
        library = import_module(f"colab_swarm.workunits.{module}")
        return cast(ParameterStore, getattr(library, kind)(url, job))
    except ImportError as error:
        raise StoreError(f"{error}: {install(extra)}") from error
