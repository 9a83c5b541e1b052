"""Stores by their address."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import cast

from colab_swarm.errors import StoreError
from colab_swarm.workunits.memory import MemoryStore
from colab_swarm.workunits.sqlite import SqliteStore
from colab_swarm.workunits.store import Store

FORMS = (
    "memory, a file such as job.db or sqlite:////absolute/path, redis://HOST:6379/0, unix:///path/of/redis.sock, "
    "postgresql+psycopg://USER:PASSWORD@HOST/DATABASE or mysql+pymysql://USER:PASSWORD@HOST/DATABASE"
)
ELSEWHERE = {
    **dict.fromkeys(("redis", "rediss", "unix"), ("redis_store", "RedisStore")),
    **dict.fromkeys(("postgresql+psycopg", "mysql+pymysql"), ("sql", "SqlStore")),
}
"""Module and class by scheme, of stores that need libraries beyond the base."""


def open_store(url: str, job: str) -> Store:
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
        return cast(Store, getattr(import_module(f"colab_swarm.workunits.{module}"), name)(url, job))
    except ImportError as error:
        raise StoreError(f"{error}: `pip install 'colab-swarm[workunits]'`") from error
