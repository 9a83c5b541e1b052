import pytest

from tests.netlab.lab import missing


@pytest.fixture(autouse=True)
def needs_lab() -> None:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
