"""Ten thousand virtual seconds of twenty peers of which a fifth lies: training goes on, to nearly the same loss."""

import itertools
import statistics
from typing import Any

import pytest
import torch

import colab_swarm as cs
from colab_swarm.events import Event, StepFinished
from colab_swarm.swarm.swarm import Swarm
from colab_swarm.training.layerwise import Lamb
from tests.sim.storm import MUCH, TIMES, Liar
from tests.training.test_robust import loss_of, student

PEERS, SECONDS, BATCH = 20, 10_000.0, 16
SAMPLES_PER_S = 0.64  # of a peer: a step takes about 50 s
LIES = {
    "peer16": ("swells", "weighs"),  # in the first half, and then
    "peer17": ("flips", "boasts"),
    "peer18": ("hangs", "babbles"),
    "peer19": ("promises", "flips"),
}


def train(swarm: Swarm, lies: tuple[str, ...], seconds: float, losses: dict[str, float]) -> None:
    net, order = student(), torch.Generator().manual_seed(swarm.id[0])
    settings: dict[str, Any] = {"target_batch_size": 2.0 * BATCH * PEERS, "robust": "clip"}
    optimizer = swarm.optimizer(Lamb(net.parameters(), lr=0.01), **settings)
    liars = [Liar(how, optimizer, swarm) for how in lies[:1]]
    while True:
        if lies and len(liars) == 1 and swarm.runtime.time() > seconds / 2:
            liars.append(Liar(lies[1], optimizer, swarm))
        how = liars[-1].how if liars else ""
        (TIMES.get(how, 1.0) * loss_of(net, BATCH, order)).backward()
        if how in TIMES or how == "weighs":
            liars[-1].on_lie()
        optimizer.step(samples=MUCH if how == "weighs" else BATCH)
        with torch.no_grad():
            losses[swarm.name] = loss_of(net, 2000, torch.Generator().manual_seed(7)).item()


def endure(lies: dict[str, tuple[str, ...]], seconds: float) -> tuple[float, list[float], set[str]]:
    """The honest peers' median loss at the end, the times of alice's steps, and all lies that were told."""
    losses: dict[str, float] = {}
    steps: list[float] = []
    told: set[str] = set()

    def work(swarm: Swarm) -> None:
        def hear(event: Event) -> None:
            if isinstance(event, StepFinished) and swarm.name == "alice":
                steps.append(event.at)
            elif swarm.name in LIES and str(getattr(event, "text", "")).startswith("it "):
                told.add(f"{swarm.name} {event.text}")  # type: ignore[attr-defined]

        swarm.events.listen(hear)
        train(swarm, lies.get(swarm.name, ()), seconds, losses)

    with cs.simulate(PEERS, network="lan", seed=1, samples_per_s=SAMPLES_PER_S) as simulation:
        simulation.run(work, seconds=seconds)
    return statistics.median(loss for name, loss in losses.items() if name not in LIES), steps, told


@pytest.mark.ordeal
def test_a_fifth_of_liars_neither_stops_training_nor_spoils_it() -> None:
    clean, undisturbed, none = endure({}, SECONDS)
    loss, steps, told = endure(LIES, SECONDS)
    assert not none and {lie.split()[-1] for lie in told} == {how for both in LIES.values() for how in both}
    assert loss < 1.1 * clean
    pauses = [after - before for before, after in itertools.pairwise(steps)]
    usual = statistics.median(b - a for a, b in itertools.pairwise(undisturbed))
    assert len(steps) > 0.7 * len(undisturbed) and max(pauses) < 3 * usual
