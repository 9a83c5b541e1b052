"""Addresses of stores, and stores that cannot be reached."""

import os
import re
import sys
from pathlib import Path

import pytest

from colab_swarm.errors import StoreError
from colab_swarm.project import install
from colab_swarm.workunits.sql_store import MEMORY, SqlStore
from colab_swarm.workunits.store import open_store


def test_files_are_sqlite_and_memory_is_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for address in (
        "job.db",
        f"{tmp_path}/other",
        "sqlite:///relative",
        "sqlite:///memory",
        f"sqlite:///{tmp_path}/absolute",
    ):
        store = open_store(address, "job")
        assert isinstance(store, SqlStore) and store.shared
        store.close()
    assert {"job.db", "other", "relative", "memory", "absolute"} <= set(os.listdir(tmp_path))
    memory = open_store("memory", "job")
    assert isinstance(memory, SqlStore) and memory.url == MEMORY and not memory.shared


@pytest.mark.parametrize("address", ["redis", "", "sqlite://", "mongodb://here", "postgresql://here/jobs"])
def test_an_address_of_no_known_form_is_answered_with_the_forms(address: str) -> None:
    with pytest.raises(
        ValueError,
        match=rf"^'{address.partition('://')[0]}' is no store: use .* job\.db .* redis://HOST",
    ):
        open_store(address, "job")


@pytest.mark.parametrize(
    ("address", "advice"),
    [
        ("redis://:topsecret@127.0.0.1:1/0", r"Check that .*run.* password"),
        ("unix:///nowhere/redis.sock?password=topsecret", r"Check that .*run.* password"),
        ("postgresql+psycopg://bob:topsecret@127.0.0.1:1/jobs", r"Check that .*run.* password"),
        ("mysql+pymysql://bob:topsecret@127.0.0.1:1/jobs", r"Check that .*run.* password"),
        ("missing/job.db", "The folder must exist"),
        ("text.db", r"text\.db: file is not a database"),
    ],
)
def test_the_error_of_an_unreachable_store_says_what_to_do_and_no_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, advice: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.db").write_text("this is no database" * 100)
    with pytest.raises(StoreError, match=advice) as caught:
        open_store(address, "job")
    assert "topsecret" not in str(caught.value)


@pytest.mark.parametrize(
    ("address", "module", "extra"),
    [("redis://127.0.0.1:1/0", "redis_store", "workunits"), ("job.db", "sql_store", "train")],
)
def test_a_missing_library_is_an_error_that_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, address: str, module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, f"colab_swarm.workunits.{module}", None)
    with pytest.raises(StoreError, match=re.escape(install(extra))):
        open_store(address, "job")
