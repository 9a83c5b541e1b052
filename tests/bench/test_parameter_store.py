"""The benchmark of stores reports the time of an update in each installed store."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest

from colab_swarm.bench import parameter_store
from colab_swarm.bench.parameter_store import Absent


def absent() -> AbstractContextManager[str]:
    raise Absent("redis-server is not installed")


@pytest.mark.slow
@pytest.mark.ordeal
def test_updates_are_timed_and_absent_programs_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    memory, sqlite = parameter_store.STORES["memory"], parameter_store.STORES["sqlite"]
    stores = {"memory": memory, "mariadb": sqlite, "redis": (absent, "")}
    monkeypatch.setattr(parameter_store, "STORES", stores)
    monkeypatch.setattr(parameter_store, "NUMEL", 1000)
    figures = parameter_store.run(quick=True).figures
    assert figures.keys() == {"memory_ms", "mariadb_ms", "sql_ms"}
    assert 0 < figures["memory_ms"] < 1000 and figures["sql_ms"] == figures["mariadb_ms"]
    assert "redis is left out: redis-server is not installed" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.ordeal
def test_an_update_is_timed_in_redis_and_in_sql(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameter_store, "NUMEL", 100_000)
    figures = parameter_store.run(quick=True).figures
    if "redis_ms" not in figures or "sql_ms" not in figures:
        pytest.skip("Redis, or PostgreSQL and MariaDB, are not installed")
    assert figures["sql_to_redis"] > 0.5
