"""Tests of these rooms may be coroutines."""

from __future__ import annotations

import inspect

import pytest

from tests.net.swarm import run


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function in a loop of its own, against the deadline."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    run(
        pyfuncitem.obj(
            **{name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
        )
    )
    return True
