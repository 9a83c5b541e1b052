"""A volunteer at work, against a coordinator that does as its script says, and at a real one."""

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
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
from colab_swarm.workunits.client import CoordinatorClient
from colab_swarm.workunits.job import Job, Rows, UnitTraining, cross_entropy
from colab_swarm.workunits.messages import GivenUnit, Problem, Resources, Token, UnitAnswer
from colab_swarm.workunits.volunteering import Volunteer
from colab_swarm.workunits.weights import Floats
from tests.workunits.digits import digits_job
from tests.workunits.local import RUN, coordinating, until
from tests.workunits.stand_in import QUICK, StandIn, Waits, answers, client_of, says

TIME_LIMIT_S = 90.0


@asynccontextmanager
async def playing(
    standin: StandIn, folder: Path, job: Job | None = None, **settings: Any
) -> AsyncIterator[tuple[StandIn, Volunteer]]:
    async with AsyncExitStack() as stack, asyncio.timeout(TIME_LIMIT_S):
        await stack.enter_async_context(standin.serving())
        asking = client_of(standin, token=Token(Identity(b"a" * 32)))
        client = await stack.enter_async_context(aclosing(asking))
        given = {"name": "alice", **settings}
        alice = Volunteer(client, job or standin.job, await client.card(), folder, **given)
        await alice.begin()
        yield standin, alice


def trained(standin: StandIn, unit: GivenUnit) -> Floats:
    job, model, rows = standin.job, standin.job.first_model(), Rows.decode(standin.files[unit.subset])
    standin.schema.load(model, standin.values)
    UnitTraining(job, rows, seed=unit.seed, model=model).finish()
    return standin.schema.flatten(model)


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


@pytest.mark.parametrize("units", [1, 3])
async def test_a_job_is_trained_to_its_end_bit_for_bit_as_it_should_be(tmp_path: Path, units: int) -> None:
    standin = StandIn(digits_job(), epochs=2)
    standin.values = standin.values + np.float32(0.01)  # not those of a new model
    async with playing(standin, tmp_path, units=units) as (standin, alice):
        await alice.wait_over()
        snapshot = alice.snapshot()
        assert (snapshot.state, snapshot.over, snapshot.fault) == ("the job is finished", True, "")
        assert (snapshot.accepted, snapshot.samples) == (4, 512)
        assert snapshot.received_bytes > sum(map(len, standin.files))
    fetched = sum(what.startswith("GET /api/data") for what in standin.seen)
    assert fetched == 2 or units > 1, "each once, unless two units need the same data at once"
    assert standin.asked[0].held == () and standin.asked[0].name == "alice"
    assert set(standin.asked[-1].held) == {subset.sha256 for subset in standin.card().subsets}
    assert len(standin.results) == 4
    for assignment, values in standin.results.items():
        np.testing.assert_array_equal(values, trained(standin, standin.given[assignment]))
    assert not list(tmp_path.glob("units/*.unit"))


async def test_an_unreachable_coordinator_shows_in_the_state_and_delays_no_leave(tmp_path: Path) -> None:
    standin = StandIn(digits_job())
    standin.meets("POST /api/units", answers(503, Retry_After="77"))
    async with playing(standin, tmp_path) as (standin, alice):
        await until(lambda: "unreachable" in alice.snapshot().state)
        assert alice.snapshot().state.endswith("trying again in 77 s")
        await alice.leave()
        assert alice.snapshot().over
    assert standin.fired


async def test_a_volunteer_that_leaves_finishes_its_units(tmp_path: Path) -> None:
    valve = Valve(before=2)
    standin = StandIn(digits_job())
    async with playing(standin, tmp_path, replace(standin.job, loss=valve)) as (standin, alice):
        await asyncio.to_thread(valve.reached.wait)
        state, unit = alice.snapshot().state, alice.snapshot().units[0]
        assert (state, unit.unit, unit.phase) == ("training", "epoch 1, subset 0", "training")
        assert (unit.done, unit.batches) == (2, 4)
        assert 0 < unit.seconds <= alice.snapshot().seconds < TIME_LIMIT_S
        leaving = asyncio.create_task(alice.leave())
        await until(lambda: alice.snapshot().state.startswith("leaving"))
        valve.go_on.set()
        await leaving
        assert (alice.snapshot().accepted, alice.snapshot().state) == (1, "left")
        assert alice.snapshot().seconds < TIME_LIMIT_S
    assert len(standin.given) == len(standin.results) == 1 and not standin.returned


async def test_a_volunteer_that_leaves_at_once_gives_its_units_back(tmp_path: Path) -> None:
    valve = Valve(before=1)
    standin = StandIn(digits_job())
    async with playing(standin, tmp_path, replace(standin.job, loss=valve)) as (standin, alice):
        await asyncio.to_thread(valve.reached.wait)
        leaving = asyncio.create_task(alice.leave(finish_s=0.0))
        await asyncio.sleep(0)
        valve.go_on.set()
        await leaving
        assert alice.snapshot().given_back == 1
    assert standin.returned == list(standin.given) and not standin.results
    assert not list(tmp_path.glob("units/*.unit"))


async def test_a_volunteer_without_a_unit_asks_again_when_it_was_told_to(tmp_path: Path) -> None:
    standin = StandIn(digits_job())
    waiting = msgspec.msgpack.encode(UnitAnswer(wait_s=1000.0, epoch=3))
    standin.meets("POST /api/units", answers(200, body=waiting))
    async with playing(standin, tmp_path) as (standin, alice):
        await until(lambda: alice.snapshot().epoch == 3)
        await alice.leave()
    assert standin.seen.count("POST /api/units") == 1


