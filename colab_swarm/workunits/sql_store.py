"""A job's state in an SQL database: an SQLite file, PostgreSQL, MariaDB or MySQL.

Strong consistency: during an assimilation, no other server can use the parameters until the new ones are written.
So no update is ever lost, but parameter servers wait for one another. Vectors and blobs are stored in rows of
1 MiB. Each database server accepts rows of this size.

SQLite is the default: one file for several processes on one machine. It uses a write-ahead log (WAL), so entries
survive the death of any process, but a power failure may lose the last seconds. Pages have 64 KiB, the most
that SQLite allows. With these pages, SQLite reads and writes megabytes four times as fast as with pages of 4 KiB. A
process has one connection to a file, for which its threads wait in turn. So a store in memory works in the same way.
"""

import sqlite3
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from colab_swarm.errors import StoreError
from colab_swarm.workunits.state import Accepted, AnyEntry, decode_entry, encode_entry
from colab_swarm.workunits.store import (
    Blobs,
    Parameters,
    ParameterStore,
    Update,
    assimilated,
    pieces_of,
)
from colab_swarm.workunits.weights import Floats, as_bytes

MEMORY = "memory"
PARAMETERS = "parameters"
"""Name of the blob that holds the parameters."""
PIECE_BYTES = 1 << 20
CONNECT_S = 10
BUSY_S = 60.0
"""How long SQLite waits for another writer, and how long a thread waits for the connection."""

# `swarm_ends` has the ends of the logs. It is separate from the table of jobs, so that the coordinator's entries need
# not wait for an assimilation.
TABLES = (
    "swarm_jobs (job VARCHAR(64) PRIMARY KEY, version BIGINT NOT NULL)",
    "swarm_ends (job VARCHAR(64) PRIMARY KEY, position BIGINT NOT NULL)",
    "swarm_log (job VARCHAR(64), position BIGINT, entry {blob} NOT NULL, PRIMARY KEY (job, position))",
    "swarm_queue (job VARCHAR(64), assignment VARCHAR(32), position BIGINT NOT NULL, entry {blob} NOT NULL,"
    " held_until DOUBLE PRECISION NOT NULL, PRIMARY KEY (job, assignment))",
    "swarm_blobs (job VARCHAR(64), name VARCHAR(128), piece INTEGER, data {blob} NOT NULL,"
    " PRIMARY KEY (job, name, piece))",
)
BLOB_TYPES = {"sqlite": "BLOB", "postgresql": "BYTEA", "mysql": "MEDIUMBLOB"}
FILE_ADVICE = (
    "The folder must exist, be writable, have space, and lie on a disk of this machine: on Google Drive and other "
    "shared folders use /content or /tmp, and copy the file there later"
)
SERVER_ADVICE = (
    "Check that the server runs, that its address and password are right, and that it has space left"
)


