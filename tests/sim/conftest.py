"""Tests that are coroutines run on virtual time."""

from __future__ import annotations

import inspect

import pytest

from colab_swarm.sim import run_virtual


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object:
    """Run ``async def test_…`` as `run_virtual` does."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    run_virtual(
        pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames})
    )
    return True
