"""Stores by their address."""

from __future__ import annotations

from pathlib import Path

from colab_swarm.workunits.memory import MemoryStore
from colab_swarm.workunits.sqlite import SqliteStore
from colab_swarm.workunits.store import Store

FORMS = "memory, a file such as job.db or sqlite:////absolute/path"


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
    raise ValueError(f"{url!r} is no store: use {FORMS}")
