"""The state of a job, which outlives the coordinator: log, parameters, results that wait.

Every method is atomic and durable where the store is. A process killed at any moment leaves all of
a call or nothing. The coordinator and the parameter servers use a store at once, from several
threads and processes. A call that raises `StoreError` because the connection broke may have taken
effect or not: read the log again.

`SqliteStore` is the default: one file for several processes on one machine. Its log is written
ahead (WAL): entries survive the death of any process; a power failure may lose the last seconds.
Pages are 64 KiB, the most that SQLite allows: megabytes move four times as fast as with 4 KiB.
"""

import sqlite3
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np

from colab_swarm.errors import StoreError, require
from colab_swarm.project import install
from colab_swarm.workunits.state import Accepted, AnyEntry, Assimilated, decode_entry, encode_entry
from colab_swarm.workunits.weights import Floats, as_bytes

Blobs: TypeAlias = Mapping[str, bytes]
Update: TypeAlias = Callable[[Floats], Floats]  # of current parameters, which are read-only and lent
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""Environment of servers: glibc reuses the memory of vectors, which halves the time of an update."""


@dataclass(frozen=True)
class Parameters:
    """Read-only values (numel,); eventual consistency may lose some of the ``version`` updates."""

    version: int
    values: Floats


class ParameterStore(ABC):
    """State of one job. ``shared``: other processes can open it at ``url``."""

    shared = True

    def __init__(self, url: str, job: str) -> None:
        self.url, self._job = url, job

    @abstractmethod
    def begin(self, first: Floats) -> None:
        """Save ``first`` (numel,) as version 0 of a new job; raise StoreError if the job has another size."""

    @abstractmethod
    def append(
        self, entries: Sequence[AnyEntry], *, put: Blobs | None = None, drop: Collection[str] = ()
    ) -> None:
        """Append to the log, queue each `Accepted`, save blobs ``put``, delete blobs ``drop``."""

    @abstractmethod
    def entries(self, after: int = 0) -> list[tuple[int, AnyEntry]]:
        """Return the log beyond position ``after``. Positions start at 1 and may have gaps."""

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
        """Replace the parameters by ``update(parameters)``, log `Assimilated`, delete the result;
        return the new version, or None, with nothing changed, if this was done already.
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


def assimilated(accepted: Accepted, version: int, *, server: str, now: float, began: float) -> Assimilated:
    return Assimilated(
        at=now,
        unit=accepted.unit,
        assignment=accepted.assignment,
        server=server,
        version=version,
        seconds=time.perf_counter() - began,
    )


PARAMETERS = "parameters"  # name of the blob that holds the parameters
# `swarm_ends` has the ends of the logs, apart from the jobs: the coordinator's entries do not wait for an assimilation
TABLES = (
    "swarm_jobs (job VARCHAR(64) PRIMARY KEY, version BIGINT NOT NULL)",
    "swarm_ends (job VARCHAR(64) PRIMARY KEY, position BIGINT NOT NULL)",
    "swarm_log (job VARCHAR(64), position BIGINT, entry {blob} NOT NULL, PRIMARY KEY (job, position))",
    "swarm_queue (job VARCHAR(64), assignment VARCHAR(32), position BIGINT NOT NULL, entry {blob} NOT NULL,"
    " held_until DOUBLE PRECISION NOT NULL, PRIMARY KEY (job, assignment))",
    "swarm_blobs (job VARCHAR(64), name VARCHAR(128), piece INTEGER, data {blob} NOT NULL,"
    " PRIMARY KEY (job, name, piece))",
)


