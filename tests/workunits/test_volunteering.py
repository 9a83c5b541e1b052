"""A volunteer at work, at a coordinator behind a line that has faults."""

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from colab_swarm.net.identity import Identity
from colab_swarm.runtime import LOOK_S, PauseGate
from colab_swarm.workunits import volunteering as module
from colab_swarm.workunits.job import Job, Rows, UnitTraining, cross_entropy, unit_seed
from colab_swarm.workunits.messages import GivenUnit, Resources, Token, UnitAnswer
from colab_swarm.workunits.state import Accepted
from colab_swarm.workunits.volunteering import Volunteer
from tests.net.swarm import until
from tests.workunits.digits import digits_job
from tests.workunits.line import QUICK, Fault, Line, Waits, answers, line_to, says

TIME_LIMIT_S = 90.0
JOB = digits_job(subsets=2, max_epochs=1)


@asynccontextmanager
async def alice_at(line: Line, folder: Path, job: Job = JOB, **settings: Any) -> AsyncIterator[Volunteer]:
    async with aclosing(line.client(token=Token(Identity(b"a" * 32)))) as client:
        alice = Volunteer(client, job, await client.card(), folder, **{"name": "alice", **settings})
        await alice.begin()
        yield alice


@asynccontextmanager
async def playing(
    folder: Path,
    job: Job = JOB,
    *faults: Fault,
    at: str = "POST /api/units",
    own: Job | None = None,
    held: bool = False,
    **settings: Any,
) -> AsyncIterator[tuple[Line, Volunteer]]:
    """Alice volunteers for ``job``, by her ``own`` copy of it; her first requests ``at`` this path meet ``faults``."""
    async with asyncio.timeout(TIME_LIMIT_S), line_to(job, folder / "job", held=held) as line:
        line.meets(at, *faults)
        async with alice_at(line, folder / "alice", own or job, **settings) as alice:
            yield line, alice


def check_results(line: Line) -> None:
    """Of a `Held` store: each is bit for bit what its unit's training gives."""
    scene = line.scene
    schema = scene.coordinator.schema
    results = [entry for entry in scene.log if isinstance(entry, Accepted)]
    assert len(results) == len(scene.coordinator.card.subsets)
    for entry in results:
        model = JOB.first_model()
        subset = scene.coordinator.card.subsets[entry.unit.subset]
        rows = Rows.decode((scene.folder / "data" / subset.sha256).read_bytes())
        seed = unit_seed(JOB.plan.seed, entry.unit.epoch, entry.unit.subset)
        UnitTraining(JOB, rows, seed=seed, model=model).finish()
        values = np.frombuffer(scene.store.blob(entry.result), "<f4")
        np.testing.assert_array_equal(values, schema.flatten(model))


class Valve:
    """A loss that stops before a batch until a test lets it go on."""

    def __init__(self, before: int) -> None:
        self._before, self.batches = before, 0
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if self.batches == self._before:
            self.reached.set()
            assert self.go_on.wait(TIME_LIMIT_S)
        self.batches += 1
        return cross_entropy(model, batch)


async def test_units_trained_in_turns_are_bit_for_bit_as_they_should_be(tmp_path: Path) -> None:
    async with playing(tmp_path, held=True, units=3) as (line, alice):
        await until(lambda: alice.snapshot().accepted == 2)
        check_results(line)
        line.scene.store.held = False  # type: ignore[attr-defined]
        await alice.wait_over()
        snapshot = alice.snapshot()
        assert (snapshot.state, snapshot.over, snapshot.fault) == ("the job is finished", True, "")
        assert (snapshot.accepted, snapshot.samples, snapshot.units) == (2, 256, ())
        assert snapshot.received_bytes > sum(one.size_bytes for one in line.scene.coordinator.card.subsets)
        (row,) = line.scene.coordinator.status().volunteers
        assert (row.name, row.accepted) == ("alice", 2)
    assert not list(tmp_path.glob("alice/units/*.unit"))


async def test_data_are_fetched_once_for_all_epochs(tmp_path: Path) -> None:
    async with playing(tmp_path, JOB.with_plan(max_epochs=3)) as (line, alice):
        await alice.wait_over()
        assert alice.snapshot().accepted == 6
    assert sum(what.startswith("GET /api/data") for what in line.seen) == 2


