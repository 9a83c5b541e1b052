"""A store in Redis: eventual consistency, as in "Distributed Deep Learning Using Volunteer Computing-Like Paradigm".

Parameter servers read the parameters, compute, and write them without waiting for one another (section III-D). Of two
that overlap, one loses its change of the values, which training tolerates. One script changes the log, the queue and
the version together, so no entry is ever lost and no unit is assimilated twice.

Vectors and blobs are lists of pieces of 128 KiB: both sides reuse memory for pieces of this size.

    colab-swarm:JOB:log         encoded entries
    colab-swarm:JOB:queue       assignments whose results wait, oldest first
    colab-swarm:JOB:accepted    assignment -> encoded entry, of those that wait
    colab-swarm:JOB:held        assignment -> end of a parameter server's lease
    colab-swarm:JOB:version, colab-swarm:JOB:parameters
    colab-swarm:JOB:blob:NAME
    colab-swarm:JOB:new:RANDOM  parameters that are not in force yet
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
from redis import Redis, RedisError
from redis.backoff import NoBackoff
from redis.retry import Retry

from colab_swarm.errors import StoreError
from colab_swarm.workunits.state import Accepted, AnyEntry, decode_entry, encode_entry
from colab_swarm.workunits.store import Blobs, Parameters, ParameterStore, Update
from colab_swarm.workunits.weights import Floats

PIECE_BYTES = 128 << 10
PIECES_PER_COMMAND = 16
READ_BYTES = 256 << 10
CONNECT_S, ANSWER_S = 10.0, 60.0
NEW_S = 3600
"""New parameters expire after this time if their server died before they came into force."""
# RENAME comes first: it is the one command that can fail, and Redis undoes nothing of a script
BEGIN = """
if redis.call('EXISTS', KEYS[1]) == 1 then return redis.call('UNLINK', KEYS[3]) end
redis.call('RENAME', KEYS[3], KEYS[2])
redis.call('PERSIST', KEYS[2])
redis.call('SET', KEYS[1], 0)
"""
CLAIM = """
for _, assignment in ipairs(redis.call('LRANGE', KEYS[1], 0, -1)) do
    if tonumber(redis.call('HGET', KEYS[2], assignment) or 0) <= tonumber(ARGV[1]) then
        redis.call('HSET', KEYS[2], assignment, ARGV[2])
        return redis.call('HGET', KEYS[3], assignment)
    end
end
"""
ASSIMILATE = """
-- 0: done; -1: it was done before; else the version that the entry must be encoded for
if redis.call('HEXISTS', KEYS[3], ARGV[1]) == 0 then redis.call('UNLINK', KEYS[7]) return -1 end
local version = tonumber(redis.call('GET', KEYS[5]))
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


class RedisStore(ParameterStore):
    """A job's state in the Redis server at ``url``."""

    def __init__(self, url: str, job: str) -> None:
        super().__init__(url, job)
        self._redis = Redis.from_url(
            url,
            retry=Retry(NoBackoff(), 0),  # a command whose answer was lost may be in the log already
            socket_connect_timeout=CONNECT_S,
            socket_timeout=ANSWER_S,
            socket_read_size=READ_BYTES,
        )
        self._claim = self._redis.register_script(CLAIM)
        self._assimilate = self._redis.register_script(ASSIMILATE)
        with self._errors():
            self._redis.ping()

    def begin(self, first: Floats) -> None:
        with self._errors():
            if not self._redis.info("persistence").get("aof_enabled"):
                logger.warning(
                    "this Redis server holds jobs in memory: if it stops, job %r is lost; "
                    "`redis-cli config set appendonly yes` saves it to disk",
                    self._job,
                )
            keys = [self._key("version"), self._key("parameters"), self._upload(first)]
            self._redis.register_script(BEGIN)(keys=keys)
        self._check_size(first)

    def append(
        self, entries: Sequence[AnyEntry], *, put: Blobs | None = None, drop: Collection[str] = ()
    ) -> None:
        with self._errors(), self._redis.pipeline(transaction=True) as step:
            for entry in entries:
                data = encode_entry(entry)
                step.rpush(self._key("log"), data)
                if isinstance(entry, Accepted):
                    step.rpush(self._key("queue"), entry.assignment)
                    step.hset(self._key("accepted"), entry.assignment, data)
            for name, blob in (put or {}).items():
                step.unlink(self._key("blob", name))
                _push(step, self._key("blob", name), memoryview(blob))
            for name in drop:
                step.unlink(self._key("blob", name))
            step.execute()

    def entries(self, after: int = 0) -> list[tuple[int, AnyEntry]]:
        with self._errors():
            found: Any = self._redis.lrange(self._key("log"), after, -1)
        return [(position, decode_entry(data)) for position, data in enumerate(found, after + 1)]

    def blob(self, name: str) -> bytes:
        with self._errors():
            pieces: Any = self._redis.lrange(self._key("blob", name), 0, -1)
        if not pieces:
            raise KeyError(name)
        return b"".join(pieces)

    def parameters(self) -> Parameters:
        with self._errors(), self._redis.pipeline(transaction=True) as step:
            step.get(self._key("version"))
            step.lrange(self._key("parameters"), 0, -1)
            version, pieces = step.execute()
        if version is None:
            raise self._not_begun()
        return Parameters(int(version), np.frombuffer(b"".join(pieces), "<f4"))

    def claim(self, server: str, *, now: float, lease_s: float) -> Accepted | None:
        keys = [self._key("queue"), self._key("held"), self._key("accepted")]
        with self._errors():
            found: Any = self._claim(keys=keys, args=[now, now + lease_s])
        return None if found is None else self._claimed(found)

    def assimilate(self, accepted: Accepted, update: Update, *, server: str, now: float) -> int | None:
        old = self.parameters()
        with self._errors():
            keys = [self._key(name) for name in ("queue", "held", "accepted", "log", "version", "parameters")]
            keys += [self._upload(update(old.values)), self._key("blob", accepted.result)]
            version, found = old.version, 1
            while found > 0:
                entry = self._assimilated(accepted, version + 1, server=server, now=now)
                args: list[Any] = [accepted.assignment, version, encode_entry(entry)]
                found = int(cast(int, self._assimilate(keys=keys, args=args)))
                version = found or version + 1
        return None if found < 0 else version

    def waiting(self) -> int:
        with self._errors():
            found: Any = self._redis.llen(self._key("queue"))
        return int(found)

    def close(self) -> None:
        self._redis.close()

    def _key(self, *parts: str) -> str:
        return ":".join(("colab-swarm", self._job, *parts))

    def _upload(self, values: Floats) -> str:
        """Write ``values`` under a new key; a script renames it to bring them into force."""
        key = self._key("new", os.urandom(8).hex())
        with self._redis.pipeline(transaction=False) as pipeline:
            _push(pipeline, key, values.astype("<f4", copy=False).data.cast("B"))
            pipeline.expire(key, NEW_S)
            pipeline.execute()
        return key

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except RedisError as error:
            raise StoreError(
                f"Redis: {error}. Check that redis-server runs, that its address and password are right, and that "
                "it has memory left"
            ) from error


def _push(pipeline: Any, key: str, data: memoryview) -> None:
    pieces = [data[start : start + PIECE_BYTES] for start in range(0, max(1, len(data)), PIECE_BYTES)]
    for start in range(0, len(pieces), PIECES_PER_COMMAND):
        pipeline.rpush(key, *pieces[start : start + PIECES_PER_COMMAND])
