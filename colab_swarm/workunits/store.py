"""Where a job's state lives: its log, its parameters, the results that wait. It outlives the coordinator.

Every method is atomic and, where the store is durable, lasting when it returns: a process killed at any moment
leaves either all of a call or nothing. Stores are used by the coordinator and by the parameter servers at once, from
several threads and processes. A call that raises `StoreError` because the store was lost on the way may have been done
or not: read the log again.

A store in one file, on SQLite: the default, durable, for several processes of one machine.

The file's log is written ahead (WAL): what was kept outlives the death of any process. If the machine itself loses
power, the last seconds may be lost, and the job goes on from a moment before (a sync per entry would cost ten times
the time). Writers follow one another: an assimilation holds the file's one write lock, readers go on beside it. Pages
are 64 KiB, the most that SQLite allows: vectors of megabytes are read and written four times as fast as with the
usual 4 KiB.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol, TypeAlias, cast

import numpy as np

from colab_swarm.errors import StoreError
from colab_swarm.workunits.state import Accepted, AnyEntry, Assimilated, decode_entry, encode_entry
from colab_swarm.workunits.weights import Floats

Update: TypeAlias = Callable[[Floats], Floats]

"""Of the parameters, which are read-only and only lent; it returns new ones, which it gives away."""

KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}

"""For the environment of processes that assimilate: glibc keeps the memory of vectors, instead of asking the system for
it anew, which is 7,000 page faults and half of the processor's time per update of 5 M parameters."""


@dataclass(frozen=True)
class Parameters:
    """The server's parameters.

    Attributes:
        version: assimilations so far; under eventual consistency some of them may be lost in ``values``.
        values: read-only, (numel,).
    """

    version: int
    values: Floats


class ParameterStore(Protocol):
    """One job's state. Tensors are float32 vectors, blobs are bytes with a name."""

    shared: bool
    """Whether other processes can open it too."""

    def begin(self, first: Floats) -> None:
        """Put in the first parameters, as version 0, unless the job has some already.

        Raises:
            StoreError: it holds a job with another number of parameters.
        """

    def append(
        self, entries: Sequence[AnyEntry], *, put: Mapping[str, bytes] = ..., drop: Collection[str] = ()
    ) -> None:
        """Add to the log; keep the blobs ``put``, delete those named in ``drop``. Each `Accepted` is queued, too."""

    def entries(self, after: int = 0) -> list[tuple[int, AnyEntry]]:
        """The log beyond position ``after``, in order, each with its position, from 1 up (gaps are allowed)."""

    def blob(self, name: str) -> bytes:
        """What was put.

        Raises:
            KeyError: there is none of this name.
        """

    def parameters(self) -> Parameters:
        """The newest."""

    def claim(self, server: str, *, now: float, lease_s: float) -> Accepted | None:
        """The oldest accepted result that nobody holds, for ``server`` until ``now + lease_s``; None if none waits."""

    def assimilate(self, accepted: Accepted, update: Update, *, server: str, now: float) -> int | None:
        """Replace the parameters by ``update(parameters)``, log `Assimilated`, drop the result from queue and blobs.

        Returns:
            The new version; None, with nothing changed, if this unit was assimilated already.
        """

    def waiting(self) -> int:
        """Accepted results that are not assimilated."""

    def close(self) -> None:
        """Let go of files and connections; what was kept stays."""


class Stopwatch:
    """Since when results are in the hands of this process, for `Assimilated.seconds`."""

    def __init__(self) -> None:
        self._began: dict[str, float] = {}

    def start(self, accepted: Accepted) -> Accepted:
        """``accepted`` was claimed just now."""
        self._began[accepted.assignment] = time.perf_counter()
        return accepted

    def began(self, accepted: Accepted) -> float:
        """When it was claimed; now, if that was elsewhere. Forgets it."""
        return self._began.pop(accepted.assignment, time.perf_counter())


def assimilated(accepted: Accepted, version: int, *, server: str, now: float, began: float) -> Assimilated:
    """What `ParameterStore.assimilate` adds to the log; ``began``: by `Stopwatch`."""
    return Assimilated(
        at=now,
        unit=accepted.unit,
        assignment=accepted.assignment,
        server=server,
        version=version,
        seconds=time.perf_counter() - began,
    )


def check_size(job: str, numel: int, first: Floats) -> None:
    """Raise StoreError if a job of ``numel`` parameters is begun again with ``first``."""
    if numel != len(first):
        raise StoreError(
            f"the store holds a job {job!r} of {numel:,} parameters, but the model has {len(first):,}: "
            "give the job another name, or use another store"
        )


def not_begun(job: str) -> StoreError:
    """The error of reading parameters that nobody put in."""
    return StoreError(f"the store holds no job {job!r} yet: start its coordinator first")


