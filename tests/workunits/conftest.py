"""Servers of stores live as long as the tests that need them; a test that is a coroutine gets a loop of its own."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest

from colab_swarm.bench.store_servers import Absent
from tests.workunits.local import run
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


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine."""
    test, given = pyfuncitem.obj, pyfuncitem.funcargs
    if not inspect.iscoroutinefunction(test):
        return None
    run(lambda: test(**{name: given[name] for name in inspect.signature(test).parameters}))
    return True