async def test_a_unit_on_its_way_to_a_volunteer_that_leaves_is_given_back(tmp_path: Path) -> None:
    standin, waits = StandIn(digits_job()), Waits()
    standin.meets("POST /api/units", waits)
    async with playing(standin, tmp_path) as (standin, alice):
        await waits.reached.wait()
        leaving = asyncio.create_task(alice.leave())
        await asyncio.sleep(0)
        waits.go_on.set()
        await leaving
    assert standin.returned == list(standin.given) != []


@pytest.mark.parametrize("kind", [ZeroDivisionError, SystemExit, KeyboardInterrupt])
async def test_an_error_in_the_jobs_own_code_ends_it_and_the_unit_is_given_back(
    tmp_path: Path, kind: type[BaseException]
) -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        raise kind("no such thing")

    standin = StandIn(digits_job())
    async with playing(standin, tmp_path, replace(standin.job, loss=loss), units=2) as (standin, alice):
        await alice.wait_over()
        snapshot = alice.snapshot()
        assert snapshot.state == f"the job's code failed: {kind.__name__}: no such thing"
        assert "in loss" in snapshot.fault and snapshot.given_back == 2
    assert sorted(standin.returned) == sorted(standin.given)


async def test_a_machine_that_lacks_what_the_job_needs_ends_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = digits_job().with_plan(needs=Resources(memory_gb=1e6))
    async with AsyncExitStack() as stack, asyncio.timeout(TIME_LIMIT_S):
        scene = await stack.enter_async_context(coordinating(job, tmp_path / "job"))
        client = CoordinatorClient(scene.server.url, scene.alice.token, run_id=RUN, authority=None)
        await stack.enter_async_context(aclosing(client))
        alice = Volunteer(client, job, await client.card(), tmp_path / "alice", units=3)
        await alice.begin()
        await alice.wait_over()
        assert alice.snapshot().over and not alice.snapshot().fault
        assert alice.snapshot().state.startswith("this job needs 1e+06 GB of memory (your machine has ")
        assert caplog.text.count("this job needs") == 1
        assert scene.kinds() == []


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
    standin = StandIn(digits_job())
    standin.refuse = Problem(code, "too far off, or too late")
    async with playing(standin, tmp_path) as (_, alice):
        await until(lambda: alice.snapshot().surplus + alice.snapshot().refused == 2)
        found = alice.snapshot()
        expected = {"surplus": (2, 0, ""), "invalid": (0, 2, "too far off, or too late")}
        assert (found.surplus, found.refused, found.refusal) == expected[code] and found.accepted == 0
        assert ("2 came after another volunteer's" in repr(alice)) == (code == "surplus")
        await alice.leave()
    assert not list(tmp_path.glob("units/*.unit"))


@pytest.mark.parametrize(("status", "code"), [(403, "banned"), (401, "token")])
async def test_a_refusal_ends_it_and_says_why(tmp_path: Path, status: int, code: str) -> None:
    standin = StandIn(digits_job())
    standin.meets("POST /api/units", says(status, code, "three bad results"))
    async with playing(standin, tmp_path) as (standin, alice):
        await alice.wait_over()
        assert alice.snapshot().over
        assert alice.snapshot().state == "the coordinator refuses: three bad results"
    assert standin.fired


async def test_data_that_the_card_does_not_name_end_it(tmp_path: Path) -> None:
    async with playing(StandIn(digits_job()), tmp_path) as (standin, alice):
        waits = Waits()
        standin.meets("POST /api/units", waits)
        await waits.reached.wait()
        standin.files = [rows.encode() for rows in standin.job.rows().cut(2, seed=9)]
        waits.go_on.set()
        await alice.wait_over()
        assert "data have changed" in alice.snapshot().state
    assert len(standin.returned) == 1


@pytest.mark.slow
async def test_a_paused_volunteer_stops_and_resumes(tmp_path: Path) -> None:
    gate, valve = PauseGate(), Valve(before=2)
    job = replace(digits_job(), loss=valve)
    async with playing(StandIn(job, epochs=2), tmp_path, job, gate=gate) as (_, alice):
        await asyncio.to_thread(valve.reached.wait)
        gate.hold()
        valve.go_on.set()
        await asyncio.sleep(2 * LOOK_S)  # the turn on the thread ends, and another would have begun
        batches = valve.batches
        await asyncio.sleep(2 * LOOK_S)
        assert valve.batches == batches and alice.snapshot().state == "paused"
        gate.release()
        await alice.wait_over()
        assert alice.snapshot().accepted == 4


async def test_a_killed_volunteer_resumes_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SAVE_S", 0.0)
    standin, valve, counted = StandIn(digits_job()), Valve(before=2), Valve(before=1000)
    first, second = tmp_path / "first", tmp_path / "second"
    async with playing(standin, first, replace(standin.job, loss=valve)) as (_, killed):
        await asyncio.to_thread(valve.reached.wait)
        shutil.copytree(first, second)  # the disk, as the kill leaves it
        leaving = asyncio.create_task(killed.leave(finish_s=0.0))
        await asyncio.sleep(0)
        valve.go_on.set()
        await leaving
        standin.returned.clear()  # a killed one says nothing
        fetched = standin.seen.count("GET /api/parameters")
        async with aclosing(client_of(standin, token=Token(Identity(b"a" * 32)))) as client:
            again = Volunteer(client, replace(standin.job, loss=counted), await client.card(), second)
            await again.begin()
            await again.wait_over()
        assert again.snapshot().accepted == 2 and counted.batches == 2 * 4 - 2
        assert standin.seen.count("GET /api/parameters") == fetched + 1  # of the other unit
        assert len(standin.given) == 2  # nothing was asked for twice
        for assignment, values in standin.results.items():
            np.testing.assert_array_equal(values, trained(standin, standin.given[assignment]))