class MemoryStore:
    """A job's state in memory; safe to use from several threads, assimilations follow one another."""

    shared = False

    def __init__(self, job: str) -> None:
        self._job = job
        self._lock = threading.Lock()
        self._log: list[AnyEntry] = []
        self._blobs: dict[str, bytes] = {}
        self._queue: dict[str, Accepted] = {}  # by assignment, oldest first
        self._held_until: dict[str, float] = {}  # by assignment
        self._stopwatch = Stopwatch()
        self._parameters: Parameters | None = None

    def begin(self, first: Floats) -> None:
        """See `ParameterStore.begin`."""
        with self._lock:
            if self._parameters is None:
                self._parameters = Parameters(0, _frozen(first.copy()))
            check_size(self._job, len(self._parameters.values), first)

    def append(
        self,
        entries: Sequence[AnyEntry],
        *,
        put: Mapping[str, bytes] | None = None,
        drop: Collection[str] = (),
    ) -> None:
        """See `ParameterStore.append`."""
        with self._lock:
            self._log += entries
            self._queue |= {entry.assignment: entry for entry in entries if isinstance(entry, Accepted)}
            self._blobs |= put or {}
            for name in drop:
                self._blobs.pop(name, None)

    def entries(self, after: int = 0) -> list[tuple[int, AnyEntry]]:
        """See `ParameterStore.entries`."""
        with self._lock:
            return list(enumerate(self._log[after:], after + 1))

    def blob(self, name: str) -> bytes:
        """See `ParameterStore.blob`."""
        return self._blobs[name]

    def parameters(self) -> Parameters:
        """See `ParameterStore.parameters`."""
        if self._parameters is None:
            raise not_begun(self._job)
        return self._parameters

    def claim(self, server: str, *, now: float, lease_s: float) -> Accepted | None:
        """See `ParameterStore.claim`."""
        with self._lock:
            for assignment, accepted in self._queue.items():
                if self._held_until.get(assignment, now) <= now:
                    self._held_until[assignment] = now + lease_s
                    return self._stopwatch.start(accepted)
            return None

    def assimilate(self, accepted: Accepted, update: Update, *, server: str, now: float) -> int | None:
        """See `ParameterStore.assimilate`."""
        with self._lock:
            if accepted.assignment not in self._queue:
                return None
            began, old = self._stopwatch.began(accepted), self.parameters()
            new = Parameters(old.version + 1, _frozen(update(old.values)))
            self._log.append(assimilated(accepted, new.version, server=server, now=now, began=began))
            self._parameters = new
            del self._queue[accepted.assignment]
            self._held_until.pop(accepted.assignment, None)
            self._blobs.pop(accepted.result, None)
            return new.version

    def waiting(self) -> int:
        """See `ParameterStore.waiting`."""
        return len(self._queue)

    def close(self) -> None:
        """See `ParameterStore.close`."""


def _frozen(values: Floats) -> Floats:
    frozen = values.astype(np.float32, copy=False)
    frozen.flags.writeable = False
    return frozen


BUSY_S = 60.0

"""How long to wait for another writer."""

TABLES = (
    "CREATE TABLE IF NOT EXISTS jobs (id INTEGER PRIMARY KEY, name TEXT UNIQUE, version INTEGER)",
    "CREATE TABLE IF NOT EXISTS vectors (job INTEGER PRIMARY KEY, data BLOB)",  # apart, for updates in place
    "CREATE TABLE IF NOT EXISTS log (position INTEGER PRIMARY KEY AUTOINCREMENT, job TEXT, entry BLOB)",
    "CREATE TABLE IF NOT EXISTS queue"
    " (position INTEGER PRIMARY KEY AUTOINCREMENT, job TEXT, assignment TEXT, entry BLOB, held_until REAL)",
    "CREATE TABLE IF NOT EXISTS blobs (job TEXT, name TEXT, data BLOB, UNIQUE (job, name))",
)


