"""Elastic training from the user's side, simulated."""

import pytest
import torch

import colab_swarm as cs
from colab_swarm.elastic import NormBounded


def test_peers_train_with_a_meter_and_leaving_the_swarm_leaves_the_group() -> None:
    def loop(swarm: cs.Swarm) -> tuple[str, str]:
        model = torch.nn.Linear(64, 8)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = swarm.elastic.optimizer(sgd, peers=2, scheduler=NormBounded(0.3))
        meter = swarm.elastic.meter()
        random = torch.Generator().manual_seed(optimizer.member)
        for _ in range(12):
            inputs = torch.randn(32, 64, generator=random)
            (model(inputs) - inputs[:, :8]).square().mean().backward()
            optimizer.step(samples=32)
            meter.tick()
        told = repr(meter), meter._repr_mimebundle_()["text/html"]
        swarm.leave()
        assert "left" in repr(optimizer)
        with pytest.raises(RuntimeError, match="has left its group"):
            optimizer.step()
        with pytest.raises(RuntimeError, match="has left its swarm"):
            swarm.elastic.optimizer(sgd, peers=2)
        return told

    with cs.simulate(peers=2, samples_per_s=320) as simulation:
        for text, html in simulation.run(loop).values():
            assert "step 11, 2 members; inconsistency" in text and "NormBounded(beta=0.3" in text
            assert "<polyline" in html
