"""The state of a job: its log, its parameters, and the results that wait. It outlives the coordinator.

Every method is atomic and durable where the store is. A process killed at any moment leaves all of a call or nothing.
The coordinator and the parameter servers use a store at once, from several threads and processes. A call that raises
`StoreError` because the connection broke may have taken effect or not: read the log again.

`SqliteStore` is the default: one durable file for several processes on one machine. Its log is written ahead (WAL), so
committed entries survive the death of any process; a power failure may lose the last seconds. Pages are 64 KiB, the
most that SQLite allows: vectors of megabytes are read and written four times as fast as with the usual 4 KiB.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TypeAlias, TypeVar, cast

import numpy as np

from colab_swarm.errors import StoreError
from colab_swarm.workunits.state import (
    Accepted,
    AnyEntry,
    Assimilated,
    decode_entry,
    encode_entry,
)
from colab_swarm.workunits.weights import Floats

logger = logging.getLogger(__name__)
T = TypeVar("T")
Blobs: TypeAlias = Mapping[str, bytes]
Update: TypeAlias = Callable[[Floats], Floats]
"""Compute new parameters from the current ones, which are read-only and only lent."""
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""Environment of processes that assimilate: glibc reuses the memory of vectors, which halves the time of an update."""


@dataclass(frozen=True)
class Parameters:
    """The server's parameters after ``version`` assimilations; read-only ``values`` (numel,).

    Under eventual consistency the values may lack some of them.
    """

    version: int
    values: Floats


class ParameterStore(ABC):
    """State of one job: float32 vectors, blobs with names. ``shared``: other processes can open it at ``url``."""

    shared = True

    def __init__(self, url: str, job: str) -> None:
        self.url, self._job = url, job
        self._claimed_at: dict[str, float] = {}  # `time.perf_counter` by assignment

    @abstractmethod
    def begin(self, first: Floats) -> None:
        """Save ``first`` (numel,) as version 0 of a new job; raise StoreError if the job has another size."""

    @abstractmethod
    def append(
        self, entries: Sequence[AnyEntry], *, put: Blobs | None = None, drop: Collection[str] = ()
    ) -> None:
        """Append to the log, queue each `Accepted`, save the blobs ``put`` and delete those named in ``drop``."""

    @abstractmethod
    def entries(self, after: int = 0) -> list[tuple[int, AnyEntry]]:
        """Return the log beyond position ``after``, in order. Positions start at 1 and may have gaps."""

    @abstractmethod
    def blob(self, name: str) -> bytes:
        """Return a blob; raise KeyError if there is none of this name."""

    @abstractmethod
    def parameters(self) -> Parameters:
        """Return the newest parameters."""

    @abstractmethod
    def claim(self, server: str, *, now: float, lease_s: float) -> Accepted | None:
        """Lease the oldest free result to ``server`` until ``now + lease_s``; None if none waits."""

    @abstractmethod
    def assimilate(self, accepted: Accepted, update: Update, *, server: str, now: float) -> int | None:
        """Replace the parameters by ``update(parameters)``, log `Assimilated`, delete the result.

        Returns the new version; None, with nothing changed, if this unit was assimilated already.
        """

    @abstractmethod
    def close(self) -> None:
        """Release files and connections. The state stays."""

    def _check_size(self, first: Floats) -> None:
        if (numel := len(self.parameters().values)) != len(first):
            raise StoreError(
                f"the store holds a job {self._job!r} of {numel:,} parameters, but the model has {len(first):,}: "
                "give the job another name, or use another store"
            )

    def _not_begun(self) -> StoreError:
        return StoreError(f"the store holds no job {self._job!r} yet: start its coordinator first")

    def _claimed(self, entry: bytes) -> Accepted:
        """Decode a claimed result and start the clock for `Assimilated.seconds`."""
        accepted = cast(Accepted, decode_entry(entry))
        self._claimed_at[accepted.assignment] = time.perf_counter()
        return accepted

    def _assimilated(self, accepted: Accepted, version: int, *, server: str, now: float) -> Assimilated:
        ended = time.perf_counter()
        return Assimilated(
            at=now,
            unit=accepted.unit,
            assignment=accepted.assignment,
            server=server,
            version=version,
            seconds=ended - self._claimed_at.pop(accepted.assignment, ended),
        )