WAITING = answers(200, body=msgspec.msgpack.encode(UnitAnswer(wait_s=1000.0, epoch=3)))


@pytest.mark.parametrize("fault", [answers(503, Retry_After="77"), WAITING], ids=["unreachable", "no unit"])
async def test_a_volunteer_waits_as_it_was_told_to_which_delays_no_leave(
    tmp_path: Path, fault: Fault
) -> None:
    async with playing(tmp_path, JOB, fault) as (line, alice):
        if fault is WAITING:
            await until(lambda: alice.snapshot().epoch == 3)
        else:
            await until(lambda: "unreachable" in alice.snapshot().state)
            assert alice.snapshot().state.endswith("trying again in 77 s")
        await alice.leave()
        assert alice.snapshot().over and line.fired
    assert fault is not WAITING or line.seen.count("POST /api/units") == 1


async def test_a_volunteer_that_leaves_finishes_its_units(tmp_path: Path) -> None:
    valve = Valve(before=2)
    async with playing(tmp_path, own=replace(JOB, loss=valve)) as (line, alice):
        await asyncio.to_thread(valve.reached.wait)
        state, unit = alice.snapshot().state, alice.snapshot().units[0]
        assert (state, unit.unit[:7], unit.phase) == ("training", "epoch 1", "training")
        assert (unit.done, unit.batches) == (2, 4)
        assert 0 < unit.seconds <= alice.snapshot().seconds < TIME_LIMIT_S
        leaving = asyncio.create_task(alice.leave())
        await until(lambda: alice.snapshot().state.startswith("leaving"))
        valve.go_on.set()
        await leaving
        assert (alice.snapshot().accepted, alice.snapshot().state) == (1, "left")
        assert alice.snapshot().seconds < TIME_LIMIT_S
        assert line.scene.kinds()[:2] == ["Assigned", "Accepted"]
        assert not {"GaveBack", "Finished"} & {*line.scene.kinds()}


async def test_a_volunteer_that_leaves_at_once_gives_its_units_back(tmp_path: Path) -> None:
    valve = Valve(before=1)
    async with playing(tmp_path, own=replace(JOB, loss=valve), units=2) as (line, alice):
        await asyncio.to_thread(valve.reached.wait)
        await until(lambda: len(alice.snapshot().units) == 2)
        leaving = asyncio.create_task(alice.leave(finish_s=0.0))
        await asyncio.sleep(0)
        valve.go_on.set()
        await leaving
        assert alice.snapshot().given_back == 2
        assert line.scene.kinds() == ["Assigned", "Assigned", "GaveBack", "GaveBack"]
    assert not list(tmp_path.glob("alice/units/*.unit"))


async def test_a_unit_on_its_way_to_a_volunteer_that_leaves_is_given_back(tmp_path: Path) -> None:
    waits = Waits()
    async with playing(tmp_path, JOB, waits) as (line, alice):
        await waits.reached.wait()
        leaving = asyncio.create_task(alice.leave())
        await asyncio.sleep(0)
        waits.go_on.set()
        await leaving
        assert line.scene.kinds() == ["Assigned", "GaveBack"]


@pytest.mark.parametrize("kind", [ZeroDivisionError, SystemExit, KeyboardInterrupt])
async def test_an_error_in_the_jobs_own_code_ends_it_and_the_unit_is_given_back(
    tmp_path: Path, kind: type[BaseException]
) -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        raise kind("no such thing")

    async with playing(tmp_path, own=replace(JOB, loss=loss)) as (line, alice):
        await alice.wait_over()
        snapshot = alice.snapshot()
        assert snapshot.state == f"the job's code failed: {kind.__name__}: no such thing"
        assert "in loss" in snapshot.fault and snapshot.given_back == 1
        assert line.scene.kinds() == ["Assigned", "GaveBack"]


async def test_a_machine_that_lacks_what_the_job_needs_ends_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = JOB.with_plan(needs=Resources(memory_gb=1e6))
    async with playing(tmp_path, job, units=3) as (line, alice):
        await alice.wait_over()
        assert alice.snapshot().over and not alice.snapshot().fault
        assert alice.snapshot().state.startswith("this job needs 1e+06 GB of memory (your machine has ")
        assert caplog.text.count("this job needs") == 1
        assert line.scene.kinds() == []


