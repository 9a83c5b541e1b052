"""A paused volunteer trains nothing, requests nothing, and resumes where it was."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from colab_swarm.runtime import LOOK_S, PauseGate
from colab_swarm.workunits.volunteering import Volunteer
from tests.workunits.digits import digits_job
from tests.workunits.stand_in import StandIn
from tests.workunits.test_volunteering import Valve, play


@pytest.mark.slow
def test_a_paused_volunteer_stops_and_resumes(tmp_path: Path) -> None:
    gate, valve = PauseGate(), Valve(before=2)
    job = replace(digits_job(), loss=valve)

    async def scene(standin: StandIn, alice: Volunteer) -> None:
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

    play(scene, StandIn(job, epochs=2), tmp_path, job, gate=gate)
