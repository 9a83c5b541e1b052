"""Servers of stores live as long as the tests that need them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.workunits.servers import url_of


@pytest.fixture(scope="session")
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a store; its kind is the parameter."""
    yield from url_of(request.param, tmp_path_factory)
