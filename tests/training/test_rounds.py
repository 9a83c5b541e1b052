"""A trainer that is kept out of the rounds is told why."""

from __future__ import annotations

import pytest

import colab_swarm as cs
from colab_swarm.events import Fault
from colab_swarm.swarm.swarm import Swarm
from tests.training.toy import join_training, loss_of, model, wait_for_peers


@pytest.mark.slow
def test_whoever_takes_another_codec_than_the_others_is_told_once() -> None:
    def train(swarm: Swarm) -> list[str]:
        net = model()
        codec = "float16" if swarm.name == "alice" else "float32"
        optimizer = join_training(swarm, net, compression=codec)
        wait_for_peers(swarm, optimizer, 3)
        for step in range(4):
            loss_of(net, step).backward()
            optimizer.step(samples=5)
        return [fault.text for fault in swarm.events.recent(Fault)]

    with cs.simulate(3, network="lan", seed=1, samples_per_s=10.0) as simulation:
        told = simulation.run(train, seconds=300)
    texts = [text for texts in told.values() for text in texts if "compression" in text]
    assert texts and len(texts) == len(set(texts))
    assert all("all peers of a run take the same model, codec and mean_codec" in text for text in texts)
