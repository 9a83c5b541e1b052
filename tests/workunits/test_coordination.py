"""A job coordinated in this process: restarts, replicas, parameter servers."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colab_swarm.errors import StoreError
from colab_swarm.workunits.sql_store import MEMORY, SqlStore
from colab_swarm.workunits.state import Accepted, AnyEntry, Rejected
from colab_swarm.workunits.weights import Floats
from tests.net.swarm import until
from tests.workunits.local import Stranger, coordinating, tiny_job
from tests.workunits.servers import accepted


async def test_replicas_start_from_the_same_parameters_and_the_odd_one_is_refused(tmp_path: Path) -> None:
    async with coordinating(tiny_job(subsets=2, replication=3), tmp_path, servers=1) as scene:
        strangers = [Stranger(scene) for _ in range(3)]
        given = []
        for stranger in strangers:
            given += [one for one in await stranger.ask(2) if one.subset == 0]
        assert len({one.parameters for one in given}) == 1 and given[0].parameters == "parameters/1-0"
        begun = await strangers[0].send("GET", f"/api/{given[0].parameters}")
        base = scene.coordinator.schema.decode(begun.body)
        statuses = []
        for stranger, one, change in zip(strangers, given, (0.1, 0.9, 0.101), strict=True):
            file = scene.coordinator.schema.encode(base + np.float32(change))
            statuses.append((await stranger.upload(one.assignment, file)).status)
        assert statuses == [200, 200, 200]
        good = [entry.assignment for entry in scene.log if isinstance(entry, Accepted)]
        odd = [entry.assignment for entry in scene.log if isinstance(entry, Rejected)]
        assert (odd, good) == ([given[1].assignment], [given[2].assignment])
        await until(lambda: "Measured" in scene.kinds())
        await until(lambda: scene.coordinator.status().version == 1)
        status = scene.coordinator.status()
        assert status.samples_per_s == 32 * status.units_per_s > 0 and status.staleness == 0
        for blob in ("base-1-0", *(f"result-{one.assignment}" for one in given)):
            with pytest.raises(KeyError):
                scene.store.blob(blob)
        answer = await strangers[0].send("GET", "/api/parameters/1-0")
        assert (answer.status, answer.problem.code) == (410, "stale")


async def test_units_whose_answer_was_lost_are_sent_again_and_returned_ones_go_to_others(
    tmp_path: Path,
) -> None:
    async with coordinating(tiny_job(subsets=2), tmp_path) as scene:
        (lost,) = await scene.alice.ask()
        again, more = await scene.alice.ask(2)
        assert again.assignment == lost.assignment != more.assignment
        assert 0 < again.deadline_s <= lost.deadline_s
        in_hand = (again.assignment, more.assignment)
        assert await scene.alice.ask(in_hand=in_hand) == await scene.bob.ask() == []
        with pytest.raises(KeyError):
            scene.store.blob(f"base-{again.epoch}-{again.subset}")  # of units with replicas only
        assert await scene.alice.ask(leaves=True) == []
        assert scene.kinds() == ["Assigned", "Assigned", "GaveBack", "GaveBack"]
        assert len(await scene.bob.ask(2)) == 2


async def test_the_number_of_servers_can_be_changed_while_it_runs(tmp_path: Path) -> None:
    async with coordinating(tiny_job(), tmp_path, servers="auto") as scene:
        await until(lambda: scene.coordinator.status().servers == 1)
        scene.coordinator.servers = 3
        await until(lambda: scene.coordinator.status().servers == 3)
        scene.coordinator.servers = 1
        await until(lambda: scene.coordinator.status().servers == 1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_validation_data_that_a_server_cannot_load_are_the_servers_death(tmp_path: Path) -> None:
    job, found = tiny_job(), iter([tiny_job().validation])
    async with coordinating(replace(job, validation=lambda: next(found)), tmp_path) as scene:
        await until(lambda: scene.coordinator.status().server_deaths == 1)
        assert scene.coordinator.status().fault == "" and await scene.alice.ask()


async def test_a_log_of_another_version_is_the_stores_error(tmp_path: Path) -> None:
    store = SqlStore(MEMORY, "tiny")
    with store._transaction() as connection:
        store._run(connection, "INSERT INTO swarm_log VALUES (:job, 1, :entry)", entry=b"\x91\x01")
    with pytest.raises(StoreError, match="another version of colab-swarm"):
        async with coordinating(tiny_job(), tmp_path, store=store):
            pass


class Doubtful(SqlStore):
    name, broke = "", 0

    def append(self, entries: Sequence[AnyEntry], **blobs: Any) -> None:
        super().append(entries, **blobs)
        if any(type(entry).__name__ == self.name for entry in entries):
            self.name, self.broke = "", self.broke + 1
            raise StoreError("the line broke")


async def test_while_the_store_fails_volunteers_retry_and_a_decision_that_was_written_counts(
    tmp_path: Path,
) -> None:
    store = Doubtful(MEMORY, "tiny")
    async with coordinating(tiny_job(subsets=1, max_epochs=1), tmp_path, store=store) as scene:
        name, file = await scene.alice.unit()
        store.name = "Accepted"
        answer = await scene.alice.upload(name, file)
        assert (answer.status, answer.problem.code, store.broke) == (503, "busy", 1)
        assert int(answer.headers["Retry-After"]) > 0 and scene.coordinator.status().fault == "the line broke"
        answer = await scene.alice.upload(name, file)
        assert (answer.status, answer.problem.code) == (410, "stale")
        await scene.coordinator.finished.wait()
        assert scene.coordinator.status().fault == ""
        ends = ["Accepted", "Assimilated", "Measured", "EpochEnded", "Finished"]
        assert scene.kinds() == ["Assigned", *ends]


async def test_of_two_coordinators_of_one_job_the_older_one_gives_way(tmp_path: Path) -> None:
    job, store = tiny_job(), SqlStore(MEMORY, "tiny")
    async with coordinating(job, tmp_path / "one", store=store) as old:
        assert await old.alice.ask()
        async with coordinating(job, tmp_path / "two", store=store) as new:
            assert await new.bob.ask()
            before = old.log
            answer = await old.alice.send("POST", "/api/units", b"\x90")
            assert (answer.status, answer.problem.code) == (503, "busy")
            assert "another coordinator" in old.coordinator.status().fault
            assert old.log == before
            assert [one.status for one in await new.bob.train()] == [200]


def test_a_store_that_is_closed_waits_for_the_update_at_hand(tmp_path: Path) -> None:
    """SQLite would kill the process."""
    store, working, go_on = SqlStore(str(tmp_path / "job.db"), "tiny"), threading.Event(), threading.Event()
    store.begin(np.zeros(3, np.float32))
    store.append([accepted(0)], put={accepted(0).result: b""})
    versions = list[int | None]()

    def update(server: Floats) -> Floats:
        working.set()
        assert go_on.wait(10)
        return server + 1

    server = threading.Thread(
        target=lambda: versions.append(store.assimilate(accepted(0), update, server="p", now=0.0))
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


async def test_a_coordinator_that_is_stopped_as_it_starts_leaves_no_parameter_server(tmp_path: Path) -> None:
    for number in range(8):
        async with coordinating(tiny_job(), tmp_path / str(number)):
            pass
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("server-")] == []
