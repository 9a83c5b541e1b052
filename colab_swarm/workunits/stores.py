"""From an address to the store there. Their libraries are loaded only when a store is opened."""

from importlib import import_module
from pathlib import Path
from typing import cast

from colab_swarm.errors import StoreError
from colab_swarm.project import install
from colab_swarm.workunits.store import ParameterStore

FORMS = (
    "memory, a file such as job.db or sqlite:////absolute/path, redis://HOST:6379/0, unix:///path/of/redis.sock, "
    "postgresql+psycopg://USER:PASSWORD@HOST/DATABASE or mysql+pymysql://USER:PASSWORD@HOST/DATABASE"
)
REDIS = {"redis", "rediss", "unix"}
SQL = {"postgresql+psycopg", "mysql+pymysql"}


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
