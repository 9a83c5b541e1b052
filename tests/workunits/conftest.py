"""Servers of stores live as long as the tests that need them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from colab_swarm.bench.parameter_store import Absent
from tests.workunits.servers import SERVERS


@pytest.fixture(scope="session")
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a store; its kind is the parameter."""
    kind: str = request.param
    if kind == "memory":
        yield "memory"
    elif kind == "sqlite":
        yield str(tmp_path_factory.mktemp("store") / "store.db")
    else:
        try:
            with SERVERS[kind]() as url:
                yield url
        except Absent as absent:
            pytest.skip(str(absent))
