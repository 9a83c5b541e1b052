"""What the doctor predicts is what then happens: on a simulated network, and with two real peers as in the demo."""

from dataclasses import replace

import pytest
import torch

import colab_swarm as cs
from colab_swarm.events import StepFinished
from colab_swarm.net.carrier import Speed
from colab_swarm.sim import HostProfile, NetworkProfile
from colab_swarm.swarm.doctor import UNKNOWN, Subject, predict

NEAR = 0.3


def simulated_step_s(peers: int, subject: Subject, target: int, line: Speed) -> float:
    """Seconds of a step of peers that compute 10 samples/s each, start-up left out."""
    profile = NetworkProfile("test", line.rtt_s / 2, hosts=(HostProfile(line.upload_bps, line.download_bps),))

    def train(swarm: cs.Swarm) -> list[float]:
        weights = torch.nn.Parameter(torch.zeros(subject.parameters))
        optimizer = swarm.optimizer(torch.optim.SGD([weights], lr=0.1), target_batch_size=target)
        while optimizer.global_step < 12:
            weights.sum().backward()
            optimizer.step(samples=subject.micro_batch)
        return [event.at for event in swarm.events.recent(StepFinished) if isinstance(event, StepFinished)]

    with cs.simulate(peers, network=profile, seed=1, samples_per_s=10.0) as simulation:
        ends = simulation.run(train)["alice"]
    return (ends[-1] - ends[3]) / (len(ends) - 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("peers", "parameters", "line"),
    [
        (1, 1_000, UNKNOWN),
        (2, 1_000, replace(UNKNOWN, rtt_s=0.1)),
        (4, 1_000, replace(UNKNOWN, rtt_s=0.1)),
        (2, 250_000, Speed(8e6, 8e6, 0.002)),
        (4, 250_000, Speed(8e6, 8e6, 0.1)),
        (4, 100_000, Speed(2e6, 20e6, 0.06)),
    ],
)
def test_a_simulated_step_takes_as_long_as_predicted(peers: int, parameters: int, line: Speed) -> None:
    subject, target = Subject("model", parameters, 1.0, micro_batch=8, samples_per_s=10.0), 48 * peers
    predicted = predict(subject, target, 4 * parameters, (10.0,) * (peers - 1), line)
    assert predicted.step_s == pytest.approx(simulated_step_s(peers, subject, target, line), rel=NEAR)