class TableStore(ParameterStore):
    """A job's state in the tables of a database; a subclass connects to it and moves vectors.
    ``locking`` ends a SELECT that keeps others from the row until the transaction ends.
    """

    blob_type, piece_bytes, locking = "BLOB", 1 << 30, ""

    @abstractmethod
    def _transaction(self, *, reads: bool = False) -> AbstractContextManager[Any]:
        """Return a block with a connection, which happens as a whole or not at all."""

    @abstractmethod
    def _run(self, connection: Any, statement: str, **values: Any) -> Any:
        """Execute a statement with named values, ``:job`` among them, and return its cursor."""

    @abstractmethod
    def _newest(self, connection: Any) -> Parameters:
        """Return the parameters, version and values of one moment."""

    def _data(self, connection: Any, name: str) -> bytes | None:
        query = "SELECT data FROM swarm_blobs WHERE job = :job AND name = :name ORDER BY piece"
        pieces = self._run(connection, query, name=name).fetchall()
        return b"".join(piece[0] for piece in pieces) if pieces else None

    def _replace(self, connection: Any, update: Update) -> None:
        self._put(connection, PARAMETERS, as_bytes(update(self._newest(connection).values)))

    def _make_tables(self) -> None:
        with self._transaction() as connection:
            for table in TABLES:
                self._run(connection, f"CREATE TABLE IF NOT EXISTS {table.format(blob=self.blob_type)}")

    def begin(self, first: Floats) -> None:
        with self._transaction() as connection:
            if self._version(connection) is None:
                self._run(connection, "INSERT INTO swarm_jobs (job, version) VALUES (:job, 0)")
                self._put(connection, PARAMETERS, as_bytes(first))
        self._check_size(first)

    def append(
        self, entries: Sequence[AnyEntry], *, put: Blobs | None = None, drop: Collection[str] = ()
    ) -> None:
        with self._transaction() as connection:
            for name, data in (put or {}).items():
                self._put(connection, name, data)
            self._drop(connection, drop)
            self._log(connection, entries)

    def entries(self, after: int = 0) -> list[tuple[int, AnyEntry]]:
        with self._transaction(reads=True) as connection:
            found = self._run(
                connection,
                "SELECT position, entry FROM swarm_log WHERE job = :job AND position > :after ORDER BY position",
                after=after,
            ).fetchall()
        return [(position, decode_entry(entry)) for position, entry in found]

    def blob(self, name: str) -> bytes:
        with self._transaction(reads=True) as connection:
            data = self._data(connection, name)
        if data is None:
            raise KeyError(name)
        return data

    def parameters(self) -> Parameters:
        with self._transaction(reads=True) as connection:
            return self._newest(connection)

    def claim(self, server: str, *, now: float, lease_s: float) -> Accepted | None:
        free = "job = :job AND held_until <= :now"
        with self._transaction() as connection:
            query = f"SELECT assignment, entry FROM swarm_queue WHERE {free} ORDER BY position"
            for assignment, entry in self._run(connection, query, now=now).fetchall():
                if self._run(
                    connection,
                    f"UPDATE swarm_queue SET held_until = :until WHERE {free} AND assignment = :assignment",
                    now=now,
                    until=now + lease_s,
                    assignment=assignment,
                ).rowcount:  # else another server took it meanwhile
                    return cast(Accepted, decode_entry(entry))
        return None

    def assimilate(self, accepted: Accepted, update: Update, *, server: str, now: float) -> int | None:
        began = time.perf_counter()
        with self._transaction() as connection:
            new = 1 + (self._version(connection) or 0)
            leave = "DELETE FROM swarm_queue WHERE job = :job AND assignment = :assignment"
            if not self._run(connection, leave, assignment=accepted.assignment).rowcount:
                return None
            self._replace(connection, update)
            self._run(connection, "UPDATE swarm_jobs SET version = :version WHERE job = :job", version=new)
            self._drop(connection, [accepted.result])
            self._log(connection, [assimilated(accepted, new, server=server, now=now, began=began)])
        return new

    def _version(self, connection: Any) -> int | None:
        query = f"SELECT version FROM swarm_jobs WHERE job = :job{self.locking}"
        found: tuple[int] | None = self._run(connection, query).fetchone()
        return None if found is None else found[0]

    def _put(self, connection: Any, name: str, data: bytes | memoryview) -> None:
        self._drop(connection, [name])
        put = "INSERT INTO swarm_blobs (job, name, piece, data) VALUES (:job, :name, :piece, :data)"
        for number, piece in enumerate(pieces_of(data, self.piece_bytes)):
            self._run(connection, put, name=name, piece=number, data=piece)

    def _drop(self, connection: Any, names: Collection[str]) -> None:
        for name in names:
            self._run(connection, "DELETE FROM swarm_blobs WHERE job = :job AND name = :name", name=name)

    def _log(self, connection: Any, entries: Sequence[AnyEntry]) -> None:
        """Append at the end of a transaction: others wait from here, readers see entries in order."""
        if not entries:
            return
        move = "UPDATE swarm_ends SET position = position + :more WHERE job = :job"
        if not self._run(connection, move, more=len(entries)).rowcount:
            begin = "INSERT INTO swarm_ends (job, position) VALUES (:job, :more)"
            self._run(connection, begin, more=len(entries))
        (end,) = self._run(connection, "SELECT position FROM swarm_ends WHERE job = :job").fetchone()
        insert = "INSERT INTO swarm_log (job, position, entry) VALUES (:job, :position, :entry)"
        for position, entry in enumerate(entries, end - len(entries) + 1):
            row = {"position": position, "entry": encode_entry(entry)}
            self._run(connection, insert, **row)
            if isinstance(entry, Accepted):
                self._run(
                    connection,
                    "INSERT INTO swarm_queue (job, assignment, position, entry, held_until)"
                    " VALUES (:job, :assignment, :position, :entry, 0)",
                    assignment=entry.assignment,
                    **row,
                )


