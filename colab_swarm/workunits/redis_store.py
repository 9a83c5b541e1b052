"""A job's state in a Redis server, which the paper compares with a database (section IV-D).

Eventual consistency: parameter servers read, compute and write the parameters without waiting for one another
(section III-D). If two updates overlap, one of the changes is lost. Training tolerates this loss. One script changes
log, queue and version together, so no entry is ever lost and no unit is assimilated twice. Vectors and blobs are
lists of pieces of 128 KiB, because the server and its clients reuse memory for pieces of this size.

These keys are under ``colab-swarm:JOB:``:

- ``log``: the encoded entries.
- ``queue``: the assignments whose results wait to be assimilated, oldest first.
- ``accepted`` and ``held``: for these assignments, the encoded entries and the times when their leases end.
- ``version``, ``parameters`` and ``blob:NAME``: the version of the parameters, the parameters, and the blobs.
- ``new:RANDOM``: new parameters that have not yet replaced ``parameters``.
"""

import logging
import os
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
from redis import Redis, RedisError
from redis.backoff import NoBackoff
from redis.retry import Retry

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

PIECE_BYTES = 128 << 10
PIECES_PER_COMMAND = 16
CONNECT_S = 10
ANSWER_S = 60.0
NEW_S = 3600
"""Life of new parameters whose server died before they replaced the old parameters."""
CLAIM = """
for _, assignment in ipairs(redis.call('LRANGE', KEYS[1], 0, -1)) do
    if tonumber(redis.call('HGET', KEYS[2], assignment) or 0) <= tonumber(ARGV[1]) then
        redis.call('HSET', KEYS[2], assignment, ARGV[2])
        return redis.call('HGET', KEYS[3], assignment)
    end
end
"""
ASSIMILATE = """
-- RENAME comes first: it is the one command that can fail, and Redis undoes nothing of a script
-- 0: done; -1: it was done before; else the version that the entry must be encoded for
if redis.call('HEXISTS', KEYS[3], ARGV[1]) == 0 then redis.call('UNLINK', KEYS[7]) return -1 end
local version = tonumber(redis.call('GET', KEYS[5]) or 0)
if version ~= tonumber(ARGV[2]) then return version end
redis.call('RENAME', KEYS[7], KEYS[6])
redis.call('PERSIST', KEYS[6])
redis.call('LREM', KEYS[1], 1, ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1])
redis.call('HDEL', KEYS[3], ARGV[1])
redis.call('RPUSH', KEYS[4], ARGV[3])
redis.call('UNLINK', KEYS[8])
redis.call('INCR', KEYS[5])
return 0
"""
logger = logging.getLogger(__name__)


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except RedisError as error:
        raise StoreError(
            f"Redis: {str(error).strip()}. Check that redis-server runs, that address, database, user and password "
            "are right, and that it has space left"
        ) from error


REDIS = _explained()
"""Decorator that turns an error of Redis into a StoreError with advice."""


class RedisStore(ParameterStore):
    """A job's state in the Redis server at ``url``."""

    @REDIS
    def __init__(self, url: str, job: str) -> None:
        super().__init__(url, job)
        self._redis = Redis.from_url(
            url,
            # no retry: a command whose answer was lost may be in the log already
            retry=Retry(NoBackoff(), 0),
            socket_connect_timeout=CONNECT_S,
            socket_timeout=ANSWER_S,
            socket_read_size=256 << 10,
        )
        self._claim = self._redis.register_script(CLAIM)
        self._assimilate = self._redis.register_script(ASSIMILATE)
        self._redis.ping()

    @REDIS
    def begin(self, first: Floats) -> None:
        if not self._redis.info("persistence").get("aof_enabled"):
            logger.warning(
                "this Redis server holds jobs in memory: if it stops, job %r is lost; "
                "`redis-cli config set appendonly yes` saves it to disk",
                self._job,
            )
        new = self._upload(first)
        with self._redis.pipeline(transaction=True) as step:
            step.renamenx(new, self._key("parameters"))
            step.persist(self._key("parameters"))
            begun, _ = step.execute()
        if not begun:
            self._redis.unlink(new)
        self._check_size(first)

    @REDIS
    def append(
        self, entries: Sequence[AnyEntry], *, put: Blobs | None = None, drop: Collection[str] = ()
    ) -> None:
        with self._redis.pipeline(transaction=True) as step:
            for entry in entries:
                data = encode_entry(entry)
                step.rpush(self._key("log"), data)
                if isinstance(entry, Accepted):
                    step.rpush(self._key("queue"), entry.assignment)
                    step.hset(self._key("accepted"), entry.assignment, data)
            for name in (*(put or {}), *drop):
                step.unlink(self._key("blob", name))
            for name, blob in (put or {}).items():
                _push(step, self._key("blob", name), blob)
            step.execute()

    @REDIS
    def entries(self, after: int = 0) -> list[tuple[int, AnyEntry]]:
        records: Any = self._redis.lrange(self._key("log"), after, -1)
        return [(position, decode_entry(data)) for position, data in enumerate(records, after + 1)]

    @REDIS
    def blob(self, name: str) -> bytes:
        pieces: Any = self._redis.lrange(self._key("blob", name), 0, -1)
        if not pieces:
            raise KeyError(name)
        return b"".join(pieces)

    @REDIS
    def parameters(self) -> Parameters:
        with self._redis.pipeline(transaction=True) as step:
            step.get(self._key("version"))
            step.lrange(self._key("parameters"), 0, -1)
            version, pieces = step.execute()
        if not pieces:
            raise self._not_begun()
        return Parameters(int(version or 0), np.frombuffer(b"".join(pieces), "<f4"))

    @REDIS
    def claim(self, server: str, *, now: float, lease_s: float) -> Accepted | None:
        keys = [self._key("queue"), self._key("held"), self._key("accepted")]
        entry: Any = self._claim(keys=keys, args=[now, now + lease_s])
        if entry is None:
            return None
        return cast(Accepted, decode_entry(entry))

    @REDIS
    def assimilate(self, accepted: Accepted, update: Update, *, server: str, now: float) -> int | None:
        began = time.perf_counter()
        old = self.parameters()
        keys = [self._key(name) for name in ("queue", "held", "accepted", "log", "version", "parameters")]
        keys += [self._upload(update(old.values)), self._key("blob", accepted.result)]
        version = old.version
        # the entry contains the new version, so it is encoded again if another server was faster
        while True:
            entry = assimilated(accepted, version + 1, server=server, now=now, began=began)
            args: list[Any] = [accepted.assignment, version, encode_entry(entry)]
            newest = int(cast(int, self._assimilate(keys=keys, args=args)))
            if newest < 0:
                return None
            if newest == 0:
                return version + 1
            version = newest

    def close(self) -> None:
        self._redis.close()

    def _key(self, *parts: str) -> str:
        return ":".join(("colab-swarm", self._job, *parts))

    def _upload(self, values: Floats) -> str:
        """Write ``values`` under a new key, and return the key. A script later renames it to ``parameters``."""
        key = self._key("new", os.urandom(8).hex())
        with self._redis.pipeline(transaction=False) as pipeline:
            _push(pipeline, key, as_bytes(values))
            pipeline.expire(key, NEW_S)
            pipeline.execute()
        return key


def _push(pipeline: Any, key: str, data: bytes | memoryview) -> None:
    pieces = pieces_of(data, PIECE_BYTES)
    for start in range(0, len(pieces), PIECES_PER_COMMAND):
        pipeline.rpush(key, *pieces[start : start + PIECES_PER_COMMAND])
