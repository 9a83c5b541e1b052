"""A volunteer at work, against a coordinator that does as its script says."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

from colab_swarm.net.identity import Identity
from colab_swarm.workunits import volunteering as module
from colab_swarm.workunits.job import Job, Rows, UnitTraining, cross_entropy
from colab_swarm.workunits.messages import GivenUnit, Problem
from colab_swarm.workunits.tokens import Token
from colab_swarm.workunits.volunteering import Volunteer, VolunteerSettings
from colab_swarm.workunits.weights import Floats
from tests.workunits.digits import digits_job
from tests.workunits.stand_in import QUICK, StandIn, Waits, answers, client_of, hangs_up, says

TIME_LIMIT_S = 30.0
Scene = Callable[[StandIn, Volunteer], Awaitable[None]]


def play(scene: Scene, standin: StandIn, folder: Path, job: Job | None = None, **settings: Any) -> StandIn:
    """A volunteer that has started, until the scene ends."""

    async def main() -> None:
        async with AsyncExitStack() as stack, asyncio.timeout(TIME_LIMIT_S):
            await stack.enter_async_context(standin.serving())
            client = await stack.enter_async_context(client_of(standin, token=Token(Identity(b"a" * 32))))
            alice = Volunteer(
                client,
                job or standin.job,
                await client.card(),
                VolunteerSettings(folder, **{"name": "alice", **settings}),
                rng=random.Random(0),
            )
            await alice.begin()
            await scene(standin, alice)

    asyncio.run(main())
    return standin


def trained(standin: StandIn, unit: GivenUnit) -> Floats:
    """What a unit's result has to be."""
    model = standin.job.first_model()
    plan = standin.job.plan
    training = UnitTraining(
        standin.job,
        Rows.decode(standin.files[unit.subset]),
        local_epochs=plan.local_epochs,
        batch_size=plan.batch_size,
        seed=unit.seed,
        model=model,
    )
    while training.done < training.batches:
        training.step()
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
def test_a_job_is_trained_to_its_end_bit_for_bit_as_it_should_be(tmp_path: Path, units: int) -> None:
    async def scene(standin: StandIn, alice: Volunteer) -> None:
        await alice.wait_over()
        snapshot = alice.snapshot()
        assert (snapshot.state, snapshot.over, snapshot.fault) == ("the job is finished", True, "")
        assert (snapshot.accepted, snapshot.samples) == (4, 512)
        assert snapshot.received_bytes > sum(map(len, standin.files))

    standin = play(scene, StandIn(digits_job(), epochs=2), tmp_path, units=units)
    assert len(standin.results) == 4
    for assignment, values in standin.results.items():
        np.testing.assert_array_equal(values, trained(standin, standin.given[assignment]))
    assert not list(tmp_path.glob("units/*.unit"))


def test_data_are_fetched_once_and_reported_as_cached(tmp_path: Path) -> None:
    async def scene(standin: StandIn, alice: Volunteer) -> None:
        await alice.wait_over()

    standin = play(scene, StandIn(digits_job(), epochs=3), tmp_path)
    assert sum(what.startswith("GET /api/data") for what in standin.seen) == 2
    assert standin.asked[0].held == () and standin.asked[0].name == "alice"
    assert set(standin.asked[-1].held) == {subset.sha256 for subset in standin.card().subsets}


def test_a_bad_connection_costs_time_only(tmp_path: Path) -> None:
    async def scene(standin: StandIn, alice: Volunteer) -> None:
        await alice.wait_over()
        assert alice.snapshot().accepted == 2

    standin = StandIn(digits_job())
    for what in ("POST /api/units", "GET /api/data", "GET /api/parameters", "PUT /api/results"):
        standin.meets(what, hangs_up, answers(502))
    assert len(play(scene, standin, tmp_path).fired) == 8


def test_an_unreachable_coordinator_shows_in_the_state_and_delays_no_leave(tmp_path: Path) -> None:
    async def scene(standin: StandIn, alice: Volunteer) -> None:
        await until(lambda: "unreachable" in alice.snapshot().state)
        assert alice.snapshot().state.endswith("trying again in 77 s")
        await alice.leave()
        assert alice.snapshot().over

    standin = StandIn(digits_job())
    standin.meets("POST /api/units", answers(503, Retry_After="77"))
    assert play(scene, standin, tmp_path).fired


