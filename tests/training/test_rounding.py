"""A simulation goes the same way whatever the last bits of its values, which differ between kinds of processors."""

from __future__ import annotations

import pytest

import colab_swarm as cs
from colab_swarm.events import Event, RoundFinished, StateReceived
from colab_swarm.swarm.swarm import Swarm
from tests.training.toy import ROWS, join_training, loss_of, model


def train(swarm: Swarm, rounding: float) -> bytes:
    """On a processor that rounds gradients in its own way; alice only helps."""
    if swarm.name == "alice":
        swarm.serve_as_reducer()
        return b""
    net = model()
    optimizer = join_training(swarm, net, target_batch_size=80)
    while optimizer.global_step < 6:
        loss = loss_of(net, optimizer.global_step, ROWS[swarm.name])
        (loss * (1 + rounding)).backward()
        optimizer.step(samples=10, loss=loss.item())
    return optimizer.lineage


def summary(event: Event) -> tuple[float, str, object]:
    """All but its values."""
    who = event.donors if isinstance(event, StateReceived) else None
    return event.at, type(event).__name__, event.contributors if isinstance(event, RoundFinished) else who


@pytest.mark.slow
def test_peers_cut_off_from_each_other_agree_on_the_same_one_however_values_are_rounded() -> None:
    ends, stories = set(), []
    for rounding in (0.0, 1e-6, 2e-6):
        with cs.simulate(1, network="home", seed=1, samples_per_s=10.0) as sim:
            for name in ("bob", "carol", "dave"):
                sim.join(name, listen=False)
            sim.network.at(5.0).crash("alice")  # no peer can reach another one
            sim.join("alice", at=25.0)
            results = sim.run(lambda swarm, rounding=rounding: train(swarm, rounding))
            assert [fault.name for fault in sim.network.fired] == ["crash"]
            logs = {name: swarm.events.recent() for name, swarm in sim.swarms.items()}
        ends.add(results["bob"])
        assert any(isinstance(event, StateReceived) for log in logs.values() for event in log)
        stories.append({name: [summary(event) for event in log] for name, log in logs.items()})
    assert len(ends) == 3, "the values did not differ"
    assert all(story == stories[0] for story in stories)
