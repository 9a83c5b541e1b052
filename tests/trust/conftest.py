"""Tests of this room may be coroutines."""

from tests.net.conftest import pytest_pyfunc_call as pytest_pyfunc_call