def test_a_volunteer_that_leaves_finishes_its_units(tmp_path: Path) -> None:
    valve = Valve(before=2)

    async def scene(standin: StandIn, alice: Volunteer) -> None:
        await asyncio.to_thread(valve.reached.wait)
        unit = alice.snapshot().units[0]
        assert (unit.unit, unit.phase, unit.done, unit.batches) == ("epoch 1, subset 0", "training", 2, 4)
        leaving = asyncio.create_task(alice.leave())
        await until(lambda: alice.snapshot().state.startswith("leaving"))
        valve.go_on.set()
        await leaving
        assert (alice.snapshot().accepted, alice.snapshot().state) == (1, "left")

    standin = StandIn(digits_job())
    play(scene, standin, tmp_path, replace(standin.job, loss=valve))
    assert len(standin.given) == len(standin.results) == 1 and not standin.returned


def test_a_volunteer_that_leaves_at_once_gives_its_units_back(tmp_path: Path) -> None:
    valve = Valve(before=1)

    async def scene(standin: StandIn, alice: Volunteer) -> None:
        await asyncio.to_thread(valve.reached.wait)
        leaving = asyncio.create_task(alice.leave(finish_s=0.0))
        await asyncio.sleep(0)
        valve.go_on.set()
        await leaving
        assert alice.snapshot().given_back == 1

    standin = StandIn(digits_job())
    play(scene, standin, tmp_path, replace(standin.job, loss=valve))
    assert standin.returned == list(standin.given) and not standin.results
    assert not list(tmp_path.glob("units/*.unit"))


def test_an_error_in_the_jobs_own_code_ends_it_and_the_unit_is_given_back(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        raise ZeroDivisionError("no such thing")

    async def scene(standin: StandIn, alice: Volunteer) -> None:
        await alice.wait_over()
        snapshot = alice.snapshot()
        assert snapshot.state == "the job's code failed: ZeroDivisionError: no such thing"
        assert "in loss" in snapshot.fault and snapshot.given_back == 2

    standin = StandIn(digits_job())
    play(scene, standin, tmp_path, replace(standin.job, loss=loss), units=2)
    assert sorted(standin.returned) == sorted(standin.given)


def test_refused_results_are_counted_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AFTER_REFUSAL_S", QUICK)

    async def scene(standin: StandIn, alice: Volunteer) -> None:
        await until(lambda: alice.snapshot().refused == 2)
        assert (alice.snapshot().accepted, alice.snapshot().refusal) == (0, "too far off")
        await alice.leave()

    standin = StandIn(digits_job())
    standin.refuse = Problem("invalid", "too far off")
    play(scene, standin, tmp_path)
    assert not list(tmp_path.glob("units/*.unit"))


def test_a_banned_volunteer_waits_and_says_why(tmp_path: Path) -> None:
    async def scene(standin: StandIn, alice: Volunteer) -> None:
        await until(lambda: alice.snapshot().state == "three bad results: come back in an hour")
        await alice.leave()

    standin = StandIn(digits_job())
    standin.meets("POST /api/units", says(403, "banned", "three bad results: come back in an hour"))
    assert play(scene, standin, tmp_path).fired


def test_a_volunteer_that_is_not_admitted_any_more_ends_and_says_why(tmp_path: Path) -> None:
    async def scene(standin: StandIn, alice: Volunteer) -> None:
        await alice.wait_over()
        assert alice.snapshot().state == "the coordinator refuses: revoked"

    standin = StandIn(digits_job())
    standin.meets("POST /api/units", says(401, "token", "revoked"))
    assert play(scene, standin, tmp_path).fired


def test_data_that_the_card_does_not_name_end_it(tmp_path: Path) -> None:
    async def scene(standin: StandIn, alice: Volunteer) -> None:
        waits = Waits()
        standin.meets("POST /api/units", waits)
        await waits.reached.wait()
        standin.files = [rows.encode() for rows in standin.job.rows().cut(2, seed=9)]
        waits.go_on.set()
        await alice.wait_over()
        assert "data have changed" in alice.snapshot().state

    standin = play(scene, StandIn(digits_job()), tmp_path)
    assert len(standin.returned) == 1


def test_another_model_than_the_coordinators_raises_at_once(tmp_path: Path) -> None:
    async def scene(standin: StandIn, alice: Volunteer) -> None:
        raise AssertionError("it must not start")

    other = replace(digits_job(), model=lambda: nn.Linear(64, 10))
    with pytest.raises(ValueError, match=r"not that of 'digits': weight is missing"):
        play(scene, StandIn(digits_job()), tmp_path, other)


async def until(happened: Callable[[], bool]) -> None:
    """Bounded by the scene's time limit."""
    while not happened():
        await asyncio.sleep(0.002)
