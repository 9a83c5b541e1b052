"""Volunteers at a real coordinator; and one that is killed."""

from __future__ import annotations

import asyncio
import random
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest

from colab_swarm.errors import StateError
from colab_swarm.net.identity import Identity
from colab_swarm.workunits.client import CoordinatorClient
from colab_swarm.workunits.resume import _load
from colab_swarm.workunits.state import Accepted, EpochEnded, Finished
from colab_swarm.workunits.tokens import Token
from colab_swarm.workunits.volunteering import Volunteer, VolunteerSettings
from tests.workunits.digits import digits_job
from tests.workunits.local import RUN, coordinating, run
from tests.workunits.stand_in import QUICK, StandIn, client_of
from tests.workunits.test_volunteering import trained, until
from tests.workunits.volunteer_process import SEED

BATCHES = 40


@pytest.mark.slow
@pytest.mark.parametrize("replication", [1, 2])
def test_two_volunteers_train_a_job_to_its_end(tmp_path: Path, replication: int) -> None:
    job = digits_job(1200, subsets=3, max_epochs=2, local_epochs=4, replication=replication)

    async def main() -> None:
        async with AsyncExitStack() as stack:
            scene = await stack.enter_async_context(coordinating(job, tmp_path / "coordinator"))
            volunteers = []
            for name in ("alice", "bob"):
                client = CoordinatorClient(
                    scene.server.url, Token(Identity()), run_id=RUN, authority=None, retry_s=QUICK
                )
                await stack.enter_async_context(client)
                settings = VolunteerSettings(tmp_path / name, units=2, name=name)
                card = await client.card()
                volunteers.append(Volunteer(client, job, card, settings, rng=random.Random(0)))
            for volunteer in volunteers:
                await volunteer.begin()
            await asyncio.gather(*(volunteer.wait_over() for volunteer in volunteers))
            assert {volunteer.snapshot().state for volunteer in volunteers} == {"the job is finished"}
            accepted = [entry for entry in scene.log if isinstance(entry, Accepted)]
            assert sorted((entry.unit.epoch, entry.unit.subset) for entry in accepted) == [
                (epoch, subset) for epoch in (1, 2) for subset in range(3)
            ]
            assert sum(volunteer.snapshot().accepted for volunteer in volunteers) == 6 * replication
            ended = [entry for entry in scene.log if isinstance(entry, EpochEnded)]
            assert len(ended) == 2 and ended[-1].accuracy > 0.5
            assert isinstance(scene.log[-1], Finished)

    run(main)


def batches_saved(folder: Path) -> int:
    """How far the unit in hand is saved."""
    for path in folder.glob("units/*.unit"):
        try:
            state = _load(path)[1].training
        except (StateError, FileNotFoundError):
            continue
        return 0 if state is None else int(state["done"])
    return 0


@pytest.mark.slow
@pytest.mark.ordeal
def test_a_killed_volunteer_resumes_where_it_was(tmp_path: Path) -> None:
    standin = StandIn(digits_job(local_epochs=BATCHES // 4))

    async def main() -> None:
        async with standin.serving():
            command = (sys.executable, "-m", "tests.workunits.volunteer_process", standin.url, str(tmp_path))
            killed = await asyncio.create_subprocess_exec(*command)
            await until(lambda: batches_saved(tmp_path) >= 1)
            killed.kill()
            assert await killed.wait() != 0
            assert 1 <= batches_saved(tmp_path) < BATCHES and not standin.results
            fetched = standin.seen.count("GET /api/parameters")
            async with client_of(standin, token=Token(Identity(SEED))) as client:
                volunteering = Volunteer(
                    client, standin.job, await client.card(), VolunteerSettings(tmp_path)
                )
                await volunteering.begin()
                await volunteering.wait_over()
            assert volunteering.snapshot().accepted == 2
            assert standin.seen.count("GET /api/parameters") == fetched + 1  # of the other unit

    run(main, timeout_s=120.0)
    assert len(standin.given) == 2  # nothing was asked for twice
    for assignment, values in standin.results.items():
        np.testing.assert_array_equal(values, trained(standin, standin.given[assignment]))
