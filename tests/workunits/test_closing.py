"""A coordinator may be stopped at any moment: nothing it began outlives it, nothing in use is torn away."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np

from colab_swarm.workunits.state import Accepted, Unit
from colab_swarm.workunits.store import SqliteStore
from colab_swarm.workunits.weights import Floats
from tests.workunits.local import coordinating, run, tiny_job


def test_a_store_that_is_closed_waits_for_the_update_at_hand(tmp_path: Path) -> None:
    """SQLite would kill the process."""
    store, working, go_on = SqliteStore(tmp_path / "job.db", "tiny"), threading.Event(), threading.Event()
    accepted = Accepted(at=0.0, unit=Unit(1, 0), assignment="a", result="r", alpha=0.5, base=0, change=1.0)
    store.begin(np.zeros(3, np.float32))
    store.append([accepted], put={"r": b""})
    versions = list[int | None]()

    def update(server: Floats) -> Floats:
        working.set()
        assert go_on.wait(10)
        return server + 1

    server = threading.Thread(
        target=lambda: versions.append(store.assimilate(accepted, update, server="p", now=0.0))
    )
    server.start()
    assert working.wait(10)
    closing = threading.Thread(target=store.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    go_on.set()
    closing.join(10)
    server.join(10)
    assert versions == [1]


def test_a_coordinator_that_is_stopped_as_it_starts_leaves_no_parameter_server(tmp_path: Path) -> None:
    async def main() -> None:
        for number in range(30):
            async with coordinating(tiny_job(), tmp_path / str(number)):
                pass

    run(main)
    assert [thread.name for thread in threading.enumerate() if "parameter server" in thread.name] == []