MEMORY = ":memory:"
BUSY_S = 60.0
"""Time to wait for another writer."""
TABLES = (
    "CREATE TABLE IF NOT EXISTS jobs (id INTEGER PRIMARY KEY, name TEXT UNIQUE, version INTEGER)",
    "CREATE TABLE IF NOT EXISTS vectors (job INTEGER PRIMARY KEY, data BLOB)",  # apart, for updates in place
    "CREATE TABLE IF NOT EXISTS log (position INTEGER PRIMARY KEY AUTOINCREMENT, job TEXT, entry BLOB)",
    "CREATE TABLE IF NOT EXISTS queue"
    " (position INTEGER PRIMARY KEY AUTOINCREMENT, job TEXT, assignment TEXT, entry BLOB, held_until REAL)",
    "CREATE TABLE IF NOT EXISTS blobs (job TEXT, name TEXT, data BLOB, UNIQUE (job, name))",
)


class SqliteStore(ParameterStore):
    """A job's state in the file ``path``, which is created if missing; or in this process, at `MEMORY`."""

    def __init__(self, path: str | Path, job: str) -> None:
        self.shared = path != MEMORY
        super().__init__(str(Path(path).absolute()) if self.shared else MEMORY, job)
        self._connections: dict[int, tuple[sqlite3.Connection, threading.Lock]] = {}  # by thread
        with self._transaction() as connection:
            for table in TABLES:
                connection.execute(table)

    def begin(self, first: Floats) -> None:
        with self._transaction() as connection:
            if self._head(connection) is None:
                values = first.astype("<f4", copy=False).data
                cursor = connection.execute("INSERT INTO jobs (name, version) VALUES (?, 0)", (self._job,))
                connection.execute("INSERT INTO vectors VALUES (?, ?)", (cursor.lastrowid, values))
        self._check_size(first)

    def append(
        self, entries: Sequence[AnyEntry], *, put: Blobs | None = None, drop: Collection[str] = ()
    ) -> None:
        with self._transaction() as connection:
            self._log(connection, entries)
            rows = [(self._job, name, data) for name, data in (put or {}).items()]
            connection.executemany("INSERT OR REPLACE INTO blobs VALUES (?, ?, ?)", rows)
            self._drop(connection, drop)

    def _log(self, connection: sqlite3.Connection, entries: Sequence[AnyEntry]) -> None:
        for entry in entries:
            data = encode_entry(entry)
            connection.execute("INSERT INTO log (job, entry) VALUES (?, ?)", (self._job, data))
            if isinstance(entry, Accepted):
                connection.execute(
                    "INSERT INTO queue (job, assignment, entry, held_until) VALUES (?, ?, ?, 0)",
                    (self._job, entry.assignment, data),
                )

    def _drop(self, connection: sqlite3.Connection, names: Collection[str]) -> None:
        rows = [(self._job, name) for name in names]
        connection.executemany("DELETE FROM blobs WHERE job = ? AND name = ?", rows)

    def entries(self, after: int = 0) -> list[tuple[int, AnyEntry]]:
        query = "SELECT position, entry FROM log WHERE job = ? AND position > ? ORDER BY position"
        with self._connection() as connection:
            found = connection.execute(query, (self._job, after)).fetchall()
        return [(position, decode_entry(entry)) for position, entry in found]

    def blob(self, name: str) -> bytes:
        with self._transaction("DEFERRED") as connection:
            query = "SELECT rowid FROM blobs WHERE job = ? AND name = ?"
            found = connection.execute(query, (self._job, name)).fetchone()
            if found is None:
                raise KeyError(name)
            return _read(connection, "blobs", found[0])

    def parameters(self) -> Parameters:
        with self._transaction("DEFERRED") as connection:
            row, version = self._head(connection) or (0, 0)
            if not row:
                raise self._not_begun()
            return Parameters(version, np.frombuffer(_read(connection, "vectors", row), "<f4"))

    def claim(self, server: str, *, now: float, lease_s: float) -> Accepted | None:
        with self._transaction() as connection:
            found = connection.execute(
                "UPDATE queue SET held_until = ? WHERE position ="
                " (SELECT min(position) FROM queue WHERE job = ? AND held_until <= ?) RETURNING entry",
                (now + lease_s, self._job, now),
            ).fetchall()
        return self._claimed(found[0][0]) if found else None

    def assimilate(self, accepted: Accepted, update: Update, *, server: str, now: float) -> int | None:
        with self._transaction() as connection:
            taken = connection.execute(
                "DELETE FROM queue WHERE job = ? AND assignment = ?", (self._job, accepted.assignment)
            )
            head = self._head(connection)
            if taken.rowcount == 0 or head is None:
                return None
            row, version = head[0], head[1] + 1
            with connection.blobopen("vectors", "data", row) as vector:
                new = update(np.frombuffer(vector.read(), "<f4"))
                vector.seek(0)
                vector.write(new.astype("<f4", copy=False).data.cast("B"))
            connection.execute("UPDATE jobs SET version = ? WHERE id = ?", (version, row))
            self._drop(connection, [accepted.result])
            self._log(connection, [self._assimilated(accepted, version, server=server, now=now)])
        return version

    def close(self) -> None:
        for connection, in_use in list(self._connections.values()):
            with in_use:  # by its thread: closing it meanwhile would kill the process
                connection.close()

    def _head(self, connection: sqlite3.Connection) -> tuple[int, int] | None:
        """Row and version of the job's parameters; None if it has none."""
        query = "SELECT id, version FROM jobs WHERE name = ?"
        found: tuple[int, int] | None = connection.execute(query, (self._job,)).fetchone()
        return found

    @contextmanager
    def _transaction(self, kind: str = "IMMEDIATE") -> Iterator[sqlite3.Connection]:
        with self._connection() as connection:
            connection.execute(f"BEGIN {kind}")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:  # SQLite itself ends some that fail
                    connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """This thread's connection. A store in memory has one for all threads, which take turns."""
        try:
            thread = threading.get_ident() if self.shared else 0
            if thread not in self._connections:
                self._connections[thread] = self._connect(), threading.Lock()
            connection, in_use = self._connections[thread]
            with in_use:
                yield connection
        except sqlite3.Error as error:
            raise StoreError(
                f"{self.url}: {error}. The folder must exist, be writable, have space, and lie on a disk of this "
                "machine: on Google Drive and other shared folders use /content or /tmp, and copy the file there later"
            ) from error

    def _connect(self) -> sqlite3.Connection:
        new = sqlite3.connect(self.url, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        for setting in ("page_size = 65536", "journal_mode = WAL", "synchronous = NORMAL"):
            new.execute(f"PRAGMA {setting}")
        return new


def _read(connection: sqlite3.Connection, table: str, row: int) -> bytes:
    """A blob copied once, where SELECT copies it twice."""
    with connection.blobopen(table, "data", row, readonly=True) as blob:
        return blob.read()


FORMS = (
    "memory, a file such as job.db or sqlite:////absolute/path, redis://HOST:6379/0, unix:///path/of/redis.sock, "
    "postgresql+psycopg://USER:PASSWORD@HOST/DATABASE or mysql+pymysql://USER:PASSWORD@HOST/DATABASE"
)
ELSEWHERE = {
    **dict.fromkeys(("redis", "rediss", "unix"), "RedisStore"),
    **dict.fromkeys(("postgresql+psycopg", "mysql+pymysql"), "SqlStore"),
}
"""Classes by scheme, of stores that need libraries beyond the base."""


def open_store(url: str, job: str) -> ParameterStore:
    """Open the state of ``job`` at ``url``, one of `FORMS` (else ValueError); StoreError if that fails."""
    path, scheme = MEMORY if url == "memory" else _file_of(url), url.rpartition("://")[0]
    if path:
        return SqliteStore(path, job)
    if scheme not in ELSEWHERE:
        raise ValueError(f"{scheme or url!r} is no store: use {FORMS}")
    try:
        remote = import_module("colab_swarm.workunits.remote")
        return cast(ParameterStore, getattr(remote, ELSEWHERE[scheme])(url, job))
    except ImportError as error:
        raise StoreError(f"{error}: `pip install 'colab-swarm[workunits]'`") from error


def _file_of(url: str) -> str:
    """Path of the SQLite file at an address; empty if it names none."""
    scheme, _, rest = url.rpartition("://")
    if scheme:
        return rest[1:] if scheme == "sqlite" and rest.startswith("/") else ""
    return url if Path(url).suffix or Path(url).name != url else ""  # else a word such as "redis"