class SqlStore(ParameterStore):
    """A job's state in a database. ``url`` is an address, a file's path, or `MEMORY` for a store in this process.

    Missing tables are created.
    """

    def __init__(self, url: str, job: str) -> None:
        if "://" in url:
            self._engine = _server_engine(url)
            self._where = self._engine.url.render_as_string(hide_password=True)
            self._advice = SERVER_ADVICE
        else:
            self.shared = url != MEMORY
            if self.shared:
                url = str(Path(url).absolute())
            self._engine = _file_engine(url)
            self._where = url
            self._advice = FILE_ADVICE
        super().__init__(url, job)
        self._is_file = self._engine.dialect.name == "sqlite"
        # PostgreSQL fails if another process creates the tables at the same time; then they exist
        with suppress(StoreError):
            self._make_tables()
        self._make_tables()

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
        query = (
            "SELECT position, entry FROM swarm_log WHERE job = :job AND position > :after ORDER BY position"
        )
        with self._transaction(reads=True) as connection:
            rows = self._run(connection, query, after=after).fetchall()
        return [(row.position, decode_entry(row.entry)) for row in rows]

    def blob(self, name: str) -> bytes:
        query = "SELECT data FROM swarm_blobs WHERE job = :job AND name = :name ORDER BY piece"
        with self._transaction(reads=True) as connection:
            rows = self._run(connection, query, name=name).fetchall()
        if not rows:
            raise KeyError(name)
        return b"".join(row.data for row in rows)

    def parameters(self) -> Parameters:
        with self._transaction(reads=True) as connection:
            return self._newest(connection)

    def claim(self, server: str, *, now: float, lease_s: float) -> Accepted | None:
        free = "job = :job AND held_until <= :now"
        query = f"SELECT assignment, entry FROM swarm_queue WHERE {free} ORDER BY position"
        hold = f"UPDATE swarm_queue SET held_until = :until WHERE {free} AND assignment = :assignment"
        with self._transaction() as connection:
            for row in self._run(connection, query, now=now).fetchall():
                lease = {"now": now, "until": now + lease_s, "assignment": row.assignment}
                # if another server has taken the result in the meantime, no row changes
                if self._run(connection, hold, **lease).rowcount:
                    return cast(Accepted, decode_entry(row.entry))
        return None

    def assimilate(self, accepted: Accepted, update: Update, *, server: str, now: float) -> int | None:
        began = time.perf_counter()
        leave = "DELETE FROM swarm_queue WHERE job = :job AND assignment = :assignment"
        with self._transaction() as connection:
            version = self._version(connection) or 0
            version += 1
            if not self._run(connection, leave, assignment=accepted.assignment).rowcount:
                return None
            values = update(self._newest(connection).values)
            self._put(connection, PARAMETERS, as_bytes(values))
            self._run(
                connection, "UPDATE swarm_jobs SET version = :version WHERE job = :job", version=version
            )
            self._drop(connection, [accepted.result])
            entry = assimilated(accepted, version, server=server, now=now, began=began)
            self._log(connection, [entry])
        return version

    def close(self) -> None:
        # an update that runs must end first, otherwise its connection would stay open
        if self._is_file:
            with suppress(SQLAlchemyError):
                self._engine.connect().close()
        self._engine.dispose()

    @contextmanager
    def _transaction(self, *, reads: bool = False) -> Iterator[sa.Connection]:
        """Yield a connection for a block. All statements of the block take effect, or none."""
        try:
            with self._engine.begin() as connection:
                if self._is_file:
                    connection.exec_driver_sql("BEGIN DEFERRED" if reads else "BEGIN IMMEDIATE")
                yield connection
        except SQLAlchemyError as error:
            reason = str(getattr(error, "orig", None) or error).strip()
            raise StoreError(f"{self._where}: {reason}. {self._advice}") from error

    def _run(self, connection: sa.Connection, statement: str, **values: Any) -> sa.CursorResult[Any]:
        """Execute a statement with named values, including ``:job``, and return its cursor."""
        return connection.execute(sa.text(statement), {"job": self._job, **values})

    def _make_tables(self) -> None:
        blob = BLOB_TYPES[self._engine.dialect.name]
        with self._transaction() as connection:
            for table in TABLES:
                self._run(connection, f"CREATE TABLE IF NOT EXISTS {table.format(blob=blob)}")

    def _version(self, connection: sa.Connection) -> int | None:
        """Return the version, and lock its row against other writers until the transaction ends."""
        query = "SELECT version FROM swarm_jobs WHERE job = :job"
        # SQLite has only one writer at a time, and no locks of rows
        if not self._is_file:
            query += " FOR UPDATE"
        version: int | None = self._run(connection, query).scalar()
        return version

    def _newest(self, connection: sa.Connection) -> Parameters:
        """Return the parameters with one statement, because others may write between two statements."""
        query = (
            "SELECT version, data FROM swarm_jobs JOIN swarm_blobs ON swarm_jobs.job = swarm_blobs.job"
            " WHERE swarm_jobs.job = :job AND name = :name ORDER BY piece"
        )
        rows = self._run(connection, query, name=PARAMETERS).fetchall()
        if not rows:
            raise self._not_begun()
        data = b"".join(row.data for row in rows)
        return Parameters(rows[0].version, np.frombuffer(data, "<f4"))

    def _put(self, connection: sa.Connection, name: str, data: bytes | memoryview) -> None:
        self._drop(connection, [name])
        put = "INSERT INTO swarm_blobs (job, name, piece, data) VALUES (:job, :name, :piece, :data)"
        for number, piece in enumerate(pieces_of(data, PIECE_BYTES)):
            self._run(connection, put, name=name, piece=number, data=bytes(piece))

    def _drop(self, connection: sa.Connection, names: Collection[str]) -> None:
        for name in names:
            self._run(connection, "DELETE FROM swarm_blobs WHERE job = :job AND name = :name", name=name)

    def _log(self, connection: sa.Connection, entries: Sequence[AnyEntry]) -> None:
        """Append to the log at the end of a transaction. To keep entries in order, other writers wait from here on."""
        if not entries:
            return
        move = "UPDATE swarm_ends SET position = position + :more WHERE job = :job"
        if not self._run(connection, move, more=len(entries)).rowcount:
            begin = "INSERT INTO swarm_ends (job, position) VALUES (:job, :more)"
            self._run(connection, begin, more=len(entries))
        end: int = self._run(connection, "SELECT position FROM swarm_ends WHERE job = :job").scalar_one()
        insert = "INSERT INTO swarm_log (job, position, entry) VALUES (:job, :position, :entry)"
        queue = (
            "INSERT INTO swarm_queue (job, assignment, position, entry, held_until)"
            " VALUES (:job, :assignment, :position, :entry, 0)"
        )
        for position, entry in enumerate(entries, end - len(entries) + 1):
            row = {"position": position, "entry": encode_entry(entry)}
            self._run(connection, insert, **row)
            if isinstance(entry, Accepted):
                self._run(connection, queue, assignment=entry.assignment, **row)


def _server_engine(url: str) -> sa.Engine:
    return sa.create_engine(
        url,
        # with this level, a statement sees the newest rows after a wait for a lock
        isolation_level="READ COMMITTED",
        pool_pre_ping=True,
        connect_args={"connect_timeout": CONNECT_S},
    )


def _file_engine(path: str) -> sa.Engine:
    return sa.create_engine(
        "sqlite://",
        creator=partial(_connect_to_file, path),
        poolclass=sa.QueuePool,
        pool_size=1,
        max_overflow=0,
        pool_timeout=BUSY_S,
    )


def _connect_to_file(path: str) -> sqlite3.Connection:
    if path == MEMORY:
        path = ":memory:"
    # without an isolation level, Python begins no transactions by itself
    connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    for setting in ("page_size = 65536", "journal_mode = WAL", "synchronous = NORMAL"):
        connection.execute(f"PRAGMA {setting}")
    return connection
