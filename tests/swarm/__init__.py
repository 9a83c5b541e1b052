"""Tests of a `Swarm`, from its user's side."""

import time
from collections.abc import Callable

from colab_swarm.notebook.platforms import SessionClock
from colab_swarm.swarm.network import NetworkSession
from colab_swarm.swarm.swarm import Swarm


def wait(condition: Callable[[], object], *, timeout_s: float = 20.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "not in time"
        time.sleep(0.01)


def network_of(swarm: Swarm) -> NetworkSession:
    assert swarm.network is not None
    return swarm.network


def leave_in(swarm: Swarm, limit_s: float) -> None:
    clock = SessionClock("Binder", swarm.runtime.time(), limit_s, leave_before_s=limit_s - 0.1)
    swarm.runtime.call(network_of(swarm).leave_in_time(clock, swarm.optimizers, swarm.leave))
