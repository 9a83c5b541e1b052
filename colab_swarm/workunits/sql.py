"""A store in PostgreSQL, MariaDB or MySQL: strong consistency, which the paper compares with Redis (section IV-D).

An assimilation locks the parameters' row before it reads them, and holds the lock until the new
ones are written. No update is ever lost, and parameter servers wait for one another. Vectors and
blobs are rows of 1 MiB, below every server's limit on the size of a packet or a field.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.schema import CreateTable

from colab_swarm.errors import StoreError
from colab_swarm.workunits.state import Accepted, AnyEntry, decode_entry, encode_entry
from colab_swarm.workunits.store import Blobs, Parameters, ParameterStore, Update
from colab_swarm.workunits.weights import Floats

PIECE_BYTES = 1 << 20
CONNECT_S = 10
PARAMETERS = "parameters"
"""Name of the blob that holds the parameters."""
_tables = sa.MetaData()


def _table(name: str, *columns: sa.Column[Any]) -> sa.Table:
    return sa.Table(name, _tables, sa.Column("job", sa.String(64), primary_key=True), *columns)


JOBS = _table("swarm_jobs", sa.Column("version", sa.BigInteger, nullable=False))
# ends of the logs: a table of its own, so the coordinator's entries do not wait for an assimilation
ENDS = _table("swarm_ends", sa.Column("position", sa.BigInteger, nullable=False))
LOG = _table(
    "swarm_log",
    sa.Column("position", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("entry", sa.LargeBinary(PIECE_BYTES), nullable=False),
)
QUEUE = _table(
    "swarm_queue",
    sa.Column("assignment", sa.String(32), primary_key=True),
    sa.Column("position", sa.BigInteger, nullable=False),
    sa.Column("entry", sa.LargeBinary(PIECE_BYTES), nullable=False),
    sa.Column("held_until", sa.Double, nullable=False),
)
BLOBS = _table(
    "swarm_blobs",
    sa.Column("name", sa.String(128), primary_key=True),
    sa.Column("piece", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("data", sa.LargeBinary(PIECE_BYTES), nullable=False),
)


class SqlStore(ParameterStore):
    """A job's state in the database at ``url``; missing tables are created."""

    def __init__(self, url: str, job: str) -> None:
        super().__init__(url, job)
        self._where = sa.make_url(url).render_as_string(hide_password=True)
        with self._errors():
            self._engine = sa.create_engine(
                url,
                isolation_level="READ COMMITTED",  # after a wait for a lock a statement sees the newest rows
                pool_pre_ping=True,
                connect_args={"connect_timeout": CONNECT_S},
            )
            try:
                self._make_tables()
            except SQLAlchemyError:  # PostgreSQL: another process creates them now
                self._make_tables()

    def begin(self, first: Floats) -> None:
        with self._transaction() as connection:
            found = connection.execute(sa.select(JOBS.c.version).where(JOBS.c.job == self._job)).first()
            if found is None:
                connection.execute(JOBS.insert(), {"job": self._job, "version": 0})
                self._put(connection, PARAMETERS, first.astype("<f4", copy=False).data.cast("B"))
        self._check_size(first)

    def append(
        self, entries: Sequence[AnyEntry], *, put: Blobs | None = None, drop: Collection[str] = ()
    ) -> None:
        with self._transaction() as connection:
            for name, data in (put or {}).items():
                self._put(connection, name, memoryview(data))
            self._drop(connection, drop)
            self._log(connection, entries)

    def entries(self, after: int = 0) -> list[tuple[int, AnyEntry]]:
        with self._transaction() as connection:
            rows = connection.execute(
                sa.select(LOG.c.position, LOG.c.entry)
                .where(LOG.c.job == self._job, LOG.c.position > after)
                .order_by(LOG.c.position)
            ).all()
        return [(row.position, decode_entry(row.entry)) for row in rows]

    def blob(self, name: str) -> bytes:
        with self._transaction() as connection:
            pieces = connection.execute(
                sa.select(BLOBS.c.data)
                .where(BLOBS.c.job == self._job, BLOBS.c.name == name)
                .order_by(BLOBS.c.piece)
            ).all()
        if not pieces:
            raise KeyError(name)
        return b"".join(piece.data for piece in pieces)

    def parameters(self) -> Parameters:
        with self._transaction() as connection:
            return self._parameters(connection)

    def _parameters(self, connection: sa.Connection) -> Parameters:
        rows = connection.execute(  # one statement: version and values of the same moment
            sa.select(JOBS.c.version, BLOBS.c.data)
            .join_from(JOBS, BLOBS, JOBS.c.job == BLOBS.c.job)
            .where(JOBS.c.job == self._job, BLOBS.c.name == PARAMETERS)
            .order_by(BLOBS.c.piece)
        ).all()
        if not rows:
            raise self._not_begun()
        return Parameters(rows[0].version, np.frombuffer(b"".join(row.data for row in rows), "<f4"))

    def claim(self, server: str, *, now: float, lease_s: float) -> Accepted | None:
        waits = sa.and_(QUEUE.c.job == self._job, QUEUE.c.held_until <= now)
        with self._transaction() as connection:
            rows = connection.execute(sa.select(QUEUE).where(waits).order_by(QUEUE.c.position)).all()
            for row in rows:  # another server may take it between the two statements
                take = sa.update(QUEUE).where(waits, QUEUE.c.assignment == row.assignment)
                if connection.execute(take.values(held_until=now + lease_s)).rowcount:
                    return self._claimed(row.entry)
        return None

    def assimilate(self, accepted: Accepted, update: Update, *, server: str, now: float) -> int | None:
        with self._transaction() as connection:
            mine = JOBS.c.job == self._job
            connection.execute(sa.select(JOBS.c.version).where(mine).with_for_update()).all()
            taken = connection.execute(
                sa.delete(QUEUE).where(QUEUE.c.job == self._job, QUEUE.c.assignment == accepted.assignment)
            )
            if taken.rowcount == 0:
                return None
            old = self._parameters(connection)
            new, version = update(old.values), old.version + 1
            self._put(connection, PARAMETERS, new.astype("<f4", copy=False).data.cast("B"))
            connection.execute(sa.update(JOBS).where(mine).values(version=version))
            self._drop(connection, [accepted.result])
            self._log(connection, [self._assimilated(accepted, version, server=server, now=now)])
        return version

    def waiting(self) -> int:
        with self._transaction() as connection:
            count = sa.select(sa.func.count()).select_from(QUEUE).where(QUEUE.c.job == self._job)
            return int(connection.execute(count).scalar_one())

    def close(self) -> None:
        self._engine.dispose()

    def _make_tables(self) -> None:
        with self._engine.begin() as connection:
            for table in _tables.sorted_tables:
                connection.execute(CreateTable(table, if_not_exists=True))

    def _put(self, connection: sa.Connection, name: str, data: memoryview) -> None:
        self._drop(connection, [name])
        starts = range(0, max(1, len(data)), PIECE_BYTES)
        rows = [
            {"job": self._job, "name": name, "piece": piece, "data": bytes(data[start : start + PIECE_BYTES])}
            for piece, start in enumerate(starts)
        ]
        connection.execute(BLOBS.insert(), rows)

    def _drop(self, connection: sa.Connection, names: Collection[str]) -> None:
        connection.execute(sa.delete(BLOBS).where(BLOBS.c.job == self._job, BLOBS.c.name.in_(names)))

    def _log(self, connection: sa.Connection, entries: Sequence[AnyEntry]) -> None:
        """Append at the end of a transaction: from here other writers wait, so readers see entries in order."""
        if not entries:
            return
        mine = ENDS.c.job == self._job
        moved = connection.execute(
            sa.update(ENDS).where(mine).values(position=ENDS.c.position + len(entries))
        )
        if moved.rowcount == 0:
            connection.execute(ENDS.insert(), {"job": self._job, "position": len(entries)})
        end: int = connection.execute(sa.select(ENDS.c.position).where(mine)).scalar_one()
        rows: list[dict[str, Any]] = [
            {"job": self._job, "position": position, "entry": encode_entry(entry)}
            for position, entry in enumerate(entries, end - len(entries) + 1)
        ]
        connection.execute(LOG.insert(), rows)
        queued = [
            row | {"assignment": entry.assignment, "held_until": 0.0}
            for row, entry in zip(rows, entries, strict=True)
            if isinstance(entry, Accepted)
        ]
        if queued:
            connection.execute(QUEUE.insert(), queued)

    @contextmanager
    def _transaction(self) -> Iterator[sa.Connection]:
        with self._errors(), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as error:
            reason = str(getattr(error, "orig", None) or error).strip()
            raise StoreError(
                f"{self._where}: {reason}. Check that the server runs, that the database exists, that user and "
                "password are right, and that the disk has space"
            ) from error
