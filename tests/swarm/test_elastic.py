"""Elastic training from the user's side, simulated."""

from typing import Any

import pytest
import torch

import colab_swarm as cs
from colab_swarm.elastic import NormBounded, Synchronous
from colab_swarm.elastic.schedulers import Scheduler
from colab_swarm.sim.profiles import HostProfile, NetworkProfile

SLOW = NetworkProfile("slow", 0.05, hosts=(HostProfile(2e6, 2e6),))
STEPS = 12


def train(scheduler: Scheduler) -> dict[str, Any]:
    def loop(swarm: cs.Swarm) -> tuple[float, str, str, list[float]]:
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 8))
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = swarm.elastic.optimizer(sgd, peers=2, scheduler=scheduler)
        meter = swarm.elastic.meter()
        random = torch.Generator().manual_seed(optimizer.member)
        missing = []
        for _ in range(STEPS):
            inputs = torch.randn(32, 64, generator=random)
            (model(inputs) - inputs[:, :8]).square().mean().backward()
            missing.append(optimizer.step(samples=32).missing)
            meter.tick()
        return swarm.runtime.loop.time(), repr(meter), meter._repr_mimebundle_()["text/html"], missing  # type: ignore[attr-defined]

    with cs.simulate(peers=2, network=SLOW, samples_per_s=320) as simulation:
        return simulation.run(loop)


def test_a_peer_that_does_not_wait_for_all_is_faster_and_the_meter_shows_its_distance() -> None:
    waiting, going_on = train(Synchronous())["alice"], train(NormBounded(0.3))["alice"]
    assert going_on[0] < 0.8 * waiting[0] and max(waiting[3]) == 0.0 < max(going_on[3])
    assert f"step {STEPS - 1}, 2 members; inconsistency 0 measured, 0 allowed" in waiting[1]
    assert "NormBounded(beta=0.3" in going_on[1] and "<polyline" in going_on[2]


def test_leaving_the_swarm_leaves_the_group() -> None:
    def loop(swarm: cs.Swarm) -> str:
        parameter = torch.nn.Parameter(torch.zeros(3))
        optimizer = swarm.elastic.optimizer(torch.optim.SGD([parameter]), peers=2)
        swarm.leave()
        with pytest.raises(RuntimeError, match="has left its group"):
            optimizer.step()
        with pytest.raises(RuntimeError, match="has left its swarm"):
            swarm.elastic.optimizer(torch.optim.SGD([parameter]), peers=2)
        return repr(optimizer)

    with cs.simulate(peers=2) as simulation:
        assert all("left" in told for told in simulation.run(loop).values())