class SqliteStore:
    """A job's state in the file ``path``, which is made if there is none."""

    shared = True

    def __init__(self, path: str | Path, job: str) -> None:
        self._path, self._job = Path(path), job
        self._local, self._lock = threading.local(), threading.Lock()
        self._connections: list[tuple[sqlite3.Connection, threading.Lock]] = []
        self._stopwatch = Stopwatch()
        with self._transaction() as connection:
            for table in TABLES:
                connection.execute(table)

    def begin(self, first: Floats) -> None:
        """See `ParameterStore.begin`."""
        with self._transaction() as connection:
            if self._head(connection) is None:
                values = first.astype("<f4", copy=False).data
                cursor = connection.execute("INSERT INTO jobs (name, version) VALUES (?, 0)", (self._job,))
                connection.execute("INSERT INTO vectors VALUES (?, ?)", (cursor.lastrowid, values))
        check_size(self._job, len(self.parameters().values), first)

    def append(
        self,
        entries: Sequence[AnyEntry],
        *,
        put: Mapping[str, bytes] | None = None,
        drop: Collection[str] = (),
    ) -> None:
        """See `ParameterStore.append`."""
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
        """See `ParameterStore.entries`."""
        found = self._rows(
            "SELECT position, entry FROM log WHERE job = ? AND position > ? ORDER BY position",
            self._job,
            after,
        )
        return [(position, decode_entry(entry)) for position, entry in found]

    def blob(self, name: str) -> bytes:
        """See `ParameterStore.blob`."""
        with self._transaction("DEFERRED") as connection:
            query = "SELECT rowid FROM blobs WHERE job = ? AND name = ?"
            found = connection.execute(query, (self._job, name)).fetchone()
            if found is None:
                raise KeyError(name)
            return _read(connection, "blobs", found[0])

    def parameters(self) -> Parameters:
        """See `ParameterStore.parameters`."""
        with self._transaction("DEFERRED") as connection:
            row, version = self._head(connection) or (0, 0)
            if not row:
                raise not_begun(self._job)
            return Parameters(version, np.frombuffer(_read(connection, "vectors", row), "<f4"))

    def claim(self, server: str, *, now: float, lease_s: float) -> Accepted | None:
        """See `ParameterStore.claim`."""
        with self._transaction() as connection:
            found = connection.execute(
                "UPDATE queue SET held_until = ? WHERE position ="
                " (SELECT min(position) FROM queue WHERE job = ? AND held_until <= ?) RETURNING entry",
                (now + lease_s, self._job, now),
            ).fetchall()
        if not found:
            return None
        entry = decode_entry(found[0][0])
        assert isinstance(entry, Accepted)
        return self._stopwatch.start(entry)

    def assimilate(self, accepted: Accepted, update: Update, *, server: str, now: float) -> int | None:
        """See `ParameterStore.assimilate`."""
        began = self._stopwatch.began(accepted)
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
            entry = assimilated(accepted, version, server=server, now=now, began=began)
            self._log(connection, [entry])
        return version

    def waiting(self) -> int:
        """See `ParameterStore.waiting`."""
        return int(self._rows("SELECT count(*) FROM queue WHERE job = ?", self._job)[0][0])

    def close(self) -> None:
        """See `ParameterStore.close`."""
        with self._lock:
            while self._connections:
                connection, in_use = self._connections.pop()
                with in_use:  # by its thread: to close it meanwhile would kill the process
                    connection.close()

    def _head(self, connection: sqlite3.Connection) -> tuple[int, int] | None:
        """Row and version of the job's parameters; None if it has none."""
        query = "SELECT id, version FROM jobs WHERE name = ?"
        found: tuple[int, int] | None = connection.execute(query, (self._job,)).fetchone()
        return found

    def _rows(self, query: str, *values: object) -> list[tuple]:  # type: ignore[type-arg]
        with self._connection() as connection:
            return connection.execute(query, values).fetchall()

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
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StoreError(
                f"{self._path}: {error}. The folder must exist, be writable, have space, and lie on a disk of this "
                "machine: on Google Drive and other shared folders use /content or /tmp, and copy the file there later"
            ) from error

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """This thread's."""
        with self._errors():
            own: tuple[sqlite3.Connection, threading.Lock] | None = getattr(self._local, "own", None)
            if own is None:
                own = self._local.own = self._connect(), threading.Lock()
                with self._lock:
                    self._connections.append(own)
            with own[1]:
                yield own[0]

    def _connect(self) -> sqlite3.Connection:
        new = sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        new.execute("PRAGMA page_size = 65536")
        new.execute("PRAGMA journal_mode = WAL")
        new.execute("PRAGMA synchronous = NORMAL")
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
    **dict.fromkeys(("redis", "rediss", "unix"), ("redis_store", "RedisStore")),
    **dict.fromkeys(("postgresql+psycopg", "mysql+pymysql"), ("sql", "SqlStore")),
}

"""Module and class by scheme, of stores that need libraries beyond the base."""


def open_store(url: str, job: str) -> ParameterStore:
    """The state of ``job`` in the store at ``url``, which is one of `FORMS`.

    Raises:
        ValueError: it has none of these forms.
        StoreError: the store cannot be opened.
    """
    scheme, _, rest = url.rpartition("://")
    if url == "memory":
        return MemoryStore(job)
    if scheme == "sqlite" and len(rest) > 1 and rest[0] == "/":
        return SqliteStore(rest[1:], job)
    if not scheme and (Path(url).suffix or Path(url).name != url):  # else a word such as "redis"
        return SqliteStore(url, job)
    if scheme not in ELSEWHERE:
        raise ValueError(f"{scheme or url!r} is no store: use {FORMS}")
    module, name = ELSEWHERE[scheme]
    try:
        return cast(ParameterStore, getattr(import_module(f"colab_swarm.workunits.{module}"), name)(url, job))
    except ImportError as error:
        raise StoreError(f"{error}: `pip install 'colab-swarm[workunits]'`") from error