def pieces_of(data: bytes | memoryview, size: int) -> list[memoryview]:
    view = memoryview(data)
    return [view[start : start + size] for start in range(0, max(1, len(view)), size)]


MEMORY = ":memory:"
BUSY_S = 60.0  # time to wait for another writer


class SqliteStore(TableStore):
    """A job's state in the file ``path``, or in this process, at `MEMORY`; a vector is one row."""

    def __init__(self, path: str | Path, job: str) -> None:
        self.shared = path != MEMORY
        super().__init__(str(Path(path).absolute()) if self.shared else MEMORY, job)
        self._in_use = threading.Lock()
        self._make_tables()

    @cached_property
    def _connection(self) -> sqlite3.Connection:
        new = sqlite3.connect(self.url, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        for setting in ("page_size = 65536", "journal_mode = WAL", "synchronous = NORMAL"):
            new.execute(f"PRAGMA {setting}")
        return new

    def _run(self, connection: sqlite3.Connection, statement: str, **values: Any) -> sqlite3.Cursor:
        return connection.execute(statement, {"job": self._job, **values})

    def _row(self, connection: sqlite3.Connection, name: str) -> int | None:
        query = "SELECT rowid FROM swarm_blobs WHERE job = :job AND name = :name"
        return next(self._run(connection, query, name=name), (None,))[0]

    def _data(self, connection: sqlite3.Connection, name: str) -> bytes | None:
        if (row := self._row(connection, name)) is None:
            return None
        with connection.blobopen("swarm_blobs", "data", row, readonly=True) as blob:
            return blob.read()

    def _newest(self, connection: sqlite3.Connection) -> Parameters:
        if (data := self._data(connection, PARAMETERS)) is None:
            raise self._not_begun()
        return Parameters(self._version(connection) or 0, np.frombuffer(data, "<f4"))

    def _replace(self, connection: sqlite3.Connection, update: Update) -> None:
        row = cast(int, self._row(connection, PARAMETERS))
        with connection.blobopen("swarm_blobs", "data", row) as vector:
            new = update(np.frombuffer(vector.read(), "<f4"))
            vector.seek(0)
            vector.write(as_bytes(new))

    def close(self) -> None:
        with self._in_use:  # closing it meanwhile would kill the process
            self._connection.close()

    @contextmanager
    def _transaction(self, *, reads: bool = False) -> Iterator[sqlite3.Connection]:
        try:
            with self._in_use, self._connection as connection:  # which commits, or rolls back
                connection.execute("BEGIN DEFERRED" if reads else "BEGIN IMMEDIATE")
                yield connection
        except sqlite3.Error as error:
            raise StoreError(
                f"{self.url}: {error}. The folder must exist, be writable, have space, and lie on a disk of this "
                "machine: on Google Drive and other shared folders use /content or /tmp, and copy the file there later"
            ) from error


FORMS = (
    "memory, a file such as job.db or sqlite:////absolute/path, redis://HOST:6379/0, unix:///path/of/redis.sock, "
    "postgresql+psycopg://USER:PASSWORD@HOST/DATABASE or mysql+pymysql://USER:PASSWORD@HOST/DATABASE"
)
ELSEWHERE = {  # stores that need libraries beyond the base, by scheme
    **dict.fromkeys(("redis", "rediss", "unix"), "RedisStore"),
    **dict.fromkeys(("postgresql+psycopg", "mysql+pymysql"), "SqlStore"),
}


def open_store(url: str, job: str) -> ParameterStore:
    """Open the state of ``job`` at ``url``, one of `FORMS` (else ValueError); StoreError if that fails."""
    scheme, _, rest = url.rpartition("://")
    if scheme == "sqlite" and rest.startswith("/"):
        return SqliteStore(rest[1:], job)
    if not scheme and (Path(url).suffix or Path(url).name != url):  # else a word such as "redis"
        return SqliteStore(url, job)
    if url == "memory":
        return SqliteStore(MEMORY, job)
    require(scheme in ELSEWHERE, f"{scheme or url!r} is no store: use {FORMS}")
    try:
        remote = import_module("colab_swarm.workunits.remote")
        return cast(ParameterStore, getattr(remote, ELSEWHERE[scheme])(url, job))
    except ImportError as error:
        raise StoreError(f"{error}: {install('workunits')}") from error
