"""Tests of a `Swarm`, from its user's side."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait(condition: Callable[[], object], *, timeout_s: float = 20.0) -> None:
    """Wait until ``condition()`` holds."""
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "not in time"
        time.sleep(0.01)