def test_a_machine_says_its_cores_and_its_memory_if_its_system_does(monkeypatch: pytest.MonkeyPatch) -> None:
    has = module.resources_of(torch.device("cpu"))
    assert has.cpu_cores >= 1 and has.memory_gb > 0.5 and has.gpu_memory_gb == 0
    monkeypatch.setattr(module.os, "sysconf", lambda name: -1 if name == "SC_PHYS_PAGES" else 4096)
    assert module.resources_of(None).memory_gb == 0


@pytest.mark.parametrize("code", ["surplus", "invalid"])
async def test_results_that_do_not_count_are_counted_with_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    if code == "invalid":  # after a surplus one the next unit follows at once
        monkeypatch.setattr(module, "AFTER_REFUSAL_S", QUICK)
    refusals = [says(422, code, "too far off, or too late")] * 2
    async with playing(tmp_path, JOB, *refusals, at="PUT /api/results") as (_, alice):
        # the coordinator, which refused nothing, sends the unit again
        await alice.wait_over()
        found = alice.snapshot()
    expected = {"surplus": (2, 0, ""), "invalid": (0, 2, "too far off, or too late")}
    assert (found.surplus, found.refused, found.refusal) == expected[code] and found.accepted == 2
    assert ("2 came after another volunteer's" in repr(alice)) == (code == "surplus")


STRANGE = UnitAnswer(GivenUnit("a" * 32, 1, 0, "b" * 64, "parameters", 60.0, 7))


@pytest.mark.parametrize(
    ("fault", "state", "given_back"),
    [
        (says(403, "banned", "three bad results"), "the coordinator refuses: three bad results", 0),
        (says(401, "token", "no token"), "the coordinator refuses: no token", 0),
        (answers(200, body=msgspec.msgpack.encode(STRANGE)), "data have changed", 1),
    ],
    ids=["banned", "no token", "data that the card does not name"],
)
async def test_a_refusal_ends_it_and_says_why(
    tmp_path: Path, fault: Fault, state: str, given_back: int
) -> None:
    async with playing(tmp_path, JOB, fault) as (_, alice):
        await alice.wait_over()
        assert alice.snapshot().over and state in alice.snapshot().state
        assert alice.snapshot().given_back == given_back


@pytest.mark.slow
async def test_a_paused_volunteer_stops_and_resumes(tmp_path: Path) -> None:
    gate, valve = PauseGate(), Valve(before=2)
    async with playing(tmp_path, own=replace(JOB, loss=valve), gate=gate) as (_, alice):
        await asyncio.to_thread(valve.reached.wait)
        gate.hold()
        valve.go_on.set()
        await asyncio.sleep(2 * LOOK_S)  # the turn on the thread ends, and another would have begun
        batches = valve.batches
        await asyncio.sleep(2 * LOOK_S)
        assert valve.batches == batches and alice.snapshot().state == "paused"
        gate.release()
        await alice.wait_over()
        assert alice.snapshot().accepted == 2


async def test_a_killed_volunteer_resumes_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SAVE_S", 0.0)
    valve, counted = Valve(before=2), Valve(before=1000)
    copy = tmp_path / "copy"
    async with playing(tmp_path, own=replace(JOB, loss=valve), held=True) as (line, killed):
        await asyncio.to_thread(valve.reached.wait)
        shutil.copytree(killed.folder, copy)  # the disk, as the kill leaves it
        line.meets("POST /api/units", says(403, "banned", "a killed one says nothing"))
        leaving = asyncio.create_task(killed.leave(finish_s=0.0))
        await asyncio.sleep(0)
        valve.go_on.set()
        await leaving
        assert len(line.fired) == 1
        fetched = line.seen.count("GET /api/parameters")
        async with alice_at(line, copy, replace(JOB, loss=counted)) as again:
            await until(lambda: again.snapshot().accepted == 2)
            assert counted.batches == 2 * 4 - 2
            assert line.seen.count("GET /api/parameters") == fetched + 1  # of the other unit
            assert line.scene.kinds().count("Assigned") == 2  # nothing was asked for twice
            check_results(line)
            await again.leave()
