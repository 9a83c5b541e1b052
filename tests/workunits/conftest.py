"""Servers of stores live as long as the tests that need them; a test that is a coroutine gets a loop of its own."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest

from tests.workunits.local import run
from tests.workunits.servers import url_of


@pytest.fixture(scope="session")
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a store; its kind is the parameter."""
    yield from url_of(request.param, tmp_path_factory)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine."""
    test, given = pyfuncitem.obj, pyfuncitem.funcargs
    if not inspect.iscoroutinefunction(test):
        return None
    run(lambda: test(**{name: given[name] for name in inspect.signature(test).parameters}))
    return True
