"""Servers of stores live as long as the tests that need them."""

from collections.abc import Iterator

import pytest

from colab_swarm.workunits.store import ParameterStore
from tests.workunits.servers import SERVERS, begun, close_checked, new_job


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
        except FileNotFoundError as absent:
            if "is not installed" not in str(absent):
                raise
            pytest.skip(str(absent))


@pytest.fixture
def store(url: str) -> Iterator[ParameterStore]:
    """With two results that wait; checked afterwards."""
    store = begun(url, new_job(), units=2)
    yield store
    close_checked(store)
